"""A model on a CUDA card behind the Runner protocol: plans in, tokens out, two of them in flight.

Owns the order of calls and each row's outcome. A launch sends one packet and starts one graph (decode rows alone) or
the same step without one, and what odd rows need beside it; nothing here waits for the device but `collect`, scores of
prompts, and a launch that finds no memory.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.config import EngineConfig
from headrace.core.errors import InvalidInput, InvalidModel, ModelTooLarge, OutOfRoom, RunnerFailed
from headrace.core.plan import IntArray, Masks, Plan, RowStatus, StepResult
from headrace.runner.cuda.decoder import Workspace
from headrace.runner.cuda.fingerprint import fingerprint
from headrace.runner.cuda.flight import Envelope, Flight
from headrace.runner.cuda.fp8_weights import in_eights
from headrace.runner.cuda.host_slots import HostSlots
from headrace.runner.cuda.kv_pool import KvPool
from headrace.runner.cuda.lane import Lane
from headrace.runner.cuda.layout import Layout
from headrace.runner.cuda.machine import Machine
from headrace.runner.cuda.memory import DEFAULT_SHARE, plan_blocks, sentences
from headrace.runner.cuda.odd_rows import OddRows
from headrace.runner.cuda.ops import Ops
from headrace.runner.cuda.packet import Laid, chunk_packet, decode_packet, mixed_packet, padding_packet, put_changes
from headrace.runner.cuda.presence import fp8_refusal
from headrace.runner.cuda.prompt_scores import PromptScores
from headrace.runner.cuda.shortage import fits
from headrace.runner.cuda.weights import Weights, WeightSource, blank_weights, weights_bytes
from headrace.runner.torch.memory import MemoryPlan
from headrace.runner.torch.score_pile import ScorePile
from headrace.weights.shape import ModelShape

DEPTH = 2
_PROBE_BLOCKS = 64
_MIB = 1 << 20


class CudaRunner:
    """`digest` names the weights, and is asked after they are read. `fp8`: matrices of layers and what they multiply have
    eight bits, everything else has `dtype`. `poison` fills memory that is nobody's with NaN and
    `keep_logits` shows them in `last_logits`, both for tests."""

    def __init__(
        self,
        config: EngineConfig,
        shape: ModelShape,
        source: WeightSource,
        ops: Ops,
        lane: Lane,
        *,
        dtype: torch.dtype = torch.bfloat16,
        fp8: bool = False,
        digest: Callable[[], dict[str, str]] = dict,
        poison: bool = False,
        keep_logits: bool = False,
    ) -> None:
        if config.vocab_size != shape.vocab_size or config.context_len > shape.context_len:
            raise InvalidModel(
                f"the engine's vocabulary and context ({config.vocab_size}, {config.context_len}) are not the model's"
                f" ({shape.vocab_size}, at most {shape.context_len})"
            )
        if fp8:
            _check_fp8(shape, ops)
        self.weights_bytes = 0
        # By plan row, of the last step.
        self.last_logits: dict[int, Tensor] = {}
        self.notes: tuple[str, ...] = ()
        part_tokens = config.part_tokens or min(ops.tile_rows, config.max_step_tokens)
        self._config = replace(config, part_tokens=part_tokens)
        self._shape = shape
        self._source = in_eights(source) if fp8 else source
        self._fp8 = fp8
        self._ops = ops
        self._lane = lane
        self._dtype = dtype
        self._digest = digest
        self._poison = poison
        self._keep_logits = keep_logits
        self._weights: Weights | None = None
        self._machine: Machine
        self._pool: KvPool
        self._slots: HostSlots
        self._odd: OddRows
        self._prompts: PromptScores
        self._space: Workspace
        self._envelopes: deque[Envelope] = deque()
        self._flights: deque[Flight] = deque()
        # By a machine of the same sizes, which is all that compiling asks for: that one has a layer of each kind.
        self._is_rehearsed = False
        # Whose steps take no memory.
        self._graphed: frozenset[Layout] = frozenset()
        self._gone = "the model is not loaded"

    @property
    def depth(self) -> int:
        return DEPTH

    @property
    def config(self) -> EngineConfig:
        """As given, with the tokens of a tile, and the blocks that `fit` found room for."""
        return self._config

    @property
    def num_graphs(self) -> int:
        return self._machine.num_graphs

    @property
    def fingerprint(self) -> str:
        """Two runners with the same one run the same kernels on the same weights."""
        return fingerprint(self._digest(), self._dtype, self._ops.name, self._lane.device, fp8=self._fp8)

    def load(self) -> None:
        """Read the weights and take the memory of `config.blocks` blocks."""
        self._load_weights()
        self._place(self._config.blocks)

    def fit(self, share: float = DEFAULT_SHARE) -> MemoryPlan:
        """Load, and take as many blocks as the card has room for, at most `config.blocks`; `notes` says how many."""
        self._check_room()
        with self._room():
            return self._fit(share)

    def warm_up(self) -> None:
        """Compile everything, capture the usual graphs; no slot and no block changes."""
        self._check_usable()
        with self._room(), torch.inference_mode(), self._lane.scope():
            if not self._is_rehearsed:
                self._machine.rehearse()
            self._machine.capture()
        self._graphed = frozenset(self._machine.choice.all())

    def launch(self, plan: Plan) -> None:
        self._check_usable()
        if self._flights and not self._flights[-1].is_sampled:
            raise RunnerFailed(f"step {plan.step} is launched before step {self._flights[-1].plan.step} is sampled")
        if len(self._flights) >= DEPTH:
            raise RunnerFailed(f"step {plan.step} is launched with {DEPTH} in flight already")
        with self._step(plan.step), torch.inference_mode(), self._lane.scope():
            self._flights.append(self._start(plan))

    def sample(self, step: int, masks: Masks | None) -> None:
        """The graph has sampled; odd rows are amended. Then the answer is sent for."""
        self._check_usable()
        flight = self._flights[-1] if self._flights else None
        if flight is None or flight.is_sampled or flight.plan.step != step:
            raise RunnerFailed(f"step {step} is sampled and is not the last launched, or was sampled before")
        flight.is_sampled = True
        plan, rows, envelope = flight.plan, flight.laid.sampling, flight.envelope
        odd = self._slots.is_special(plan.slots[rows], plan.starts[rows] + plan.counts[rows])
        with self._step(step), torch.inference_mode(), self._lane.scope():
            if np.count_nonzero(odd):
                self._amend(flight, np.flatnonzero(odd), masks)
            self._machine.fetch(envelope.answer, flight.answer_words)
            envelope.after.put()

    def collect(self) -> StepResult:
        self._check_usable()
        flight = self._flights[0] if self._flights else None
        if flight is None or not flight.is_sampled:
            raise RunnerFailed("nothing that was sampled is in flight to collect")
        envelope, plan = flight.envelope, flight.plan
        with self._step(plan.step):
            envelope.after.wait()
            elapsed_s = envelope.after.seconds_since(envelope.before)
        self._flights.popleft()
        self._envelopes.append(envelope)
        tokens, statuses = flight.read()
        scores = flight.read_scores(statuses)
        if np.count_nonzero(statuses):
            self._slots.note_failures(plan, statuses)
        return StepResult(plan.step, tokens, statuses, elapsed_s, scores)

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        self._check_usable()
        with torch.inference_mode(), self._lane.scope():
            return self._pool.export(blocks)

    def import_blocks(self, blocks: Sequence[int], payload: bytes) -> None:
        self._check_usable()
        with torch.inference_mode(), self._lane.scope():
            self._pool.load(blocks, payload)

    def close(self) -> None:
        """Give the memory back; every later call fails."""
        self._gone = self._gone or "the runner is closed"
        self._flights.clear()
        self._envelopes.clear()
        self.last_logits = {}
        self._weights = None
        for name in ("_machine", "_pool", "_space", "_odd", "_prompts", "_kept_last"):
            if hasattr(self, name):
                delattr(self, name)

    def _check_room(self) -> None:
        """Before anything is read. Eight bits are made of weights that were there in `dtype`."""
        weights, free = weights_bytes(self._shape, self._dtype), self._lane.free_bytes()
        step = self._workspace(torch.device("meta")).size_bytes
        if weights + step > free:
            raise ModelTooLarge(
                f"the weights take {weights / _MIB:,.0f} MiB and the largest step {step / _MIB:,.0f} MiB, and"
                f" {free / _MIB:,.0f} MiB of the card are free"
            )

    def _fit(self, share: float) -> MemoryPlan:
        self._load_weights()
        assert self._weights is not None
        # What the libraries take for these steps they keep.
        num_graphs = self._rehearse(self._weights.kinds())
        self._is_rehearsed = True
        plan = plan_blocks(
            self._shape,
            self._config,
            self._dtype,
            free_bytes=self._lane.free_bytes(),
            weights_bytes=self.weights_bytes,
            workspace_bytes=self._space.size_bytes,
            num_graphs=num_graphs,
            share=share,
        )
        self.notes = sentences(plan, self._space.size_bytes)
        self._place(plan.blocks)
        return plan

    def _load_weights(self) -> None:
        """What steps will launch is compiled meanwhile, where there is room for weights that only show what that is."""
        shape, device, dtype = self._shape, self._lane.device, self._dtype
        with torch.inference_mode(), self._lane.scope():
            self._space = self._workspace(device)
            spare = self._lane.free_bytes() - weights_bytes(shape, dtype)
            is_roomy = spare > 2 * blank_weights(shape, torch.device("meta"), dtype).size_bytes
            with self._ops.compiling(self._rehearse_blank) if is_roomy else nullcontext():
                self._weights = self._source(shape, device, dtype)
        self.weights_bytes = self._weights.size_bytes

    def _rehearse_blank(self) -> None:
        source = in_eights(blank_weights) if self._fp8 else blank_weights
        self._rehearse(source(self._shape, self._lane.device, self._dtype))

    def _rehearse(self, weights: Weights) -> int:
        """Run every layout with these weights and few blocks; how many there are."""
        config = replace(self._config, blocks=min(self._config.blocks, _PROBE_BLOCKS))
        with torch.inference_mode(), self._lane.scope():
            machine = self._build(config, HostSlots(config), weights)[1]
            machine.rehearse()
            return len(machine.choice.all())

    def _workspace(self, device: torch.device) -> Workspace:
        config = self._config
        tokens = max(config.max_step_tokens, config.slots)
        return Workspace(self._shape, tokens, config.slots, device, self._dtype, fp8=self._fp8)

    def _build(self, config: EngineConfig, slots: HostSlots, weights: Weights) -> tuple[KvPool, Machine]:
        shape, ops, lane = self._shape, self._ops, self._lane
        pool = KvPool(shape, config.blocks, config.block_size, lane.device, self._dtype, poison=self._poison)
        return pool, Machine(config, shape, weights, pool, ops, lane, self._space, slots.words)

    def _place(self, blocks: int) -> None:
        """Take memory for this many blocks."""
        assert self._weights is not None
        self._config = config = replace(self._config, blocks=blocks)
        self._slots = HostSlots(config)
        with torch.inference_mode(), self._lane.scope():
            self._pool, self._machine = self._build(config, self._slots, self._weights)
            # Memory that a step without a graph must not have to ask for.
            self._kept_last = torch.zeros_like(self._machine.slots.last)
        self._graphed = frozenset()
        self._odd = OddRows(config, self._slots, self._machine.odd, self._lane)
        self._prompts = PromptScores(self._slots, self._lane.device, self._lane.free_bytes)
        self._envelopes = deque(self._envelope() for _ in range(DEPTH + 1))
        self._flights.clear()
        self._gone = ""

    def _envelope(self) -> Envelope:
        return Envelope.make(self._lane, self._machine.packet_words, self._machine.answer_words)

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Whatever turns out not to fit before the first request is a model too large for the card."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.close()
            words = str(error).partition(". ")[0]
            raise ModelTooLarge(f"the card's memory does not hold the model and its first steps: {words}") from error

    @contextmanager
    def _step(self, step: int) -> Iterator[None]:
        """Whatever fails in it, here or on the device, ends the runner."""
        try:
            yield
        except (RunnerFailed, RuntimeError, IndexError, ValueError) as error:
            self._gone = f"step {step}: {error}"
            raise RunnerFailed(self._gone) from error

    def _start(self, plan: Plan) -> Flight:
        self._pool.release(plan.freed_blocks)
        changes = self._slots.update(plan)
        for start in {start.slot: start for start in plan.begun}.values():
            self._odd.begin(start)
        self._slots.check(plan)
        envelope = self._envelopes.popleft()
        laid = self._lay_out(plan, envelope)
        envelope.before.put()
        self._send(envelope, laid.layout.changes_at, changes)
        self._run(laid.layout, envelope)
        self._slots.note_samples(plan)
        flight = Flight(plan, laid, envelope, self._slots.failed[plan.slots], ScorePile())
        if self._keep_logits:
            logits = self._machine.logits(laid.layout)
            self.last_logits = {int(row): logits[i].clone() for i, row in enumerate(laid.sampling)}
        if np.count_nonzero(self._slots.prompt_alternatives[plan.slots] >= 0):
            self._score_prompts(flight)
        return flight

    def _run(self, layout: Layout, envelope: Envelope) -> None:
        """The step whose packet was sent. A step that broke off may have put tokens where its rows read theirs: all else it
        does can be done again. Where there is no memory for it none of its rows has run; its changes are made, though."""
        machine, graphless = self._machine, layout not in self._graphed
        if graphless:
            self._kept_last.copy_(machine.slots.last)
        for _ in range(2):
            if fits(lambda: machine.run(layout)):
                return
            free = self._lane.free_bytes()
            if graphless:
                machine.slots.last.copy_(self._kept_last)
        machine.change(layout)
        self._lane.settle()
        self._envelopes.appendleft(envelope)
        raise OutOfRoom(f"{free / _MIB:,.0f} MiB of the card are free, too little for {layout.num_tokens} tokens")

    def _lay_out(self, plan: Plan, envelope: Envelope) -> Laid:
        choice, rows = self._machine.choice, len(plan.slots)
        if np.count_nonzero(self._slots.fed_by_device(plan)) == rows:
            layout = choice.decode(rows)
            return decode_packet(plan, layout, envelope.words)
        total = int(plan.counts.sum())
        if total > choice.max_tokens:
            raise RunnerFailed(f"{total} tokens are more than max_step_tokens, {choice.max_tokens}")
        lay_out = chunk_packet if rows == 1 else mixed_packet
        return lay_out(plan, self._slots, choice, envelope.words)

    def _send(self, envelope: Envelope, at: int, changes: IntArray) -> None:
        """All in one copy; where a flood of starts does not fit, its first part goes ahead."""
        while len(changes) > (len(envelope.words) - at) // 2:
            ahead, layout = self._envelope(), Layout(1, 1)
            padding_packet(layout, ahead.words)
            most = (len(ahead.words) - layout.changes_at) // 2
            self._machine.send(ahead.packet, put_changes(ahead.words, layout.changes_at, changes[:most]))
            self._machine.change(layout)
            self._lane.settle()
            changes = changes[most:]
        self._machine.send(envelope.packet, put_changes(envelope.words, at, changes))

    def _amend(self, flight: Flight, which: NDArray[np.intp], masks: Masks | None) -> None:
        """What these samples need beside the graph, in a second launch."""
        plan, rows = flight.plan, flight.laid.sampling[which]
        packet = self._odd.lay_out(which, plan.slots[rows], plan.starts[rows] + plan.counts[rows], rows, masks)
        flight.scored = packet.scored
        if packet.num_ruled or packet.num_scored:
            self._machine.amend(packet.letter, flight.laid.layout, packet.num_ruled, packet.num_scored)

    def _score_prompts(self, flight: Flight) -> None:
        plan, states = flight.plan, self._machine.states(flight.laid.layout)
        for row in np.flatnonzero(self._slots.prompt_alternatives[plan.slots] >= 0).tolist():
            first, slot, start = int(flight.laid.firsts[row]), int(plan.slots[row]), int(plan.starts[row])
            chunk = states[first : first + int(plan.counts[row])]
            status = self._prompts.score(flight.scores, self._machine.decoder, chunk, slot, row, start)
            if status != RowStatus.OK:
                flight.failed[row] = status

    def _check_usable(self) -> None:
        if self._gone:
            raise RunnerFailed(f"the runner is unusable: {self._gone}")


def _check_fp8(shape: ModelShape, ops: Ops) -> None:
    if ops.row_exact:
        raise InvalidInput(
            "fp8 is not row-exact: which of its products is made depends on the number of rows", param="dtype"
        )
    refused = fp8_refusal(shape)
    if refused is not None:
        raise InvalidModel(f"fp8 cannot run this model: {refused}", param="dtype")
