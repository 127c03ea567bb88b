"""Who keeps the processes of a server alive: supervisor, restarts, reload."""
