"""The numerics fingerprint: what a logit's last bit depends on, as one short string."""

import hashlib
import platform
from collections.abc import Mapping

import msgspec
import torch

from headrace.runner.torch.attention import Cuts
from headrace.runner.torch.packing import Recipe

# Of how weights are made from a file's: rotated by threads that compute alone, a factor at a time where it lies.
_PACKING = 3


def fingerprint(digest: Mapping[str, str], recipe: Recipe, cuts: Cuts) -> str:
    """The integer kernel is left out: all agree to the last bit. Threads are, too: they cut no sum."""
    parts = (
        sorted(digest.items()),
        recipe.numerics(),
        _PACKING,
        ("kv", "fp32", cuts),
        (str(torch.__version__), platform.machine(), torch.backends.cpu.get_cpu_capability()),
    )
    return f"{recipe.dtype}-{hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]}"
