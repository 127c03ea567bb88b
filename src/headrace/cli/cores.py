"""How a process that computes shares the cores of its machine with others. Imports no torch: it reads this when it is loaded."""

import os


def share_cores() -> None:
    """Threads that wait for work may spin for some microseconds and then must sleep: other processes need these
    cores. Read once, when torch is loaded."""
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
