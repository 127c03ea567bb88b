"""A Llama-shaped model on CPUs behind the Runner protocol, row-exact."""
