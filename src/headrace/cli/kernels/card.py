"""A card's operations, as a step asks for them, against what its memory and tensor cores reach.

Owns the sizes that are measured. Knows operations and lanes by their Protocols alone: on a host's lane and the plain
reference the same code runs without a card, which is how it is tested. Checks no results; that is the tests' part.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from headrace.cli.kernels.roofline import Figures, Launch, Peaks, Timer, judge
from headrace.runner.cuda.device_slots import DeviceSlots, StepInputs
from headrace.runner.cuda.lane import Lane
from headrace.runner.cuda.layout import Layout
from headrace.runner.cuda.ops import Ops
from headrace.runner.cuda.packet import list_tiles
from headrace.runner.cuda.slot_words import SlotWords
from headrace.weights.shape import ModelShape

_BLOCK = 16
_ROUNDS = 8


class CardSizes(Struct, frozen=True):
    """Rows of products and of what is done to each row; (rows, context) of single tokens; (tokens, positions before) of
    chunks; rows that are sampled."""

    rows: tuple[int, ...] = (1, 64, 256, 2048)
    decodes: tuple[tuple[int, int], ...] = ((1, 4096), (64, 4096), (256, 800))
    chunks: tuple[tuple[int, int], ...] = ((2048, 0), (8192, 0), (2048, 30_000), (64, 60_000))
    samples: tuple[int, ...] = (1, 64, 256)
    cold_bytes: int = 256 << 20
    peak_bytes: int = 2 << 30
    peak_width: int = 8192


def lane_timer(lane: Lane) -> Timer:
    """Seconds of one launch by the device's own marks, several rounds of all in one graph."""

    def seconds(launches: Sequence[Launch]) -> float:
        repeats = max(1, 24 // len(launches))

        def all_of_them() -> None:
            for _ in range(repeats):
                for launch in launches:
                    launch()

        rounds = []
        with lane.scope():
            for launch in launches:
                launch()
            lane.settle()
            replay = lane.capture(all_of_them)
            for _ in range(_ROUNDS):
                begin, end = lane.mark(), lane.mark()
                begin.put()
                replay()
                end.put()
                end.wait()
                rounds.append(end.seconds_since(begin))
        return statistics.median(rounds[1:]) / (repeats * len(launches))

    return seconds


@dataclass(slots=True)
class CardBench:
    ops: Ops
    lane: Lane
    shape: ModelShape
    sizes: CardSizes
    timer: Timer
    dtype: torch.dtype = torch.bfloat16

    def peaks(self) -> Peaks:
        """By one large copy and one large product."""
        count, width = self.sizes.peak_bytes // self.dtype.itemsize, self.sizes.peak_width
        source, target = self._normal(count), self._normal(count)
        copy_s = self.timer([partial(target.copy_, source)])
        left, right, out = (self._normal(width, width) for _ in range(3))
        product_s = self.timer([partial(torch.mm, left, right, out=out)])
        return Peaks(2 * self.sizes.peak_bytes / copy_s, 2 * width**3 / product_s)

    def measure(self, peaks: Peaks) -> Figures:
        yield from self._products(peaks)
        yield from self._row_operations(peaks)
        yield from self._decodes(peaks)
        yield from self._chunks(peaks)
        yield from self._samples(peaks)

    def _products(self, peaks: Peaks) -> Figures:
        """The fattest matrix of a layer; a single row goes through an operation of its own, its norm and gate joined."""
        width, height = self.shape.hidden_size, 2 * self.shape.intermediate_size
        whole = self.dtype.itemsize * width * height
        weights = [self._normal(height, width) for _ in range(self._copies(whole))]
        norm, inner = self._normal(width), self._normal(1, height // 2)
        for rows in self.sizes.rows:
            given, out = self._normal(rows, width), self._normal(rows, height)
            took_s = self.timer([partial(self.ops.product, given, weight, None, out) for weight in weights])
            moved = whole + self.dtype.itemsize * rows * (width + height)
            yield judge("product", f"{rows} x {width} x {height}", took_s, moved, 2 * rows * width * height, peaks)
        row = self._normal(1, width)
        took_s = self.timer(
            [partial(self.ops.row_product, row, weight, inner, norm=norm, eps=1e-6, gated=True) for weight in weights]
        )
        yield judge("one row: norm, product, gate", f"{width} x {height}", took_s, whole, 2 * width * height, peaks)

    def _row_operations(self, peaks: Peaks) -> Figures:
        width, inner, heads = self.shape.hidden_size, self.shape.intermediate_size, self.shape.num_heads
        kv_heads, dim, size = self.shape.num_kv_heads, self.shape.head_dim, self.dtype.itemsize
        for rows in self.sizes.rows:
            given, residual, out = (self._normal(rows, width) for _ in range(3))
            norm = self._normal(width)
            took_s = self.timer([partial(self.ops.add_rms_norm, given, residual, norm, 1e-5, out)])
            yield judge("add + norm", f"{rows} x {width}", took_s, 4 * size * rows * width, 0, peaks)
            took_s = self.timer([partial(self.ops.silu_mul, self._normal(rows, 2 * inner), self._normal(rows, inner))])
            yield judge("silu x up", f"{rows} x {inner}", took_s, 3 * size * rows * inner, 0, peaks)
            qkv, queries = self._normal(rows, (heads + 2 * kv_heads) * dim), self._normal(rows, heads, dim)
            keys, values = (self._normal(rows // _BLOCK + 1, kv_heads, _BLOCK, dim) for _ in range(2))
            positions = torch.arange(rows, dtype=torch.int32, device=self.lane.device)
            angles = torch.rand(rows, dim // 2, device=self.lane.device)
            q_norm, k_norm = self._head_norms()
            took_s = self.timer(
                [
                    partial(
                        self.ops.rotary_write,
                        *(
                            qkv,
                            positions,
                            positions.long(),
                            angles,
                            angles,
                            q_norm,
                            k_norm,
                            1e-6,
                            queries,
                            keys,
                            values,
                        ),
                    )
                ]
            )
            yield judge("turn + write", f"{rows} x {heads}/{kv_heads}", took_s, 2 * size * qkv.numel(), 0, peaks)

    def _decodes(self, peaks: Peaks) -> Figures:
        """Alone, and with turning and writing joined where the product joins them."""
        heads, kv_heads, dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        for rows, context in self.sizes.decodes:
            moved = 2 * self.dtype.itemsize * rows * context * kv_heads * dim
            keys, values, tables = self._pages(rows, context, self._copies(moved))
            state, slots = self._begun(tables, context)
            tables, lengths = state.tables, state.lengths
            out, queries = self._normal(rows, heads, dim), self._normal(rows, heads, dim)
            scratch, scale = self.ops.scratch(rows, context), dim**-0.5
            flops = 4 * rows * context * heads * dim
            layers = range(len(keys))
            took_s = self.timer(
                [
                    partial(
                        self.ops.decode_attention,
                        *(out, queries, keys[layer], values[layer], tables, slots, lengths, scale, scratch),
                    )
                    for layer in layers
                ]
            )
            yield judge("decode attention", f"{rows} x {context}", took_s, moved, flops, peaks)
            if not self.ops.turns(rows):
                continue
            qkv = self._normal(rows, (heads + 2 * kv_heads) * dim)
            angles = torch.rand(context, dim // 2, device=self.lane.device)
            turned = (out, qkv, angles, angles, *self._head_norms(), 1e-6)
            took_s = self.timer(
                [
                    partial(
                        self.ops.turned_attention,
                        *(*turned, keys[layer], values[layer], tables, slots, lengths, scale, scratch),
                    )
                    for layer in layers
                ]
            )
            yield judge("turn + write + decode attention", f"{rows} x {context}", took_s, moved, flops, peaks)

    def _chunks(self, peaks: Peaks) -> Figures:
        heads, kv_heads, dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        for tokens, before in self.sizes.chunks:
            keys, values, tables = self._pages(1, before + tokens, 1)
            out, queries = self._normal(tokens, heads, dim), self._normal(tokens, heads, dim)
            slots, offsets, prior = (self._ints(each) for each in ([0], [0, tokens], [before]))
            listed = list_tiles(np.array([tokens]), np.array([before]), self.ops.tile_rows, self.ops.spread)
            tiles = torch.from_numpy(listed).to(self.lane.device)
            took_s = self.timer(
                [
                    partial(
                        self.ops.prefill_attention,
                        *(out, queries, keys[0], values[0], tables, slots, offsets, prior, tiles, dim**-0.5),
                    )
                ]
            )
            flops = 4 * dim * heads * (tokens * before + tokens * (tokens + 1) / 2)
            moved = 2 * self.dtype.itemsize * (before + tokens) * kv_heads * dim
            yield judge("chunk attention", f"{tokens} after {before}", took_s, moved, flops, peaks)
            if self.ops.fresh_rows and not before:
                qkv = self._normal(tokens, (heads + 2 * kv_heads) * dim)
                listed = list_tiles(np.array([tokens]), np.array([before]), self.ops.fresh_rows, 0)
                begun = (out, queries, qkv, offsets, torch.from_numpy(listed).to(self.lane.device), dim**-0.5)
                took_s = self.timer([partial(self.ops.fresh_attention, *begun)])
                yield judge("chunk attention, no pages", f"{tokens} after 0", took_s, moved, flops, peaks)

    def _samples(self, peaks: Peaks) -> Figures:
        for rows in self.sizes.samples:
            state = DeviceSlots(SlotWords(rows, 1), self.lane.device)
            slots = torch.arange(rows, dtype=torch.int32, device=self.lane.device)
            tokens = torch.zeros(rows, dtype=torch.int32, device=self.lane.device)
            statuses = torch.zeros(rows, dtype=torch.uint8, device=self.lane.device)
            logits = self._normal(rows, self.shape.vocab_size).mul_(3.0)
            for words, temperature, top_k, top_p in (("greedy", 0.0, 0, 1.0), ("0.7, 20, 0.95", 0.7, 20, 0.95)):
                state.lengths.fill_(100)
                state.temperature.fill_(temperature)
                state.top_k.fill_(top_k)
                state.top_p.fill_(top_p)
                took_s = self.timer([partial(self.ops.sample, logits, slots, state, tokens, statuses)])
                moved = self.dtype.itemsize * logits.numel()
                yield judge(f"sample: {words}", f"{rows} x {self.shape.vocab_size}", took_s, moved, 0, peaks)

    def _pages(self, rows: int, context: int, layers: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [layers, blocks, kv heads, block, dim], and tables in no order."""
        each = -(-context // _BLOCK)
        dims = (layers, rows * each, self.shape.num_kv_heads, _BLOCK, self.shape.head_dim)
        tables = torch.randperm(rows * each).int().view(rows, each).to(self.lane.device)
        return self._normal(*dims), self._normal(*dims), tables

    def _begun(self, tables: Tensor, context: int) -> tuple[DeviceSlots, Tensor]:
        """A step of one token for each slot, begun as a runner begins it: operations may keep what they learn there."""
        rows, width = tables.shape
        state = DeviceSlots(SlotWords(rows, width), self.lane.device)
        state.tables.copy_(tables)
        layout = Layout(rows, rows)
        packet = torch.zeros(layout.changes_at, dtype=torch.int32)
        for name, values in (("slots", torch.arange(rows)), ("ends", torch.full((rows,), context))):
            at, size = layout.sections[name]
            packet[at : at + size] = values
        packet = packet.to(self.lane.device)
        at, size = layout.sections["slots"]
        with self.lane.scope():
            self.ops.begin(packet, layout, state, StepInputs(rows, self.lane.device), _BLOCK)
        self.lane.settle()
        return state, packet[at : at + size]

    def _head_norms(self) -> tuple[Tensor | None, Tensor | None]:
        if not self.shape.qk_norm:
            return None, None
        return self._normal(self.shape.head_dim), self._normal(self.shape.head_dim)

    def _copies(self, size_bytes: int) -> int:
        """As many as a cache does not hold, and not more than a model has layers."""
        return max(2, min(self.shape.num_layers, math.ceil(self.sizes.cold_bytes / size_bytes)))

    def _normal(self, *dims: int) -> Tensor:
        return torch.randn(dims, device=self.lane.device, dtype=self.dtype)

    def _ints(self, values: Sequence[object]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.lane.device)
