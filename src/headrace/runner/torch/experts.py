"""Experts in place of one feed-forward: a router chooses a few for each token and weighs what they give.

A row's choice depends on the row alone, every expert treats its rows alone, and what they give a row is added in the
order of experts: so neighbours that share an expert move no bit. Knows neither attention nor how linears are packed.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.runner.torch.feed_forward import FeedForward
from headrace.runner.torch.linear import Linear


class Experts:
    """`router` gives a score per expert. `normed`: the weights of those chosen are made to sum to 1."""

    def __init__(self, router: Linear, experts: Sequence[FeedForward], num_chosen: int, *, normed: bool) -> None:
        self._router = router
        self._experts = tuple(experts)
        self._num_chosen = num_chosen
        self._normed = normed

    def run(self, residual: Tensor) -> Tensor:
        chosen, weights = self.route(residual)
        total = torch.zeros_like(residual)
        for expert, places in self._by_expert(chosen):
            rows = places // self._num_chosen
            given = self._experts[expert].run(residual[rows])
            # An expert is chosen once by a row, so that every row is added to once.
            total.index_add_(0, rows, given.mul_(weights.view(-1, 1)[places]))
        return total

    def route(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Experts [t, chosen], the best first and of equals the lower, and their weights."""
        shares = torch.softmax(self._router.project_normed(residual), 1)
        ranked, order = shares.sort(stable=True, dim=1, descending=True)
        weights = ranked[:, : self._num_chosen].contiguous()
        if self._normed:
            # Added one after another, however many rows there are.
            weights = weights / weights.cumsum(1)[:, -1:]
        return order[:, : self._num_chosen].contiguous(), weights

    def rehearse(self, hidden_size: int, row_counts: Sequence[int]) -> None:
        """Let every expert see so many rows: libraries take memory for a matrix when it is first used, and no step is
        sure to ask all of them."""
        for count in row_counts:
            for expert in self._experts:
                expert.run(torch.zeros(count, hidden_size))

    @property
    def size_bytes(self) -> int:
        return self._router.size_bytes + sum(expert.size_bytes for expert in self._experts)

    def _by_expert(self, chosen: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each expert that somebody chose, in order, and the places of `chosen`, row by row, that name it."""
        named = chosen.numpy().reshape(-1)
        places = np.argsort(named, kind="stable")
        counts = np.bincount(named, minlength=len(self._experts))
        ends = np.cumsum(counts)
        for expert in np.flatnonzero(counts).tolist():
            yield expert, torch.from_numpy(places[ends[expert] - counts[expert] : ends[expert]])
