"""What the experts' kernels compute, in plain torch and float64: the truth they are tested against, and how to read them.

Nothing here is fast, and it waits for the device.
"""

import torch
from torch import Tensor

from headrace.runner.cuda.kernels.plain import silu_mul


def route(rows: Tensor, router: Tensor, num_chosen: int, *, normed: bool) -> tuple[Tensor, Tensor]:
    """Experts and their weights [rows, num chosen], the best first and of equals the lower."""
    shares = torch.softmax(rows.double() @ router.double().t(), 1)
    ranked, order = shares.sort(stable=True, dim=1, descending=True)
    weights = ranked[:, :num_chosen]
    return order[:, :num_chosen], weights / weights.sum(1, keepdim=True) if normed else weights


def experts(
    rows: Tensor,
    cells: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    num_chosen: int,
    *,
    normed: bool,
) -> Tensor:
    """`rows` [n, width]; `router` [experts, width]; `gate_up` [experts, 2 inner, width], gates first; `down`
    [experts, width, inner]. Rows whose cell is -1 are padding and become zeros."""
    total = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
    live = (cells >= 0).nonzero().squeeze(1)
    chosen, weights = route(rows[live], router, num_chosen, normed=normed)
    for expert in range(len(down)):
        named = chosen == expert
        asked = named.any(1)
        inner = silu_mul(rows[live[asked]].double() @ gate_up[expert].double().t())
        weight = torch.where(named, weights, 0.0).sum(1)[asked]
        total[live[asked]] += weight[:, None] * (inner @ down[expert].double().t())
    return total
