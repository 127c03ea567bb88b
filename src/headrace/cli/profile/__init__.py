"""`headrace models profile`: what a model does on this machine, measured, drawn and stored."""
