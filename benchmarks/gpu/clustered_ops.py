"""The device operations with every product that clusters can make made by them, however few its rows: what is worth it for
many alone is compared with transformers at all lengths. Gates and sums of few rows are made in both ways by turns."""

from typing import Any

import torch
from torch import Tensor

from headrace.runner.cuda.kernels.clustered_product import (
    GATE_WIDTHS,
    WIDE,
    clustered_gate,
    clustered_sum,
    clustered_turn,
)
from headrace.runner.cuda.kernels.crossed_product import crossed_gate, crossed_sums
from headrace.runner.cuda.kernels.norms import sum_rms_norm
from headrace.runner.cuda.ops import Turn
from headrace.runner.cuda.triton_ops import TritonOps


class ClusteredOps(TritonOps):
    def fuses(self, rows: int) -> bool:
        return False

    def turns(self, rows: int) -> bool:
        return False

    def gate_rows(self, rows: Tensor, weight: Tensor, room: Tensor, out: Tensor) -> None:
        if _crosses(rows):
            crossed_gate(rows, weight, out)
            return
        clustered_gate(rows, weight, out, GATE_WIDTHS[len(rows) % 3], self._clusters)

    def turn_rows(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, qkv: Tensor, turn: Turn, *, in_place: bool
    ) -> None:
        if bias is not None or turn.queries.shape[2] != 128 or len(weight) % WIDE:
            super().turn_rows(rows, weight, bias, qkv, turn, in_place=in_place)
        else:
            clustered_turn(rows, weight, qkv, turn, self._clusters)

    def sum_rows(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, room: Tensor, residual: Tensor, *norm: Any
    ) -> None:
        if bias is None and _crosses(rows) and len(weight) % 64 == 0:
            parts = residual.new_empty(1, *residual.shape, dtype=torch.float32)
            crossed_sums(rows, weight, parts)
            sum_rms_norm(parts, residual, *norm)
        elif bias is not None or len(weight) % WIDE:
            super().sum_rows(rows, weight, bias, room, residual, *norm)
        else:
            clustered_sum(rows, weight, residual, self._clusters)
            self.rms_norm(residual, *norm)


def _crosses(rows: Tensor) -> bool:
    return len(rows) <= 256 and len(rows) // 8 % 2 == 1
