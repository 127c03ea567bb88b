"""How a process that computes shares the cores of its machine with others, and what else libraries are told. Imports no
torch: it reads this when it is loaded."""

import os

_LIBRARIES = ("ATEN_", "DNNL_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "TORCH_")


def share_cores() -> None:
    """Threads that wait for work may spin for some microseconds and then must sleep: other processes need these
    cores. Read once, when torch is loaded."""
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def library_settings() -> dict[str, str]:
    """What the environment tells the libraries that compute."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_LIBRARIES)}
