# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""The best ids of a row without sorting it: device functions that sampling and scoring share.

Order is total and the same everywhere: higher logit first, lower id first among equals. The 64 best ids lie in the 64
best blocks of ids, so that a row is read once for its blocks' maxima and then only in those blocks.
"""

import triton
import triton.language as tl

# Ids of a block, and ids (and so blocks) that `best_few` finds.
BLOCK = 64
FEW = 64
# Ids that one program of the scan reads.
CHUNK = 4096

_BLOCK: tl.constexpr = tl.constexpr(BLOCK)
_FEW: tl.constexpr = tl.constexpr(FEW)
_CANDIDATES: tl.constexpr = tl.constexpr(BLOCK * FEW)
NOBODY: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def ordered(x):
    """Integers that order as float32 values do."""
    # Adding zero makes -0.0 equal to 0.0 in its bits too. A negative float's bits order backwards.
    raw = (x + 0.0).to(tl.int32, bitcast=True)
    return raw ^ ((raw >> 31) & 0x7FFFFFFF)


@triton.jit
def from_ordered(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def kth(keys, k):
    """The k-th largest of int32 keys, by quartering the range between the smallest and the largest."""
    low = tl.min(keys, 0).to(tl.int64)
    high = tl.max(keys, 0).to(tl.int64)
    while low < high:
        step = (high - low + 3) // 4
        first, second, third = low + step, low + 2 * step, low + 3 * step
        # Three counts in one sum.
        reached = (keys >= first.to(tl.int32)).to(tl.int64)
        reached += (keys >= second.to(tl.int32)).to(tl.int64) << 20
        reached += (keys >= third.to(tl.int32)).to(tl.int64) << 40
        counts = tl.sum(reached, 0)
        above_first = (counts & 0xFFFFF) >= k
        above_second = ((counts >> 20) & 0xFFFFF) >= k
        above_third = (counts >> 40) >= k
        last = high
        high = tl.where(above_third, last, tl.where(above_second, third, tl.where(above_first, second, first)) - 1)
        # Past the last key there is none to find.
        high = tl.minimum(high, last)
        low = tl.where(above_third, third, tl.where(above_second, second, tl.where(above_first, first, low)))
    return low.to(tl.int32)


@triton.jit
def first_few(keys):
    """Which of the keys are the FEW largest; of equal ones, those in front."""
    edge = kth(keys, _FEW)
    above = keys > edge
    level = (keys == edge).to(tl.int32)
    room = _FEW - tl.sum(above.to(tl.int32), 0)
    return above | ((level > 0) & (tl.cumsum(level, 0) <= room))


@triton.jit
def best_few(logits, maxima, ids_room, values_room, vocab, num_blocks: tl.constexpr, blocks: tl.constexpr):
    """(values, ids) of the FEW best, best first. A row with fewer ids ends in -inf. Rooms hold FEW words each."""
    # The low bits of a bfloat16's key say nothing.
    spare: tl.constexpr = 16 if logits.dtype.element_ty == tl.bfloat16 else 0
    b = tl.arange(0, blocks)
    keys = ordered(tl.load(maxima + b, mask=b < num_blocks, other=float("-inf")))
    chosen = first_few(keys >> spare)
    tl.store(ids_room + tl.cumsum(chosen.to(tl.int32), 0) - 1, b, mask=chosen)
    tl.debug_barrier()
    r = tl.arange(0, _FEW)
    block = tl.load(ids_room + r)
    tl.debug_barrier()
    ids = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    found = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    # Chosen blocks lie in the order of their ids, and so do the candidates.
    ids = tl.reshape(ids, [_CANDIDATES])
    found = tl.reshape(found, [_CANDIDATES])
    chosen = first_few(ordered(found) >> spare)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(ids_room + place, ids, mask=chosen)
    tl.store(values_room + place, found, mask=chosen)
    tl.debug_barrier()
    value, name = tl.load(values_room + r), tl.load(ids_room + r)
    tl.debug_barrier()
    equal = value[None, :] == value[:, None]
    better = (value[None, :] > value[:, None]) | (equal & (name[None, :] < name[:, None]))
    rank = tl.sum(better.to(tl.int32), 1)
    tl.store(ids_room + rank, name)
    tl.store(values_room + rank, value)
    tl.debug_barrier()
    return tl.load(values_room + r), tl.load(ids_room + r)
