"""The experts' kernels against their plain reference in float64, on the card: sizes of real models, odd numbers of rows,
padding, a row that is not finite, memory poisoned before, and rows alone beside rows in company."""

from collections.abc import Iterator

import torch
from kernel_rig import relative_error

from headrace.runner.cuda.expert_space import ExpertSpace
from headrace.runner.cuda.kernels import plain_experts
from headrace.runner.cuda.kernels.experts import exact_experts, experts
from headrace.weights.shape import ExpertShape

# bf16 in, bf16 in the middle, bf16 out.
TOLERANCE = 8e-3


class Layer:
    def __init__(self, shape: ExpertShape, width: int, max_tokens: int) -> None:
        count, inner = shape.num_experts, shape.inner_size
        self.shape = shape
        self.router = _normal(count, width) * (4 / width**0.5)
        self.gate_up = _normal(count, 2 * inner, width) / width**0.5
        self.down = _normal(count, width, inner) / inner**0.5
        self.space = ExpertSpace.make(shape, width, max_tokens, torch.device("cuda"), torch.bfloat16)

    def run(self, rows: torch.Tensor, cells: torch.Tensor, *, exact: bool = False) -> torch.Tensor:
        space, shape, out = self.space, self.shape, torch.full_like(rows, torch.nan)
        for words in (space.chosen, space.counts, space.owners, space.order):
            words.fill_(1 << 30)
        for numbers in (space.weights, space.inner, space.given):
            numbers.fill_(torch.nan)
        run = exact_experts if exact else experts
        run(rows, cells, self.router, self.gate_up, self.down, shape.num_chosen, out, space, normed=shape.normed)
        return out

    def truth(self, rows: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        weights = (self.router, self.gate_up, self.down)
        return plain_experts.experts(rows, cells, *weights, self.shape.num_chosen, normed=self.shape.normed)


def expert_checks() -> Iterator[tuple[str, float, float]]:
    """(what, error, tolerance); an error of NaN is a failure too."""
    shapes = {"qwen3-30b": (ExpertShape(128, 8, 768), 2048), "mixtral": (ExpertShape(8, 2, 3584), 4096)}
    shapes["odd"] = (ExpertShape(60, 5, 200, normed=False), 1000)
    for name, (shape, width) in shapes.items():
        layer = Layer(shape, width, 600)
        for count in (1, 7, 64, 600 if shape.num_experts < 100 else 100):
            rows, cells = _normal(count, width), torch.arange(count, device="cuda")
            yield f"experts {name} {count}", relative_error(layer.run(rows, cells), layer.truth(rows, cells)), TOLERANCE
        rows, cells = _normal(90, width), torch.arange(90, device="cuda")
        cells[[0, 33, 89]] = -1
        calm = layer.run(rows, cells)
        rows[[5, 33]] = torch.nan
        got = layer.run(rows, cells)
        others = [row for row in range(90) if row != 5]
        wrong = (got[others] != calm[others]).sum() + got[[0, 33, 89]].ne(0).sum() + (~got[5].isnan()).sum()
        yield f"experts {name} NaN and padding", float(wrong), 0.0
        rows, cells = _normal(600, width), torch.arange(600, device="cuda")
        whole = layer.run(rows, cells, exact=True)
        spans = ((0, 1), (599, 600), (3, 40), (100, 600))
        moved = sum((layer.run(rows[a:b], cells[a:b], exact=True) != whole[a:b]).sum() for a, b in spans)
        yield f"experts {name} bits", float(moved), 0.0


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)
