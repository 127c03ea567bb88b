# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""The first kernel of a step: slots are changed as the packet says, and its tokens described.

It is the runner's own: it knows a packet's sections and the words of slots, and no model.
"""

import triton
import triton.language as tl
from torch import Tensor

from headrace.runner.cuda.device_slots import DeviceSlots, StepInputs
from headrace.runner.cuda.layout import HEADER, Layout

# Changed words that one program writes at a time, rows that it describes at least, and tokens that one describes.
_CHANGES = 1024
_ROWS = 256
_TOKENS = 256


def begin(packet: Tensor, layout: Layout, slots: DeviceSlots, inputs: StepInputs, block_size: int) -> None:
    """One program where rows are tokens, so that what it changed is what it reads; otherwise tokens come second."""
    words, at = slots.layout, {name: first for name, (first, _) in layout.sections.items()}
    _begin[(1,)](
        packet,
        slots.words,
        inputs.ids,
        inputs.positions,
        inputs.cells,
        layout.rows,
        at["ends"],
        at["changes"],
        words.at("lengths"),
        words.at("last"),
        words.tables_at,
        words.width,
        header=HEADER,
        block_size=block_size,
        # One kernel for most numbers of rows: each is compiled before the first request.
        rows_padded=max(_ROWS, triton.next_power_of_2(layout.rows)),
        changes=_CHANGES,
        describes=layout.tokens == 0,
        num_warps=8,
    )
    if layout.tokens:
        _describe[(triton.cdiv(layout.tokens, _TOKENS),)](
            packet,
            slots.words,
            inputs.ids,
            inputs.positions,
            inputs.cells,
            layout.tokens,
            at["ids"],
            at["positions"],
            at["owners"],
            words.at("last"),
            words.tables_at,
            words.width,
            header=HEADER,
            block_size=block_size,
            tile=_TOKENS,
            num_warps=2,
        )


@triton.jit(do_not_specialize=["num_rows", "ends_at", "changes_at"])
def _begin(
    packet,
    words,
    ids,
    positions,
    cells,
    num_rows,
    ends_at,
    changes_at,
    lengths_at,
    last_at,
    tables_at,
    width,
    header: tl.constexpr,
    block_size: tl.constexpr,
    rows_padded: tl.constexpr,
    changes: tl.constexpr,
    describes: tl.constexpr,
):
    count = tl.load(packet)
    i = tl.arange(0, changes)
    first = tl.full([], 0, tl.int32)
    while first < count:
        held = first + i < count
        pair = packet + changes_at + 2 * (first + i)
        address = tl.load(pair, mask=held, other=0)
        tl.store(words + address, tl.load(pair + 1, mask=held, other=0), mask=held)
        first += changes
    tl.debug_barrier()
    row = tl.arange(0, rows_padded)
    there = row < num_rows
    slot = tl.load(packet + header + row, mask=there, other=-1)
    end = tl.load(packet + ends_at + row, mask=there, other=1)
    live = slot >= 0
    tl.store(words + lengths_at + slot, end, mask=live)
    if describes:
        position = tl.where(live, end - 1, 0)
        block = tl.load(words + tables_at + slot * width + position // block_size, mask=live, other=0).to(tl.int64)
        tl.store(ids + row, tl.load(words + last_at + slot, mask=live, other=0), mask=there)
        tl.store(positions + row, position, mask=there)
        tl.store(cells + row, tl.where(live, block * block_size + position % block_size, -1), mask=there)


@triton.jit(do_not_specialize=["num_tokens", "ids_at", "positions_at", "owners_at"])
def _describe(
    packet,
    words,
    ids,
    positions,
    cells,
    num_tokens,
    ids_at,
    positions_at,
    owners_at,
    last_at,
    tables_at,
    width,
    header: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
):
    token = tl.program_id(0) * tile + tl.arange(0, tile)
    there = token < num_tokens
    owner = tl.load(packet + owners_at + token, mask=there, other=-1)
    slot = tl.load(packet + header + owner, mask=owner >= 0, other=-1)
    live = slot >= 0
    position = tl.load(packet + positions_at + token, mask=live, other=0)
    given = tl.load(packet + ids_at + token, mask=live, other=0)
    last = tl.load(words + last_at + slot, mask=live & (given < 0), other=0)
    block = tl.load(words + tables_at + slot * width + position // block_size, mask=live, other=0).to(tl.int64)
    tl.store(ids + token, tl.where(given < 0, last, given), mask=there)
    tl.store(positions + token, position, mask=there)
    tl.store(cells + token, tl.where(live, block * block_size + position % block_size, -1), mask=there)
