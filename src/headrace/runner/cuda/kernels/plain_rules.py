"""Rules and scores of a row in plain torch: what the kernels compute, in float32, and how to read them."""

import torch
from torch import Tensor

from headrace.runner.cuda.odd_space import PROMPT_BIT, Rules


def ruled(raw: Tensor, rules: Rules, row: int) -> Tensor:
    """`raw` [vocabulary] under the rules of this row, in float32."""
    values = raw.float().clone()
    if (line := int(rules.bias_lines[row])) >= 0:
        values += rules.bias[line]
    for pool, lines in ((rules.limits, rules.limit_lines), (rules.masks, rules.mask_lines)):
        if (line := int(lines[row])) >= 0:
            values[~allowed(pool[line], len(raw))] = -torch.inf
    if (line := int(rules.count_lines[row])) >= 0:
        counts = rules.counts[line]
        repetition, frequency, presence = rules.factors[:, row]
        again = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(counts != 0, again, values)
        counts = counts & (PROMPT_BIT - 1)
        values = values - frequency * counts
        values = values - presence * (counts > 0)
    # NaN and +inf mean that the model failed.
    return torch.where(raw.isnan() | raw.isposinf(), raw.float(), values)


def allowed(words: Tensor, vocab_size: int) -> Tensor:
    """[vocabulary] bool: bit v of the words, little end first."""
    ids = torch.arange(vocab_size, device=words.device)
    return ((words[ids // 32] >> (ids % 32)) & 1) != 0


def scores(raw: Tensor, token: int, alternatives: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The token's log-probability; the likeliest ids [width], of equal ones the lower first, -1 past what was asked and
    what there is; and theirs."""
    logprobs = raw.float().log_softmax(-1)
    order = torch.argsort(raw.float(), descending=True, stable=True)[:alternatives]
    order = order[logprobs[order] > -torch.inf]
    top_ids = torch.full((width,), -1, dtype=torch.int32, device=raw.device)
    top_logprobs = torch.full((width,), -torch.inf, device=raw.device)
    top_ids[: len(order)] = order.int()
    top_logprobs[: len(order)] = logprobs[order]
    return logprobs[token], top_ids, top_logprobs
