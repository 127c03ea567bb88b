"""Draws one id per row under temperature, min-p, top-k and top-p, in this order, each over what the last one left.

Probabilities become integers of 2^-30 before anything is summed. Integer sums are the same in any
order, so a row's token depends on its own logits, settings and random bits, never on its neighbours.
Filters cut the order of `sampler_ranks`: of equal logits the lower id stays. Knows no slot and no request.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.runner.torch import luck
from headrace.runner.torch.sampler_ranks import BLOCK, best

# Where min-p, top-p or a small top-k ends among so many ids, the best come first; of all others the lower id does, and what
# lies outside of the nucleus is drawn again. Cards do the same: but for rounding, one random number gives one token.
FEW = 64
_SOME = 256
_ONE = 2**30
# Probabilities over whole rows that are in memory at a time: 8 MiB, which the last cache still holds.
_ROOM = 2**21
# Logits over a temperature stay below this, so that no quotient overflows.
_MOST = 1e38


class Filters(NamedTuple):
    """Settings of rows in one table, [n, 4] float64: a row's settings are picked up at once."""

    table: Tensor

    @property
    def scale(self) -> Tensor:
        """One over the temperature."""
        return self.table[:, 0]

    @property
    def min_p(self) -> Tensor:
        """How far below the best logit an id may lie: negative; -inf is off."""
        return self.table[:, 1]

    @property
    def top_k(self) -> Tensor:
        """At least 1; the row's width or more is off."""
        return self.table[:, 2]

    @property
    def top_p(self) -> Tensor:
        """1 is off."""
        return self.table[:, 3]

    def take(self, rows: Tensor) -> "Filters":
        """The settings of these rows, which rise: as many as there are means all of them."""
        return self if len(rows) == len(self.table) else Filters(self.table.index_select(0, rows))


