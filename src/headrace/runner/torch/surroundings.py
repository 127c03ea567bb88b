"""What kernels depend on besides the model: processor, libraries, threads and this package itself."""

import hashlib
from pathlib import Path

import numpy as np
import torch

from headrace.core.proc import processor_lines


def surroundings() -> tuple[str, ...]:
    """Words that are the same only where nothing of this has changed."""
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(path.read_bytes())
    return (
        *processor_lines(),
        torch.__config__.show(),
        torch.__config__.parallel_info(),
        f"torch {torch.__version__}, numpy {np.__version__}",
        sources.hexdigest(),
    )
