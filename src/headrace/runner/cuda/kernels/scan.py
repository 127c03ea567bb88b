# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""One pass over logits, spread over the card: of every chunk its best id and its weight, of every block its maximum.

What sampling and scoring do afterwards needs one program per row. A chunk with a NaN has NaN for its best value.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.runner.cuda.kernels.ranks import BLOCK, CHUNK, FEW

_BLOCK: tl.constexpr = tl.constexpr(BLOCK)
_CHUNK: tl.constexpr = tl.constexpr(CHUNK)


@dataclass(slots=True, frozen=True)
class Scan:
    """Of [rows, chunks] the best value, its id and the sum of exp((x - best) / temperature); maxima of blocks; room for
    the few best of each row."""

    vocab_size: int
    maxima: Tensor
    best: Tensor
    at: Tensor
    mass: Tensor
    ids_room: Tensor
    values_room: Tensor

    @classmethod
    def make(cls, rows: int, vocab_size: int, device: torch.device | str) -> "Scan":
        chunks = -(-vocab_size // CHUNK)

        def room(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(rows, width, dtype=dtype, device=device)

        return cls(
            vocab_size=vocab_size,
            maxima=room(chunks * (CHUNK // BLOCK), torch.float32),
            best=room(chunks, torch.float32),
            at=room(chunks, torch.int32),
            mass=room(chunks, torch.float32),
            ids_room=room(FEW, torch.int32),
            values_room=room(FEW, torch.float32),
        )

    @property
    def chunks(self) -> int:
        return self.best.shape[1]

    @property
    def num_blocks(self) -> int:
        return self.maxima.shape[1]


def scan(logits: Tensor, places: Tensor, temperature: Tensor | None, into: Scan) -> None:
    """Row i of `into` is about row i of the logits, with `temperature[places[i]]`; or, without temperatures, about row
    `places[i]` at temperature 1. A place of -1 is padding: nothing is read or written."""
    rows = places.shape[0]
    assert logits.shape[1] == into.vocab_size and rows <= into.best.shape[0]
    _scan[(rows, into.chunks)](
        logits,
        places,
        into.best if temperature is None else temperature,
        into.maxima,
        into.best,
        into.at,
        into.mass,
        logits.stride(0),
        vocab=into.vocab_size,
        chunks=into.chunks,
        named=temperature is None,
        num_warps=4,
    )


@triton.jit
def _scan(
    logits,
    places,
    temperature,
    maxima,
    best,
    at,
    mass,
    stride,
    vocab: tl.constexpr,
    chunks: tl.constexpr,
    named: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places + row)
    if place >= 0:
        line = row
        if named:
            line = place.to(tl.int64)
        ids = chunk_ids(chunk)
        x = tl.load(logits + line * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        warmth = 1.0
        if not named:
            warmth = tl.load(temperature + place)
        take_stock(x, ids, row, chunk, warmth, maxima, best, at, mass, chunks)


@triton.jit
def chunk_ids(chunk):
    """[blocks, ids of a block]."""
    block = tl.arange(0, _CHUNK // _BLOCK)
    return chunk * _CHUNK + block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]


@triton.jit
def take_stock(x, ids, row, chunk, warmth, maxima, best, at, mass, chunks: tl.constexpr):
    """What a scan leaves of one chunk of one row: values `x` [blocks, ids of a block] of `ids`."""
    blocks: tl.constexpr = _CHUNK // _BLOCK
    # A comparison with NaN is false, so that no maximum is one.
    broken = tl.max(tl.max((x != x).to(tl.int32), 1), 0) > 0
    x = tl.where(x != x, float("-inf"), x)
    tops = tl.max(x, 1)
    tl.store(maxima + row * (chunks * blocks) + chunk * blocks + tl.arange(0, blocks), tops)
    peak = tl.max(tops, 0)
    first = tl.min(tl.min(tl.where(x == peak, ids, 2147483647), 1), 0)
    home = row * chunks + chunk
    tl.store(best + home, tl.where(broken, float("nan"), peak))
    tl.store(at + home, first)
    if warmth > 0.0:
        anchor = tl.where(peak == float("-inf"), 0.0, peak)
        tl.store(mass + home, tl.sum(tl.sum(tl.exp((x - anchor) / warmth), 1), 0))
