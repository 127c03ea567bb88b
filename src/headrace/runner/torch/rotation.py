"""A fixed rotation of the residual stream and of each head's values, folded into the weights.

RMSNorm and dot products do not see a rotation, so the model's output stays the same; but no channel stands
out any more, and 8 bits serve every channel alike. Knows tensors by the side they are read from, not by name.
"""

import torch
from torch import Tensor

_LARGEST_HADAMARD = 64
# Where it is the only one: many products of two rows each would take longer.
_LARGEST_ALONE = 128
# Weights that are turned at a time: few enough to stay in a processor's cache.
_SLICE = 1 << 18


class Rotation:
    """The orthogonal matrix Q of one size as a product of small factors, so that large models fold quickly."""

    def __init__(self, size: int) -> None:
        self._factors = [_factor(width) for width in _split(size)]
        # Larger products, or smaller ones, may have other last bits.
        self.lines_at_once = max(1, _SLICE // size)

    def turn_inputs(self, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """weight [n, size] -> weight Q: the layer now reads rotated rows. `out` may be the weight itself."""
        turned = torch.empty(weight.shape) if out is None else out
        step = self.lines_at_once
        for start in range(0, weight.shape[0], step):
            turned[start : start + step] = self.turn_lines(weight[start : start + step])
        return turned

    def turn_lines(self, weight: Tensor) -> Tensor:
        """The same of `lines_at_once` lines, or of fewer that are the last."""
        last = self._factors[-1]
        turned = weight.reshape(-1, last.shape[0]) @ last
        behind = last.shape[0]
        for factor in reversed(self._factors[:-1]):
            width = factor.shape[0]
            turned = factor.t() @ turned.view(-1, width, behind)
            behind *= width
        return turned.view(weight.shape)

    def turn_outputs(self, weight: Tensor) -> Tensor:
        """weight [size, k], or a bias [size] -> Qᵀ weight: the layer now writes rotated rows."""
        if weight.dim() == 1:
            return self.turn_inputs(weight.view(1, -1)).view(-1)
        return self.turn_inputs(weight.t().contiguous()).t().contiguous()


def _split(size: int) -> list[int]:
    """Factors of `size`: powers of two, the largest last, and before them what is left."""
    power = size & -size
    odd = size // power
    most = power if power <= _LARGEST_ALONE else _LARGEST_HADAMARD
    powers = []
    while power > 1:
        powers.append(min(most, power))
        power //= powers[-1]
    return [*([odd] if odd > 1 or not powers else []), *reversed(powers)]


def _factor(width: int) -> Tensor:
    """Hadamard's matrix for powers of two, the cosine transform for the rest: all entries of like size."""
    if width & (width - 1) == 0:
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while matrix.shape[0] < width:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
        return matrix.div_(float(width) ** 0.5).float()
    places = torch.arange(width, dtype=torch.float64)
    matrix = torch.cos((places[:, None] + 0.5) * places * (torch.pi / width)).mul_((2.0 / width) ** 0.5)
    matrix[:, 0] /= 2.0**0.5
    return matrix.float()
