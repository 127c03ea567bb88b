"""The feed-forward of a layer: what it adds to the residual, and the Protocol that experts meet as well.

Acts on rows alone, like the decoder around it. Knows neither attention nor how linears are packed.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headrace.runner.torch.linear import Linear


class FeedForward(Protocol):
    def run(self, residual: Tensor) -> Tensor:
        """[t, hidden] before its norm -> new [t, hidden] to add. A row of it depends on the same row alone."""
        ...

    @property
    def size_bytes(self) -> int: ...


@dataclass(slots=True, frozen=True)
class PlainFeedForward:
    """`gate_up` is packed with both halves negated: silu(g) u = g' u' / (1 + exp g') for g' = -g, u' = -u."""

    gate_up: Linear
    down: Linear

    def run(self, residual: Tensor) -> Tensor:
        gate, up = self.gate_up.project_normed(residual).chunk(2, 1)
        divisor = gate.exp().add_(1.0)
        return self.down.project(gate.mul(up).div_(divisor))

    @property
    def size_bytes(self) -> int:
        return self.gate_up.size_bytes + self.down.size_bytes
