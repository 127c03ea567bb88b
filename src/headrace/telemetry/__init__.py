"""What the processes measure of themselves, in the form that Prometheus reads."""
