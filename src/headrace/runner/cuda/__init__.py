"""A model on a CUDA card behind the Runner protocol. Everything but the kernels also runs on a CPU, for tests."""
