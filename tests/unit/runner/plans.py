"""Plans made by hand, for tests of a runner without an engine."""

from collections.abc import Sequence

import numpy as np

from headrace.core.config import EngineConfig
from headrace.core.plan import IntArray, Masks, Plan, SlotStart, StepResult, measure_work
from headrace.core.request import SamplingParams
from headrace.runner.fake import FakeRunner

Row = tuple[int, int, int, bool]
CONFIG = EngineConfig(slots=8, blocks=64, block_size=4, context_len=64, vocab_size=500, eos_ids=(0, 7))


def ints(values: Sequence[int]) -> IntArray:
    return np.array(values, np.int32)


def begin(
    slot: int,
    ids: Sequence[int],
    blocks: Sequence[int],
    *,
    number: int | None = None,
    num_computed: int = 0,
    num_prompt: int | None = None,
    seed: int = 0,
    choice: int = 0,
) -> SlotStart:
    number = slot if number is None else number
    return SlotStart(
        slot=slot,
        number=number,
        request_id=f"r{number}",
        ids=tuple(ids),
        num_prompt=len(ids) if num_prompt is None else num_prompt,
        num_computed=num_computed,
        blocks=tuple(blocks),
        sampling=SamplingParams(seed=seed),
        choice=choice,
    )


def plan(
    step: int,
    rows: Sequence[Row] = (),
    *,
    begun: Sequence[SlotStart] = (),
    grown: Sequence[tuple[int, int]] = (),
    freed: Sequence[int] = (),
    masked: Sequence[int] = (),
) -> Plan:
    """Rows are (slot, start, count, samples); grown are (slot, block)."""
    starts, counts = ints([row[1] for row in rows]), ints([row[2] for row in rows])
    return Plan(
        step=step,
        slots=ints([row[0] for row in rows]),
        starts=starts,
        counts=counts,
        samples=np.array([row[3] for row in rows], np.bool_),
        masked_rows=ints(masked),
        begun=tuple(begun),
        grown_slots=ints([slot for slot, _ in grown]),
        grown_blocks=ints([block for _, block in grown]),
        freed_blocks=ints(freed),
        work=measure_work(starts, counts),
        predicted_s=0.0,
        budget_s=0.0,
    )


def run(runner: FakeRunner, made: Plan, masks: Masks | None = None) -> StepResult:
    runner.launch(made)
    runner.sample(made.step, masks)
    return runner.collect()


def generate(
    runner: FakeRunner,
    start: SlotStart,
    num_tokens: int,
    *,
    chunk: int = 10**6,
    spare: Sequence[int] = (),
    first_step: int = 0,
) -> list[int]:
    """One sequence alone, prefilled in chunks; grows into `spare` blocks as it needs them."""
    left = list(spare)
    num_blocks, position, length = len(start.blocks), start.num_computed, len(start.ids)
    tokens: list[int] = []
    begun, step = [start], first_step
    while len(tokens) < num_tokens:
        count = min(chunk, length - position)
        grown: list[tuple[int, int]] = []
        while position + count > (num_blocks + len(grown)) * CONFIG.block_size:
            grown.append((start.slot, left.pop(0)))
        num_blocks += len(grown)
        samples = position + count == length
        result = run(runner, plan(step, [(start.slot, position, count, samples)], begun=begun, grown=grown))
        position, step, begun = position + count, step + 1, []
        if samples:
            tokens.append(int(result.tokens[0]))
            length += 1
    return tokens
