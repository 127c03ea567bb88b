"""One step on the device: the packet in, changes applied, forward pass, sampling, tokens out. Graphs of it by layout.

Owns the device's state and what graphs were captured. Never waits for the device but to capture. Knows packets and
layouts; knows neither plans nor why a row is there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.core.config import EngineConfig
from headrace.runner.cuda.buckets import bucket_for, row_buckets
from headrace.runner.cuda.decoder import Decoder, StepViews, Workspace
from headrace.runner.cuda.device_slots import DeviceSlots, StepInputs
from headrace.runner.cuda.fp8_decoder import Fp8Decoder
from headrace.runner.cuda.kv_pool import KvPool
from headrace.runner.cuda.lane import Lane
from headrace.runner.cuda.layout import Layout, LayoutChoice
from headrace.runner.cuda.ops import Ops
from headrace.runner.cuda.packet import padding_packet
from headrace.runner.cuda.slot_words import SlotWords
from headrace.runner.cuda.weights import Weights
from headrace.weights.shape import ModelShape

# Changed words that one packet has room for beside its rows.
_CHANGES = 1 << 16


def answer_words(samples: int, chunks: int = 0) -> int:
    """What a step puts out: a word per token, a byte per status, then a word per chunk: how much of it is not finite."""
    return samples + -(-samples // 4) + chunks


class Machine:
    """`space` holds the last step's states and logits until the next one."""

    def __init__(
        self,
        config: EngineConfig,
        shape: ModelShape,
        weights: Weights,
        pool: KvPool,
        ops: Ops,
        lane: Lane,
        space: Workspace,
        words: SlotWords,
    ) -> None:
        device = lane.device
        self.choice = LayoutChoice(config.slots, len(space.residual), ops.tile_rows, ops.spread)
        self.slots = DeviceSlots(words, device)
        self.decoder = (Decoder if space.eights is None else Fp8Decoder)(
            shape, weights, pool, ops, space, config.context_len
        )
        self.space = space
        self._ops = ops
        self._lane = lane
        self._block_size = config.block_size
        self._context = config.context_len
        self._buckets = row_buckets(config.slots)
        self._inputs = StepInputs(len(space.residual), device)
        self._inbox = torch.zeros(self.packet_words, dtype=torch.int32, device=device)
        self._out = torch.zeros(self.answer_words, dtype=torch.int32, device=device)
        self._scratch: dict[int, Any] = {}
        self._graphs: dict[Layout, Callable[[], None]] = {}

    @property
    def packet_words(self) -> int:
        """The longest packet."""
        return max(layout.changes_at for layout in self._largest()) + 2 * _CHANGES

    @property
    def answer_words(self) -> int:
        """The longest answer."""
        return max(answer_words(layout.num_samples, layout.chunks) for layout in self._largest())

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def send(self, letter: Tensor, words: int) -> None:
        """The packet, in one copy."""
        self._inbox[:words].copy_(letter[:words], non_blocking=True)

    def fetch(self, letter: Tensor, words: int) -> None:
        """What the step put out, in one copy."""
        letter[:words].copy_(self._out[:words], non_blocking=True)

    def change(self, layout: Layout) -> None:
        """Apply a packet of changes and nothing else."""
        self._ops.begin(self._inbox, layout, self.slots, self._inputs, self._block_size)

    def run(self, layout: Layout) -> None:
        """The step whose packet was sent: as a graph, where there is one."""
        graph = self._graphs.get(layout)
        if graph is not None:
            graph()
        else:
            self._step(layout)

    def states(self, layout: Layout) -> Tensor:
        """The last step's tokens after the last norm."""
        return self.space.normed[: layout.num_tokens]

    def logits(self, layout: Layout) -> Tensor:
        """Of the last step's samples."""
        return self.space.logits[: layout.num_samples]

    def put_tokens(self, slots: Tensor, tokens: Tensor) -> None:
        """Tokens that were chosen elsewhere become their slots' last."""
        self.slots.last.index_copy_(0, slots, tokens)

    def rehearse(self) -> None:
        """Run every layout, all of padding: afterwards everything is compiled and nothing has changed. The largest come
        first, so that later ones find their memory taken."""
        letter = self._lane.letter(self.packet_words)
        for layout in self.choice.all():
            padding_packet(layout, letter.numpy())
            self.send(letter, layout.changes_at)
            self._step(layout)
            self._lane.settle()

    def capture(self) -> None:
        """Make a graph of every layout. A machine of the same sizes must have rehearsed."""
        for layout in self.choice.all():
            if layout not in self._graphs:
                self._scratch_for(layout.decodes)
                self._graphs[layout] = self._lane.capture(lambda layout=layout: self._step(layout))  # type: ignore[misc]

    def _step(self, layout: Layout) -> None:
        ops, samples = self._ops, layout.num_samples
        views = StepViews.of(self._inbox, layout, self._scratch_for(layout.decodes))
        ops.begin(self._inbox, layout, self.slots, self._inputs, self._block_size)
        normed = self.decoder.forward(views, self.slots, self._inputs)
        statuses = self._out.view(torch.uint8)[4 * samples : 5 * samples]
        ops.sample(self.decoder.logits(views, normed), views.sampled, self.slots, self._out[:samples], statuses)
        if layout.chunks:
            self._out[answer_words(samples) :][: layout.chunks] = _unsound(normed, views.offsets)

    def _scratch_for(self, rows: int) -> Any:
        if not rows:
            return None
        bucket = bucket_for(rows, self._buckets)
        if bucket not in self._scratch:
            self._scratch[bucket] = self._ops.scratch(bucket, self._context)
        return self._scratch[bucket]

    def _largest(self) -> tuple[Layout, ...]:
        choice = self.choice
        return (choice.decode(choice.slots), choice.mixed(1, choice.slots, choice.max_tokens))


def _unsound(states: Tensor, offsets: Tensor) -> Tensor:
    """How many tokens of each chunk are not finite: what is not must not reach the prefix cache."""
    bad = states.sum(-1, dtype=torch.float32).isfinite().logical_not_()
    sums = torch.nn.functional.pad(bad.cumsum(0, dtype=torch.int32), (1, 0))
    ends = sums.index_select(0, offsets)
    return ends[1:] - ends[:-1]
