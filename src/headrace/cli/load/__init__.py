"""`headrace bench serve`: a load over HTTP, and what its clients saw. The command is `command.py`."""
