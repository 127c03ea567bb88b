"""Sums of the squares of rows, as launches leave them for the norm that comes next."""

from dataclasses import dataclass

import torch
from torch import Tensor

# A launch that writes rows leaves a sum for each so many columns, or for more of them.
LEAST_COLUMNS = 16


@dataclass(slots=True)
class Squares:
    """By parts of the columns: `sums` [parts, rows], float32, of which `parts` are in use."""

    sums: Tensor
    parts: int = 0

    @classmethod
    def make(cls, width: int, rows: int, device: torch.device) -> "Squares":
        return cls(torch.zeros(-(-width // LEAST_COLUMNS), rows, dtype=torch.float32, device=device))
