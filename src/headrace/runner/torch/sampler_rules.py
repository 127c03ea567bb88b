"""What one request forbids or favours among ids: allowed ids, bias, stops before `min_tokens`, grammar masks.

Rules are built when a slot begins and change rows of logits in place; a forbidden id becomes -inf.
Knows neither probabilities nor other requests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.core.plan import Masks, SlotStart


@dataclass(slots=True)
class Rules:
    """One slot's rules. An empty tensor is a rule that is not there."""

    allowed: Tensor
    bias_ids: Tensor
    bias: Tensor
    stops: Tensor
    # Stops are forbidden before this position of the sequence.
    stops_from: int

    def bind(self, position: int) -> bool:
        """Whether anything is to be done for the token at `position`."""
        return len(self.allowed) > 0 or len(self.bias_ids) > 0 or position < self.stops_from

    def apply(self, row: Tensor, position: int) -> None:
        if len(self.allowed):
            kept = row[self.allowed]
            row.fill_(-math.inf)
            row[self.allowed] = kept
        if len(self.bias_ids):
            row[self.bias_ids] += self.bias
        if position < self.stops_from:
            row[self.stops] = -math.inf


def rules_of(start: SlotStart, eos_ids: Sequence[int], device: torch.device) -> Rules | None:
    """None for a request without rules."""
    sampling = start.sampling
    stops = sampling.stop_ids if sampling.ignore_eos else (*sampling.stop_ids, *eos_ids)
    min_tokens = sampling.min_tokens if stops else 0
    if not sampling.allowed_ids and not sampling.logit_bias and not min_tokens:
        return None
    # An id named twice has the sum of its biases; an assignment to it twice would keep one of them.
    bias: dict[int, float] = {}
    for token, value in sampling.logit_bias:
        bias[token] = bias.get(token, 0.0) + value
    return Rules(
        allowed=torch.tensor(sampling.allowed_ids, dtype=torch.int64, device=device),
        bias_ids=torch.tensor(list(bias), dtype=torch.int64, device=device),
        bias=torch.tensor(list(bias.values()), dtype=torch.float32, device=device),
        stops=torch.tensor(stops, dtype=torch.int64, device=device),
        stops_from=start.num_prompt + min_tokens,
    )


def forbidden(masks: Masks, entries: Sequence[int], width: int) -> Tensor:
    """[entries, width] bool: the ids that these entries of the masks do not allow."""
    words = np.ascontiguousarray(masks.words[list(entries)], "<u4")
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little", count=min(width, 32 * words.shape[1]))
    barred = np.ones((len(words), width), np.bool_)
    barred[:, : bits.shape[1]] = bits == 0
    return torch.from_numpy(barred)