class Urn:
    """Owns the memory in which whole rows are weighed, a few rows at a time."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._width = width
        self._chunk = max(1, _ROOM // width)
        self._scaled = torch.empty(self._chunk, width, dtype=torch.float32, device=device)
        self._chances = torch.empty(self._chunk, width, dtype=torch.float32, device=device)
        self._ids = torch.arange(width, device=device)
        self._half = torch.tensor(0.5, device=device)

    def draw(self, logits: Tensor, maxima: Tensor, rows: Tensor, filters: Filters, bits: Tensor) -> Tensor:
        """An id for each of `rows`, which rise and have a finite best logit each. Overwrites `filters`."""
        peaks = maxima.index_select(0, rows).amax(-1)
        torch.minimum(filters.scale, _MOST / peaks.abs(), out=filters.scale)
        floors = (peaks + filters.min_p).float()
        ids = torch.full_like(rows, -1)
        # Where top-k or min-p ends the candidates soon, nobody needs the other ids' probabilities.
        limited, is_cut = filters.top_k < self._width, filters.min_p > -torch.inf
        few = is_cut | (limited & ((filters.top_k <= FEW) | (filters.top_p < 1)))
        some = is_cut | (limited & (filters.top_k <= _SOME))
        for width, draw, of in ((FEW, _draw_few, few), (_SOME, _draw_some, some)):
            pending = (of & (ids < 0)).nonzero().squeeze(-1)
            if len(pending):
                values, found = best(logits, maxima, rows[pending], width)
                ids[pending] = draw(values, found, floors[pending], filters.take(pending), bits[pending])
        for chunk in torch.split((ids < 0).nonzero().squeeze(-1), self._chunk):
            ids[chunk] = self._draw_whole(logits, maxima, rows[chunk], floors[chunk], filters.take(chunk), bits[chunk])
        return ids

    def _draw_whole(
        self, logits: Tensor, maxima: Tensor, rows: Tensor, floors: Tensor, filters: Filters, bits: Tensor
    ) -> Tensor:
        """Rows that need the probabilities of all ids."""
        count = len(rows)
        scaled, chances = self._scaled[:count], self._chances[:count]
        # Rows rise: as many as there are means all of them, and one pass instead of two.
        chosen = logits if count == len(logits) else torch.index_select(logits, 0, rows, out=scaled)
        torch.mul(chosen, filters.scale.float()[:, None], out=scaled)
        # A row of softmax is computed by itself, in an order that its length alone decides.
        torch.softmax(scaled, -1, out=chances)
        ids = torch.full_like(rows, -1)
        bare = (filters.min_p == -torch.inf) & (filters.top_k >= self._width)
        pending = (bare & (filters.top_p < 1)).nonzero().squeeze(-1)
        if len(pending):
            _, found = best(logits, maxima, rows[pending], FEW)
            weights = _weigh(chances[pending[:, None], found])
            ids[pending] = _draw_nucleus(weights, found, filters.top_p[pending], bits[pending])
        rest = (ids < 0).nonzero().squeeze(-1)
        if len(rest):
            masses = chances.index_select(0, rest) if len(rest) < count else chances
            torch.add(self._half, masses, alpha=_ONE, out=masses)
            ids[rest] = self._draw_any(logits, rows[rest], masses, floors[rest], filters.take(rest), bits[rest])
        return ids

    def _draw_any(
        self, logits: Tensor, rows: Tensor, masses: Tensor, floors: Tensor, filters: Filters, bits: Tensor
    ) -> Tensor:
        """By masses [n, width] float32 over all ids, whose integer parts are the weights; overwrites them."""
        cut = (filters.top_k < self._width) | (filters.min_p > -torch.inf)
        for row in cut.nonzero().squeeze(-1).tolist():
            _cut(masses[row], logits[rows[row]], floors[row], int(filters.top_k[row]))
        ids, totals = _pick(masses, bits)
        pending = (filters.top_p < 1).nonzero().squeeze(-1)
        if len(pending):
            limits = filters.top_p[pending] * totals[pending]
            masses, values = masses.index_select(0, pending), logits.index_select(0, rows[pending])
            ids[pending] = self._settle(ids[pending], values, masses, limits, bits[pending])
        return ids

    def _settle(self, ids: Tensor, values: Tensor, masses: Tensor, limits: Tensor, bits: Tensor) -> Tensor:
        """Draw again what lies outside of its nucleus: an id with at least the limit before it.

        That id and all after it leave the urn first. What is accepted in the end is distributed as the
        nucleus is, whose edge nobody has to find.
        """
        pending = torch.arange(len(ids), device=ids.device)
        attempt = 0
        while True:
            masses *= self._before(values, ids[pending])
            before = _block_sums(masses).sum(-1)
            # The best id has nothing before it and always counts.
            out = ((before > 0) & (before >= limits[pending])).nonzero().squeeze(-1)
            if not len(out):
                return ids
            attempt += 1
            pending, masses, values = pending[out], masses.index_select(0, out), values.index_select(0, out)
            ids[pending], _ = _pick(masses, luck.again(bits[pending], attempt))

    def _before(self, values: Tensor, ids: Tensor) -> Tensor:
        """[n, width]: 1 for every id that precedes the row's `ids`, otherwise 0."""
        bounds = values.gather(1, ids[:, None])
        # Comparisons into floats are several times as fast as into booleans.
        before = torch.gt(values, bounds, out=torch.empty_like(values))
        equal = torch.eq(values, bounds, out=torch.empty_like(values))
        if equal.sum() > len(ids):
            before += equal.mul_(self._ids < ids[:, None])
        return before


def _weigh(chances: Tensor) -> Tensor:
    return (chances * _ONE + 0.5).to(torch.int64)


def _draw_few(values: Tensor, ids: Tensor, floors: Tensor, filters: Filters, bits: Tensor) -> Tensor:
    """Among the best ids [n, k] of rows whose candidates may end there; -1 where they do not."""
    weights, ended = _weigh_best(values, floors, filters)
    sums = weights.cumsum(-1)
    limits = filters.top_p[:, None] * sums[:, -1:]
    drawn = _take(weights, sums, limits, ids, bits)
    return torch.where(ended, drawn, -1)


