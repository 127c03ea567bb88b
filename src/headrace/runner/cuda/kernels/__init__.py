"""Kernels of a decoder's step in Triton, one file each; `plain` says in torch what each of them computes."""
