"""A model on the CPU behind the Runner protocol: plans in, tokens out.

Owns the order of calls, time and each row's outcome. Computing happens inside `launch` and `sample`, so one
plan is in flight. The forward pass is `Decoder`'s, memory `KvCache`'s, choosing tokens `Sampler`'s.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.config import EngineConfig
from headrace.core.errors import InvalidModel, ModelTooLarge, RunnerFailed
from headrace.core.plan import IntArray, Masks, Plan, RowStatus, StepResult
from headrace.core.proc import free_memory_bytes, peak_resident_bytes, reset_peak, resident_bytes, trim_memory
from headrace.runner.torch.attention import CUTS, Attention, Cuts
from headrace.runner.torch.decoder import Decoder, DecoderWeights
from headrace.runner.torch.fingerprint import fingerprint
from headrace.runner.torch.kv_cache import KvCache
from headrace.runner.torch.memory import (
    DEFAULT_SHARE,
    MemoryPlan,
    check_weights_fit,
    plan_memory,
    workspace_bytes,
)
from headrace.runner.torch.packing import Packer, Recipe, num_threads, packed_bytes
from headrace.runner.torch.sampler import Sampler
from headrace.runner.torch.score_pile import ScorePile
from headrace.runner.torch.slot_table import SlotTable
from headrace.runner.torch.step_rows import StepRows, lay_out
from headrace.runner.torch.warm_up import probe_blocks, warm_up_plans
from headrace.weights.ahead import ReadAhead
from headrace.weights.checkpoint import Checkpoint, Progress

# Logits of prompt positions are made this many rows at a time.
_SCORED_ROWS = 64

IndexArray = NDArray[np.int64]


@dataclass(slots=True)
class _Flight:
    """A launched plan: which of its rows sample, their logits, and what is known of every row."""

    plan: Plan
    rows: IndexArray
    logits: Tensor
    statuses: NDArray[np.uint8]
    scores: ScorePile
    elapsed_s: float
    tokens: IntArray | None = None


class TorchRunner:
    """`poison` fills memory that is nobody's with NaN, for tests. `keep_logits` shows them in `last_logits`."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        recipe: Recipe,
        *,
        cuts: Cuts = CUTS[0],
        poison: bool = False,
        keep_logits: bool = False,
        progress: Progress | None = None,
    ) -> None:
        shape = checkpoint.shape
        if config.vocab_size != shape.vocab_size or config.context_len > shape.context_len:
            raise InvalidModel(
                f"the engine's vocabulary and context ({config.vocab_size}, {config.context_len}) are not the model's"
                f" ({shape.vocab_size}, at most {shape.context_len})"
            )
        self.recipe = recipe
        self.weights_bytes = 0
        # By plan row, of the last step.
        self.last_logits: dict[int, Tensor] = {}
        self._config = config
        self._shape = shape
        self._checkpoint = checkpoint
        self._cuts = cuts
        self._poison = poison
        self._keep_logits = keep_logits
        self._progress = progress
        self._decoder: Decoder | None = None
        self._weights: DecoderWeights
        self._cache: KvCache
        self._attention: Attention
        self._table: SlotTable
        self._sampler: Sampler
        self._flight: _Flight | None = None
        self._gone = "the model is not loaded"

    @property
    def depth(self) -> int:
        return 1

    @property
    def fingerprint(self) -> str:
        """Two runners with the same one give the same logits to the last bit."""
        return fingerprint(self._checkpoint.digest(), self.recipe, self._cuts)

    @property
    def config(self) -> EngineConfig:
        """As given, or with the blocks that `fit` found room for."""
        return self._config

    def load(self) -> None:
        """Read and pack the weights, dropping each array as soon as it is packed; then take the KV memory."""
        self._load_weights()
        self._place(self._config.blocks)

    def fit(self, share: float = DEFAULT_SHARE) -> MemoryPlan:
        """Load, see what a large step takes, and take as many blocks as memory has room for, at most `config.blocks`.

        The first steps let the libraries take what they keep; the peak of a chunk after them is workspace. A step may
        be larger than that chunk, so the sizes of its tensors count where they say more.
        """
        config, most = self._config, self._config.blocks
        check_weights_fit(packed_bytes(self._shape, self.recipe), free_memory_bytes())
        self._load_weights()
        self._place(min(most, probe_blocks(config)))
        self.warm_up()
        before, measurable = resident_bytes(), reset_peak()
        self._try_out([next(warm_up_plans(self._config))])
        measured = peak_resident_bytes() - before if measurable else 0
        workspace = max(measured, workspace_bytes(self._shape, config.max_step_tokens, config.slots))
        try:
            plan = plan_memory(
                self._shape,
                block_size=config.block_size,
                context_len=config.context_len,
                max_blocks=most,
                free_bytes=free_memory_bytes(),
                weights_bytes=self.weights_bytes,
                workspace_bytes=workspace,
                share=share,
            )
        except ModelTooLarge:
            self.close()
            raise
        self._place(plan.blocks)
        return plan

    def _load_weights(self) -> None:
        threads = num_threads(self._shape, free_memory_bytes() - packed_bytes(self._shape, self.recipe))
        packer = Packer(self._shape, self.recipe, self._config.max_step_tokens, threads)
        with torch.inference_mode(), closing(packer):
            with closing(ReadAhead(self._checkpoint.tensors(self._progress))) as tensors:
                packer.take(tensors)
            # What most layers took as they were read is free, and the threads' allocators keep it: the head would take new memory.
            trim_memory()
            self._weights = packer.finish()
        trim_memory()
        self.weights_bytes = self._weights.size_bytes

    def _place(self, blocks: int) -> None:
        """Take memory for this many blocks, in place of what was taken before."""
        self._config = replace(self._config, blocks=blocks)
        shape, config = self._shape, self._config
        with torch.inference_mode():
            self._cache = KvCache(shape, blocks, config.block_size, poison=self._poison)
            self._attention = Attention(shape, self._cache, self._cuts)
            self._decoder = Decoder(shape, self._weights, self._cache, self._attention, config.context_len)
        self._reset()
        self._gone = ""

    def warm_up(self) -> None:
        """Run steps of typical and of the largest size, so that no later one is the first of its kind."""
        self._check_usable()
        self._try_out(warm_up_plans(self._config))

    def _try_out(self, plans: Iterable[Plan]) -> None:
        for plan in plans:
            self.launch(plan)
            self.sample(plan.step, None)
            self.collect()
        with torch.inference_mode():
            self._cache.release(range(self._config.blocks))
        self._reset()

    def launch(self, plan: Plan) -> None:
        self._check_usable()
        if self._flight is not None:
            raise RunnerFailed(f"step {plan.step} is launched with 1 in flight already")
        started_s = time.perf_counter()
        try:
            with torch.inference_mode():
                self._flight = self._compute(plan)
        except (RunnerFailed, RuntimeError, IndexError) as error:
            self._gone = f"step {plan.step}: {error}"
            raise RunnerFailed(self._gone) from error
        self._flight.elapsed_s = time.perf_counter() - started_s

    def sample(self, step: int, masks: Masks | None) -> None:
        self._check_usable()
        flight = self._flight
        if flight is None or flight.tokens is not None or flight.plan.step != step:
            raise RunnerFailed(f"step {step} is sampled and is not the last launched, or was sampled before")
        started_s = time.perf_counter()
        plan, rows = flight.plan, flight.rows
        flight.tokens = np.full(len(plan.slots), -1, np.int32)
        if len(rows):
            slots, ends = plan.slots[rows], plan.starts[rows] + plan.counts[rows]
            sampled = self._sampler.sample(flight.logits, slots, ends, masks, rows.astype(np.int32))
            sound = sampled.statuses == RowStatus.OK
            flight.statuses[rows] = sampled.statuses
            flight.tokens[rows[sound]] = sampled.tokens[sound]
            self._table.append(slots[sound].astype(np.int64), ends[sound].astype(np.int64), sampled.tokens[sound])
            if sampled.scores is not None:
                flight.scores.add(sampled.scores)
        failed = flight.statuses != RowStatus.OK
        self._table.failed[plan.slots[failed]] = flight.statuses[failed]
        flight.elapsed_s += time.perf_counter() - started_s

    def collect(self) -> StepResult:
        self._check_usable()
        flight = self._flight
        if flight is None or flight.tokens is None:
            raise RunnerFailed("nothing that was sampled is in flight to collect")
        self._flight = None
        return StepResult(flight.plan.step, flight.tokens, flight.statuses, flight.elapsed_s, flight.scores.whole())

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        self._check_usable()
        with torch.inference_mode():
            return self._cache.export(blocks)

    def import_blocks(self, blocks: Sequence[int], payload: bytes) -> None:
        self._check_usable()
        with torch.inference_mode():
            self._cache.load(blocks, payload)

    def close(self) -> None:
        """Give the memory back; every later call fails."""
        self._gone = self._gone or "the runner is closed"
        self._decoder = None
        self._flight = None
        self.last_logits = {}
        for name in ("_cache", "_attention", "_weights"):
            if hasattr(self, name):
                delattr(self, name)

    def _reset(self) -> None:
        config = self._config
        self._table = SlotTable(config, self._attention.cuts.coarse)
        self._sampler = Sampler(config.slots, config.vocab_size, config.eos_ids, torch.device("cpu"))

    def _compute(self, plan: Plan) -> _Flight:
        self._cache.release(plan.freed_blocks.tolist())
        self._table.update(plan)
        for start in plan.begun:
            self._sampler.begin(start)
        statuses: NDArray[np.uint8] = self._table.failed[plan.slots].copy()
        live = np.flatnonzero(statuses == RowStatus.OK)
        flight = _Flight(plan, live[:0], torch.empty(0), statuses, ScorePile(), 0.0)
        if len(live):
            self._run_rows(flight, live)
        return flight

    def _run_rows(self, flight: _Flight, live: IndexArray) -> None:
        decoder, plan = self._decoder, flight.plan
        assert decoder is not None
        slots, starts, counts = (part[live].astype(np.int64) for part in (plan.slots, plan.starts, plan.counts))
        if counts.sum() > self._config.max_step_tokens:
            raise RunnerFailed(f"{counts.sum()} tokens are more than max_step_tokens, {self._config.max_step_tokens}")
        self._table.check(slots, starts + counts)
        step = lay_out(slots, starts, counts, self._table, self._cache, self._attention)
        self._cache.clear(step.fresh)
        residual = decoder.forward(step)
        rows = live[step.order]
        sound = _sound_places(residual, step)
        flight.statuses[rows[~sound]] = RowStatus.NOT_FINITE
        places = np.flatnonzero(plan.samples[rows] & sound)
        flight.rows = rows[places]
        if len(places):
            flight.logits = decoder.logits(residual[torch.from_numpy(step.lasts()[places])])
        if self._keep_logits:
            self.last_logits = {int(row): flight.logits[i].clone() for i, row in enumerate(flight.rows)}
        for place in np.flatnonzero(sound).tolist():
            slot = int(plan.slots[rows[place]])
            if self._sampler.wants_prompt_scores(slot):
                self._score_prompt(flight.scores, residual, step, place, slot, int(rows[place]))

    def _score_prompt(self, pile: ScorePile, residual: Tensor, step: StepRows, place: int, slot: int, row: int) -> None:
        """The token at position p predicts the prompt's id at p + 1."""
        assert self._decoder is not None
        prompt, first = self._table.prompt_ids(slot), int(step.firsts[place])
        start = int(step.positions[first])
        stop = min(start + int(step.counts[place]), len(prompt) - 1)
        for low in range(start, stop, _SCORED_ROWS):
            high = min(low + _SCORED_ROWS, stop)
            logits = self._decoder.logits(residual[first + low - start : first + high - start])
            positions = np.arange(low + 1, high + 1, dtype=np.int32)
            pile.add(self._sampler.score_prompt(logits, slot, row, positions, prompt[low + 1 : high + 1]))

    def _check_usable(self) -> None:
        if self._gone:
            raise RunnerFailed(f"the runner is unusable: {self._gone}")


def _sound_places(residual: Tensor, step: StepRows) -> NDArray[np.bool_]:
    """Whether all tokens of a place are finite: what is not must not reach the prefix cache."""
    finite = residual.isfinite().all(1).numpy()
    sound: NDArray[np.bool_] = np.logical_and.reduceat(finite, step.firsts)
    return sound
