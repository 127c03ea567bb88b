"""The best ids of rows without sorting rows: by the maxima of blocks of ids.

Order is total and the same everywhere: higher logit first, lower id first among equals. The k best
ids lie in the k best blocks, so a row is read once for its maxima and then only in those blocks.
Knows neither probabilities nor slots.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 64
_LOW = 2**32 - 1


def padded_size(vocab_size: int) -> int:
    return -(-vocab_size // BLOCK) * BLOCK


def padded(logits: Tensor) -> Tensor:
    """Rows of whole blocks: ids past the vocabulary have no chance."""
    spare = -logits.shape[1] % BLOCK
    return pad(logits, (0, spare), value=-math.inf) if spare else logits.contiguous()


def block_maxima(logits: Tensor) -> Tensor:
    """[rows, blocks]; NaN where a block holds one."""
    rows, width = logits.shape
    return logits.view(rows, width // BLOCK, BLOCK).amax(-1)


def first_best(logits: Tensor, maxima: Tensor) -> Tensor:
    """The likeliest id of every row: `max` answers with the first of equals."""
    rows, blocks = maxima.shape
    block = maxima.max(-1).indices
    inside = logits.view(rows, blocks, BLOCK)[torch.arange(rows, device=logits.device), block]  # [rows, BLOCK]
    return block * BLOCK + inside.max(-1).indices


def best(logits: Tensor, maxima: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(values, ids), each [len(rows), count]: the `count` best of these rows, best first."""
    blocks = maxima.shape[1]
    count = min(count, logits.shape[1])
    if count < blocks:
        numbers = torch.arange(blocks, device=logits.device)
        chosen = _ids(_keys(maxima.index_select(0, rows), numbers).topk(count, sorted=False).values)  # [n, count]
        places = (rows[:, None] * blocks + chosen).view(-1)
        values = logits.view(-1, BLOCK).index_select(0, places).view(len(rows), -1)  # [n, count * BLOCK]
        ids = chosen[:, :, None] * BLOCK + torch.arange(BLOCK, device=logits.device)
        keys = _keys(values, ids.view(len(rows), -1))
    else:
        keys = _keys(logits.index_select(0, rows), torch.arange(logits.shape[1], device=logits.device))
    top = keys.topk(count).values
    return _values(top), _ids(top)


def _keys(values: Tensor, ids: Tensor) -> Tensor:
    """Integers that order as (value, lower id) do: no two of a row are equal."""
    # Adding zero makes -0.0 equal to 0.0 in its bits too.
    raw = (values + 0.0).view(torch.int32)
    # A negative float's bits order backwards: flip all but the sign.
    ordered = raw ^ ((raw >> 31) & 0x7FFFFFFF)
    return (ordered.to(torch.int64) << 32) + (_LOW - ids)


def _ids(keys: Tensor) -> Tensor:
    return _LOW - (keys & _LOW)


def _values(keys: Tensor) -> Tensor:
    ordered = (keys >> 32).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
