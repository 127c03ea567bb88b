"""Operations that follow a product, each by itself: what kernels that join them must give, and what runs where none does."""

from torch import Tensor

from headrace.runner.cuda.ops import Ops, Turn


class PartedOps:
    def turn_rows(
        self: Ops, rows: Tensor, weight: Tensor, bias: Tensor | None, qkv: Tensor, turn: Turn, *, in_place: bool
    ) -> None:
        self.product(rows, weight, bias, qkv)
        self.rotary_write(qkv, *turn, in_place=in_place)

    def gate_rows(self: Ops, rows: Tensor, weight: Tensor, room: Tensor, out: Tensor) -> None:
        self.product(rows, weight, None, room)
        self.silu_mul(room, out)

    def sum_rows(
        self: Ops,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        room: Tensor,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        out: Tensor,
    ) -> None:
        self.product(rows, weight, bias, room)
        self.add_rms_norm(room, residual, norm, eps, out)
