"""Measures what a runner's steps cost, before any request is let in.

Owns the few synthetic steps and the profile fitted to them. Works on any runner; afterwards every slot
and block it used is as free as before.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.core.config import CostProfile, EngineConfig
from headrace.core.plan import IntArray, Plan, SlotStart, Work, measure_work
from headrace.core.ports import Runner
from headrace.core.request import SamplingParams
from headrace.engine.cost import fit_profile

Scenes = tuple[tuple[int, tuple[int, ...]], ...]
# Rows, and the chunks that each row's prompt is computed in. Decode steps of all rows follow, and of one row where none was seen.
SCENES: Scenes = ((1, (64, 16)), (8, (4,)), (32, (1,)))
# What a card must be asked to show its pace: it is idle in anything smaller.
CARD_SCENES: Scenes = (
    (1, (64,)),
    (1, (2048, 512)),
    (1, (6000, 2048)),
    (8, (1000,)),
    (64, (128,)),
    (256, (24,)),
    (256, (4,)),
)
# The first step of a kind is often slow: of decode steps the quickest counts.
_DECODE_STEPS = 2
_NONE = np.zeros(0, np.int32)
# The engine counts its steps from zero.
_FIRST_STEP = -1_000_000


def measure_profile(
    runner: Runner, config: EngineConfig, scenes: Scenes = SCENES, seen: Sequence[tuple[Work, float]] = ()
) -> CostProfile:
    """Run a few steps of different shapes and fit their times; too small an engine is taken at its profile. Steps that were
    `seen` just now count as well: of those that did the same, the quickest. Where one row alone was seen to decode, it
    does so only in scenes of its own."""
    if min(config.context_len, config.blocks * config.block_size) <= 2 * _DECODE_STEPS + 1:
        return config.profile
    stage = _Stage(runner, config)
    quickest: dict[Work, float] = {}
    for work, seconds in seen:
        quickest[work] = min(seconds, quickest.get(work, seconds))
    alone = () if any((work.decode_rows, work.prefill_tokens) == (1, 0) for work in quickest) else (1,)
    played = [step for rows, chunks in scenes for step in _play(stage, rows, chunks, alone)]
    return fit_profile([*quickest.items(), *played], config.profile)


def _play(stage: "_Stage", rows: int, chunks: tuple[int, ...], alone: tuple[int, ...]) -> Iterator[tuple[Work, float]]:
    rows, chunks = stage.shrink(rows, chunks)
    stage.enter(rows, sum(chunks))
    for count in chunks:
        yield stage.step(rows, count)
    for decoding in dict.fromkeys((rows, *alone)):
        yield min((stage.step(decoding, 1) for _ in range(_DECODE_STEPS)), key=lambda step: step[1])
    stage.leave()


@dataclass(slots=True)
class _Stage:
    """Plans made by hand: occupants of the first slots, all of one length, and the blocks they were given."""

    runner: Runner
    config: EngineConfig
    next_step: int = _FIRST_STEP
    starts: list[SlotStart] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    num_blocks: int = 0

    def shrink(self, rows: int, chunks: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """As much of a scene as the engine has room for."""
        config = self.config
        chunks = tuple(max(1, min(count, config.max_step_tokens // rows)) for count in chunks)
        rows = min(rows, config.slots, config.blocks // self._blocks_for(sum(chunks)) or 1)
        if sum(chunks) + 2 * _DECODE_STEPS <= min(config.context_len, config.blocks * config.block_size):
            return rows, chunks
        return 1, (1,)

    def enter(self, rows: int, tokens: int) -> None:
        each = min(self._blocks_for(tokens), self.config.blocks // rows)
        ids = np.random.default_rng(0).integers(0, self.config.vocab_size, (rows, tokens)).tolist()
        greedy = SamplingParams(temperature=0.0)
        self.starts = [
            SlotStart(slot, -1 - slot, f"warm-up {slot}", tuple(ids[slot]), tokens, 0, blocks, greedy, 0)
            for slot in range(rows)
            for blocks in [tuple(range(slot * each, (slot + 1) * each))]
        ]
        self.computed = [0] * rows
        self.num_blocks = rows * each

    def step(self, rows: int, count: int) -> tuple[Work, float]:
        """Each of the first `rows` computes `count` tokens more; what that is, and how long it took."""
        starts = np.array(self.computed[:rows], np.int32)
        counts = np.full(rows, count, np.int32)
        begun = tuple(self.starts) if not any(self.computed) else ()
        length = self.starts[0].num_prompt
        elapsed_s = self._run(starts, counts, starts + counts >= length, begun=begun)
        self.computed[:rows] = (starts + counts).tolist()
        return measure_work(starts, counts), elapsed_s

    def leave(self) -> None:
        self._run(_NONE, _NONE, np.zeros(0, np.bool_), freed=np.arange(self.num_blocks, dtype=np.int32))

    def _blocks_for(self, tokens: int) -> int:
        return -(-(tokens + 2 * _DECODE_STEPS) // self.config.block_size)

    def _run(
        self,
        starts: IntArray,
        counts: IntArray,
        samples: np.ndarray,
        *,
        begun: tuple[SlotStart, ...] = (),
        freed: IntArray = _NONE,
    ) -> float:
        plan = Plan(
            step=self.next_step,
            slots=np.arange(len(starts), dtype=np.int32),
            starts=starts,
            counts=counts,
            samples=samples,
            masked_rows=_NONE,
            begun=begun,
            grown_slots=_NONE,
            grown_blocks=_NONE,
            freed_blocks=freed,
            work=measure_work(starts, counts),
            predicted_s=0.0,
            budget_s=0.0,
        )
        self.next_step += 1
        self.runner.launch(plan)
        self.runner.sample(plan.step, None)
        return self.runner.collect().elapsed_s
