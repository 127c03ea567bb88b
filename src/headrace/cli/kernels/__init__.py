"""`headrace bench kernels`: what kernels reach of what this machine's memory and arithmetic allow. See `command.py`."""
