"""Where workers run, and the gateway's end of each."""
