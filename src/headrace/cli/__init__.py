"""The console command: the composition root, the only place that constructs and wires."""
