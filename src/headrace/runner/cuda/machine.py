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
from headrace.runner.cuda.odd_space import OddSpace, score_words
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


def scores_at(layout: Layout) -> int:
    """Where scores begin in the answer of a step, at 16 bytes."""
    return -(-answer_words(layout.num_samples, layout.chunks) // 4) * 4


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
        tiles = (ops.tile_rows, ops.spread, ops.fresh_rows, ops.fresh_tokens)
        self.choice = LayoutChoice(config.slots, len(space.residual), *tiles)
        self.slots = DeviceSlots(words, device)
        self.odd = OddSpace(config.slots, shape.vocab_size, device)
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
        self._scratch: dict[tuple[int, bool], Any] = {}
        self._graphs: dict[Layout, Callable[[], None]] = {}

    @property
    def packet_words(self) -> int:
        """The longest packet."""
        return max(layout.changes_at for layout in self._largest()) + 2 * _CHANGES

    @property
    def answer_words(self) -> int:
        """The longest answer."""
        return max(scores_at(layout) for layout in self._largest()) + score_words(self.choice.slots)

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
        """The last step's tokens after the last norm; its layout was `whole`."""
        return self.space.normed[: layout.num_tokens]

    def logits(self, layout: Layout) -> Tensor:
        """Of the last step's samples."""
        return self.space.logits[: layout.num_samples]

    def amend(self, letter: Tensor, layout: Layout, num_ruled: int, num_scored: int) -> None:
        """The last step's odd rows, as their packet says: so many under rules, so many with scores."""
        odd, ops, logits = self.odd, self._ops, self.logits(layout)
        tokens, statuses = self._chosen(layout)
        odd.receive(letter)
        for rows in odd.ruled(num_ruled):
            ops.sample_ruled(logits, rows, self.slots, tokens, statuses)
        if num_scored:
            ops.score(logits, odd.scored(num_scored, self._out[scores_at(layout) :]), tokens)

    def rehearse(self) -> None:
        """Run every layout, all of padding: afterwards everything is compiled and nothing has changed. The largest come
        first, so that later ones find their memory taken."""
        letter = self._lane.letter(self.packet_words)
        for layout in self.choice.all():
            padding_packet(layout, letter.numpy())
            self.send(letter, layout.changes_at)
            self._step(layout)
            self._lane.settle()
        self.amend(torch.full_like(letter[: self.odd.layout.masks_at], -1), Layout(1, 1), 1, 1)
        self._lane.settle()

    def capture(self) -> None:
        """Make a graph of every layout. A machine of the same sizes must have rehearsed."""
        for layout in self.choice.all():
            if layout not in self._graphs:
                self._views(layout)
                self._graphs[layout] = self._lane.capture(lambda layout=layout: self._step(layout))  # type: ignore[misc]

    def _step(self, layout: Layout) -> None:
        ops, samples = self._ops, layout.num_samples
        views = self._views(layout)
        ops.begin(self._inbox, layout, self.slots, self._inputs, self._block_size)
        normed = self.decoder.forward(views, self.slots, self._inputs)
        ops.sample(self.decoder.logits(views, normed), views.sampled, self.slots, *self._chosen(layout))
        if layout.chunks:
            self._out[answer_words(samples) :][: layout.chunks] = _unsound(self.decoder.kept(layout), views.offsets)

    def _views(self, layout: Layout) -> StepViews:
        alone = layout.samples > 0 and layout.decodes == 0
        last = self._scratch_for(self.choice.slots, last=True) if alone else self._scratch_for(layout.samples)
        return StepViews.of(self._inbox, layout, self._scratch_for(layout.decodes), last)

    def _chosen(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Tokens and statuses of a step's samples."""
        samples = layout.num_samples
        return self._out[:samples], self._out.view(torch.uint8)[4 * samples : 5 * samples]

    def _scratch_for(self, rows: int, *, last: bool = False) -> Any:
        if not rows:
            return None
        bucket = bucket_for(rows, self._buckets)
        if (bucket, last) not in self._scratch:
            self._scratch[bucket, last] = self._ops.scratch(bucket, self._context, last=last)
        return self._scratch[bucket, last]

    def _largest(self) -> tuple[Layout, ...]:
        choice = self.choice
        slots, tokens = choice.slots, choice.max_tokens
        return (choice.decode(slots), choice.mixed(1, slots, tokens))


def _unsound(lines: Tensor, offsets: Tensor) -> Tensor:
    """How many tokens of each chunk have a line that is not finite: what is not must not reach the prefix cache."""
    bad = lines.sum(-1, dtype=torch.float32).isfinite().logical_not_()
    sums = torch.nn.functional.pad(bad.cumsum(0, dtype=torch.int32), (1, 0))
    ends = sums.index_select(0, offsets)
    return ends[1:] - ends[:-1]
