"""Plans that show a fresh runner every kind of step: a full chunk, one row, all rows. Knows no model."""

from collections.abc import Iterator

import numpy as np

from headrace.core.config import EngineConfig
from headrace.core.plan import IntArray, Plan, SlotStart, measure_work
from headrace.core.request import SamplingParams

_LARGEST_CHUNK = 64


def probe_blocks(config: EngineConfig) -> int:
    """Blocks that the plans below need to be as large as they get."""
    return max(config.slots, -(-chunk_tokens(config) // config.block_size))


def chunk_tokens(config: EngineConfig) -> int:
    """Tokens of the largest plan below, where blocks allow it."""
    return min(_LARGEST_CHUNK, config.context_len - 1, config.max_step_tokens)


def _ints(values: list[int]) -> IntArray:
    return np.array(values, np.int32)


def warm_up_plans(config: EngineConfig) -> Iterator[Plan]:
    """Slot contents and blocks are worthless afterwards."""
    room = config.blocks * config.block_size
    chunk = min(chunk_tokens(config), room)
    rows = min(config.slots, config.blocks, config.max_step_tokens)
    for step, (count, length) in enumerate(((1, chunk), (1, 1), (rows, 1))):
        yield _plan(step, count, length, config)


def _plan(step: int, count: int, length: int, config: EngineConfig) -> Plan:
    each = -(-length // config.block_size)
    starts, counts = _ints([0] * count), _ints([length] * count)
    begun = tuple(
        SlotStart(
            slot=slot,
            number=slot,
            request_id="warm-up",
            ids=(0,) * length,
            num_prompt=length,
            num_computed=0,
            blocks=tuple(range(slot * each, (slot + 1) * each)),
            sampling=SamplingParams(temperature=0.0),
            choice=0,
        )
        for slot in range(count)
    )
    return Plan(
        step=step,
        slots=_ints(list(range(count))),
        starts=starts,
        counts=counts,
        samples=np.ones(count, np.bool_),
        masked_rows=_ints([]),
        begun=begun,
        grown_slots=_ints([]),
        grown_blocks=_ints([]),
        freed_blocks=_ints([]),
        work=measure_work(starts, counts),
        predicted_s=0.0,
        budget_s=0.0,
    )