def _draw_some(values: Tensor, ids: Tensor, floors: Tensor, filters: Filters, bits: Tensor) -> Tensor:
    """The same in the order of ids, and as `Urn._settle` does."""
    weights, ended = _weigh_best(values, floors, filters)
    before = weights.cumsum(-1) - weights
    limits = filters.top_p * weights.sum(-1)
    ranks = torch.arange(ids.shape[1], device=ids.device)
    by_id = ids.argsort(-1)
    drawn = torch.full_like(bits, -1)
    pending = ended.nonzero().squeeze(-1)
    luck_now, attempt = bits, 0
    while len(pending):
        order = by_id[pending]
        sums = weights[pending].gather(1, order).cumsum(-1)
        place = (sums <= luck.below(luck_now[pending], sums[:, -1])[:, None]).sum(-1, keepdim=True)
        rank = order.gather(1, place)
        drawn[pending] = ids[pending].gather(1, rank).squeeze(-1)
        passed = before[pending].gather(1, rank).squeeze(-1)
        # That id and all after it leave the urn.
        weights[pending] *= ranks < rank
        attempt += 1
        luck_now = luck.again(bits, attempt)
        pending = pending[(passed > 0) & (passed >= limits[pending])]
    return drawn


def _weigh_best(values: Tensor, floors: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """Weights [n, k] of the best values of rows under min-p and top-k, and which rows' candidates end there."""
    ranks = torch.arange(values.shape[1], device=values.device)
    within = (ranks < filters.top_k[:, None]) & (values >= floors[:, None])
    scaled = (values * filters.scale.float()[:, None]).masked_fill_(~within, -torch.inf)
    ended = (filters.top_k <= values.shape[1]) | (values[:, -1] < floors) | (values[:, -1] == -torch.inf)
    return _weigh(torch.softmax(scaled, -1)), ended


def _draw_nucleus(weights: Tensor, ids: Tensor, top_p: Tensor, bits: Tensor) -> Tensor:
    """Among the best ids [n, k] of rows under top-p alone; -1 where the nucleus goes on after them."""
    sums = weights.cumsum(-1)
    limits = top_p[:, None] * _ONE
    drawn = _take(weights, sums, limits, ids, bits)
    return torch.where(sums[:, -1:] >= limits, drawn[:, None], -1).squeeze(-1)


def _take(weights: Tensor, sums: Tensor, limits: Tensor, ids: Tensor, bits: Tensor) -> Tensor:
    """An id of the shortest prefix whose weight reaches its limit; the first id always counts."""
    kept = sums - weights < limits
    kept[:, 0] = True
    totals = (weights * kept).sum(-1)
    place = (sums <= luck.below(bits, totals)[:, None]).sum(-1)
    return ids.gather(1, place[:, None]).squeeze(-1)


def _block_sums(masses: Tensor) -> Tensor:
    """[n, blocks] int32. A row's weights sum to about `_ONE`, so nothing overflows."""
    weights = masses.to(torch.int32)
    return weights.view(len(weights), -1, BLOCK).sum(-1, dtype=torch.int32)


def _pick(masses: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """(ids, totals): first the block, then the id in it."""
    rows = torch.arange(len(masses), device=masses.device)
    sums = _block_sums(masses).cumsum(-1)  # int64
    totals = sums[:, -1]
    mark = luck.below(bits, totals)
    block = (sums <= mark[:, None]).sum(-1)
    inside = masses.view(len(masses), -1, BLOCK)[rows, block].to(torch.int64)  # [n, BLOCK]
    mark = mark - (sums[rows, block] - inside.sum(-1))
    place = (inside.cumsum(-1) <= mark[:, None]).sum(-1)
    return block * BLOCK + place, totals


def _cut(masses: Tensor, values: Tensor, floor: Tensor, top_k: int) -> None:
    """Leave one row's mass to the ids that min-p and a large top-k keep."""
    kept = torch.ge(values, floor, out=torch.empty_like(values))
    if top_k < len(values):
        last = values.topk(top_k, sorted=False).values.amin()
        kept *= torch.ge(values, last, out=torch.empty_like(values))
        level = (values == last).nonzero().squeeze(-1)
        surplus = int((values > last).sum()) + len(level) - top_k
        kept[level[len(level) - surplus :]] = 0
    masses *= kept
