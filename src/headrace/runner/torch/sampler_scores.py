"""Log-probabilities of ids and of the likeliest alternatives, as the model gave them.

They are those of the raw logits: before rules, penalties, temperature and filters.
Knows no slot; the caller says how many alternatives each row asked for.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.plan import IntArray, Scores
from headrace.runner.torch.sampler_ranks import best, block_maxima

# Rows whose log-probabilities over the vocabulary are in memory at a time.
_CHUNK = 16


class Asked(NamedTuple):
    """Which rows are scored, for whom, and with how many alternatives; one entry each."""

    owners: NDArray[np.int64]
    positions: IntArray
    alternatives: NDArray[np.int64]


def score(logits: Tensor, ids: Tensor, asked: Asked) -> Scores:
    """`logits` [n, width] predict `ids` [n]. An alternative without any probability is left out (-1)."""
    most = int(asked.alternatives.max(initial=0))
    counts = torch.from_numpy(asked.alternatives).to(logits.device)
    parts = [
        _score_chunk(logits[at : at + _CHUNK], ids[at : at + _CHUNK], counts[at : at + _CHUNK], most)
        for at in range(0, len(ids), _CHUNK)
    ]
    logprobs, top_ids, top_logprobs = (torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))
    return Scores(asked.owners, asked.positions, logprobs, top_ids, top_logprobs)


def _score_chunk(logits: Tensor, ids: Tensor, counts: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    logprobs = torch.log_softmax(logits, -1)
    rows = torch.arange(len(ids), device=logits.device)
    if most:
        _, found = best(logits, block_maxima(logits), rows, most)
    else:
        found = ids.new_empty(len(ids), 0)
    tops = logprobs.gather(1, found)
    # NaN is kept, so that a broken row is seen to be broken.
    absent = (torch.arange(found.shape[1], device=logits.device) >= counts[:, None]) | (tops == -torch.inf)
    found = found.masked_fill(absent, -1).to(torch.int32)
    if found.shape[1] < most:
        short = most - found.shape[1]
        found = torch.nn.functional.pad(found, (0, short), value=-1)
        tops = torch.nn.functional.pad(tops, (0, short), value=-torch.inf)
        absent = found < 0
    return logprobs[rows, ids], found, tops.masked_fill(absent, -torch.inf)
