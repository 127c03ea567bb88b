"""The device operations as Triton kernels: which kernel, in which configuration, for a model's shape.

Owns the choice of configurations by row count; what needs none is its kernel's function as it stands. Importing it
needs Triton.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from headrace.runner.cuda import upkeep
from headrace.runner.cuda.compilers import Compilers
from headrace.runner.cuda.device_slots import DeviceSlots, StepInputs
from headrace.runner.cuda.kernels import activation, ahead, eights, norms
from headrace.runner.cuda.kernels import experts as mixture
from headrace.runner.cuda.kernels import rotary_write as rotary
from headrace.runner.cuda.kernels import row_product as one_row
from headrace.runner.cuda.kernels.clustered_product import (
    clustered_gate,
    clustered_sum,
    clustered_turn,
    gate_width,
    is_worth_summing,
    is_worth_turning,
)
from headrace.runner.cuda.kernels.clusters import can_cluster
from headrace.runner.cuda.kernels.crossed_product import (
    MOST_SUMS,
    crossed_gate,
    crossed_parts,
    crossed_sums,
    is_worth_crossing,
)
from headrace.runner.cuda.kernels.decode_attention import DecodeScratch, decode_attention, decode_config, last_config
from headrace.runner.cuda.kernels.early import starts_early
from headrace.runner.cuda.kernels.fresh_attention import fresh_attention, fresh_rows
from headrace.runner.cuda.kernels.fused_product import (
    FUSED_BYTES,
    FusedScratch,
    fused_config,
    fused_product,
    is_worth_fusing,
    start_rows,
)
from headrace.runner.cuda.kernels.prefill_attention import (
    PrefillScratch,
    prefill_attention,
    prefill_config,
    spread_over,
)
from headrace.runner.cuda.kernels.rules import apply_rules
from headrace.runner.cuda.kernels.sampling import Draws, draw_ruled, sample
from headrace.runner.cuda.kernels.scan import Scan
from headrace.runner.cuda.kernels.scores import score
from headrace.runner.cuda.kernels.streamed_attention import TileQueue, streamed_attention, streamed_rows
from headrace.runner.cuda.kernels.streamed_decode import (
    StretchScratch,
    can_stream_decode,
    is_streamed_memory,
    is_worth_streaming_decode,
    streamed_decode,
    streamed_decode_turned,
)
from headrace.runner.cuda.kernels.streamed_product import (
    can_stream,
    is_worth_streaming,
    is_worth_streaming_alone,
    streamed_config,
    streamed_product,
)
from headrace.runner.cuda.kernels.turned_attention import turned_attention
from headrace.runner.cuda.layout import MOST_ROUNDS, Layout
from headrace.runner.cuda.native import compiler_version
from headrace.runner.cuda.odd_space import RuledRows, ScoredRows
from headrace.runner.cuda.ops import Turn
from headrace.runner.cuda.parted_ops import PartedOps
from headrace.runner.cuda.products import fastest_product, scaled_product
from headrace.runner.cuda.squares import Squares
from headrace.weights.shape import ModelShape

_MANY_PROGRAMS = 1056


class TritonOps(PartedOps):
    quantise = staticmethod(eights.quantise)
    rescale = staticmethod(eights.rescale)
    rms_norm = staticmethod(norms.rms_norm)
    add_rms_norm = staticmethod(norms.add_rms_norm)
    silu_mul = staticmethod(activation.silu_mul)
    rotary_write = staticmethod(rotary.rotary_write)
    row_product = staticmethod(one_row.row_product)
    experts = staticmethod(mixture.experts)
    # In shorter steps attention is little, and every kind of step is a graph more.
    fresh_tokens = 512

    def __init__(
        self, shape: ModelShape, max_samples: int, device: torch.device, compilers: Compilers | None = None
    ) -> None:
        self._shape = shape
        self._device = device
        self._compilers = compilers
        shared_bytes = _shared_bytes(device)
        self._prefill = prefill_config(shape.head_dim, shared_bytes)
        self._scan = Scan.make(max_samples, shape.vocab_size, device)
        self.tile_rows = self._prefill.tokens(shape.num_heads, shape.num_kv_heads)
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self._may_stream = can_stream(device)
        self._streamed_rows = streamed_rows(*heads) if self._may_stream else 0
        # By whichever of the two there is.
        self.fresh_rows = 0 if self.row_exact else self._streamed_rows or fresh_rows(*heads, device, shared_bytes)
        self._pieces = FusedScratch.make(device)
        columns = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self._widths = (shape.hidden_size, shape.num_heads * shape.head_dim, shape.intermediate_size)
        # Elements of the largest matrix of a layer.
        self._largest = shape.hidden_size * max(columns, 2 * shape.intermediate_size)
        self._may_fuse = shared_bytes >= FUSED_BYTES and (device.type != "cuda" or starts_early(device))
        multiprocessors = _multiprocessors(device)
        self._clusters = multiprocessors // 2 if can_cluster(device) and not self.row_exact else 0
        # What products leave in parts for the norm behind them.
        room = MOST_SUMS * shape.hidden_size if self._clusters else 0
        self._sums = torch.empty(room, dtype=torch.float32, device=device)
        self._queue = TileQueue.make(multiprocessors, device)
        self._stretches: StretchScratch | None = None
        if self._may_stream and not self.row_exact and can_stream_decode(*heads):
            self._stretches = StretchScratch.make(*heads, self._queue)
        self.spread = 0 if self.row_exact else spread_over(shape.num_kv_heads, multiprocessors)
        self._parts: PrefillScratch | None = None
        if self.spread:
            self._parts = PrefillScratch.make(
                MOST_ROUNDS * self.spread, shape.num_kv_heads, shape.head_dim, self._prefill, device
            )

    @property
    def name(self) -> str:
        return f"triton, clusters by NVRTC {compiler_version()}" if self._clusters else "triton"

    @property
    def row_exact(self) -> bool:
        return False

    def compiling(self, work: Callable[[], object]) -> AbstractContextManager[None]:
        """The interpreter compiles nothing."""
        if self._device.type != "cuda":
            return nullcontext()
        return ahead.compiling(work, self._device, self._compilers or Compilers())

    def begin(self, packet: Tensor, layout: Layout, slots: DeviceSlots, inputs: StepInputs, block_size: int) -> None:
        upkeep.begin(packet, layout, slots, inputs, block_size)

    def scratch(self, rows: int, context: int, *, last: bool = False) -> DecodeScratch:
        shape = self._shape
        config = last_config(context) if last else decode_config(rows, shape.num_kv_heads, context)
        return DecodeScratch.make(rows, shape.num_heads, shape.num_kv_heads, shape.head_dim, config, self._device)

    def decode_attention(
        self,
        out: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        slots: Tensor,
        lengths: Tensor,
        scale: float,
        scratch: DecodeScratch,
    ) -> None:
        context = (keys, values, tables, slots, lengths, scale)
        stretches = self._stretches_for(len(out), keys)
        if stretches is None:
            decode_attention(out, queries, *context, scratch)
        else:
            streamed_decode_turned(out, queries, *context, stretches)

    def turns(self, rows: int) -> bool:
        """Where programs are many, norms of queries and keys are cheaper apart (measured on an H200), unless it is streamed,
        as it is over pages of the usual size."""
        is_cheap = not self._shape.qk_norm or rows * self._shape.num_kv_heads < _MANY_PROGRAMS
        return is_cheap or self._streams_decode(rows)

    def _streams_decode(self, rows: int) -> bool:
        return self._stretches is not None and is_worth_streaming_decode(rows, self._shape.num_kv_heads)

    def _stretches_for(self, rows: int, keys: Tensor) -> StretchScratch | None:
        """Where attention of so many single tokens over this memory is streamed."""
        return self._stretches if self._streams_decode(rows) and is_streamed_memory(keys) else None

    def turned_attention(
        self,
        out: Tensor,
        qkv: Tensor,
        cosines: Tensor,
        sines: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        slots: Tensor,
        lengths: Tensor,
        scale: float,
        scratch: DecodeScratch,
        *,
        row_factors: Tensor | None = None,
    ) -> None:
        turns = (qkv, cosines, sines, q_norm, k_norm, eps)
        context = (keys, values, tables, slots, lengths, scale)
        stretches = self._stretches_for(len(out), keys)
        if stretches is None:
            turned_attention(out, *turns, *context, scratch, row_factors=row_factors)
        else:
            streamed_decode(out, *turns, *context, stretches, row_factors=row_factors)

    def product(self, rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        if self._may_stream and bias is None and is_worth_streaming_alone(len(rows), weight):
            streamed_product(rows, weight, out, streamed_config(len(rows), *weight.shape, gated=False))
        else:
            fastest_product(rows, weight, bias, out)

    def turn_rows(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, qkv: Tensor, turn: Turn, *, in_place: bool
    ) -> None:
        if bias is None and is_worth_turning(rows, weight, turn.queries, self._clusters):
            clustered_turn(rows, weight, qkv, turn, self._clusters)
        else:
            super().turn_rows(rows, weight, bias, qkv, turn, in_place=in_place)

    def gate_rows(self, rows: Tensor, weight: Tensor, room: Tensor, out: Tensor) -> None:
        if is_worth_crossing(rows, weight, self._clusters):
            crossed_gate(rows, weight, out)
        elif wide := gate_width(rows, weight, self._clusters):
            clustered_gate(rows, weight, out, wide, self._clusters)
        else:
            super().gate_rows(rows, weight, room, out)

    def sum_rows(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        room: Tensor,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        out: Tensor,
    ) -> None:
        number = 0 if bias is not None else crossed_parts(rows, weight, self._clusters)
        if number:
            parts = self._sums[: number * residual.numel()].view(number, *residual.shape)
            crossed_sums(rows, weight, parts)
            norms.sum_rms_norm(parts, residual, norm, eps, out)
        elif bias is None and is_worth_summing(rows, weight, self._clusters):
            clustered_sum(rows, weight, residual, self._clusters)
            self.rms_norm(residual, norm, eps, out)
        else:
            super().sum_rows(rows, weight, bias, room, residual, norm, eps, out)

    def scaled_product(self, rows: Tensor, weight: Tensor, unit: Tensor, scale: Tensor, out: Tensor) -> None:
        if self._may_stream and is_worth_streaming_alone(len(rows), weight):
            config = streamed_config(len(rows), *weight.shape, gated=False, itemsize=1)
            streamed_product(rows, weight, out, config, scale=scale)
        else:
            scaled_product(rows, weight, unit, scale, out)

    def fuses(self, rows: int) -> bool:
        """Cards that start kernels early have what these read by."""
        return self._streams(rows) or (self._may_fuse and is_worth_fusing(rows, self._largest))

    def _streams(self, rows: int) -> bool:
        return self._may_stream and is_worth_streaming(rows, self._widths, self._largest)

    def start_rows(
        self, ids: Tensor, embeddings: Tensor, norm: Tensor, residual: Tensor, scaled: Tensor, squares: Squares
    ) -> None:
        start_rows(ids, embeddings, norm, residual, scaled, squares)

    def normed_product(
        self, scaled: Tensor, squares: Squares, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor
    ) -> None:
        self._join(scaled, weight, out, squares=squares, eps=eps, bias=bias)

    def gated_product(self, scaled: Tensor, squares: Squares, weight: Tensor, eps: float, out: Tensor) -> None:
        self._join(scaled, weight, out, squares=squares, eps=eps, gated=True)

    def added_product(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        scaled: Tensor,
        squares: Squares,
    ) -> None:
        self._join(rows, weight, residual, bias=bias, norm=norm, scaled=scaled, left=squares)

    def _join(self, rows: Tensor, weight: Tensor, out: Tensor, *, gated: bool = False, **joined: Any) -> None:
        count, height, width = len(rows), out.shape[1], rows.shape[1]
        if self._streams(count) and weight.dtype == torch.bfloat16:
            config = streamed_config(count, height, width, gated=gated)
            streamed_product(rows, weight, out, config, gated=gated, **joined)
        else:
            chosen = fused_config(count, height, width, gated=gated)
            fused_product(rows, weight, out, chosen, self._pieces, gated=gated, **joined)

    def prefill_attention(
        self,
        out: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        slots: Tensor,
        offsets: Tensor,
        prior: Tensor,
        tiles: Tensor,
        scale: float,
    ) -> None:
        prefill_attention(
            out, queries, keys, values, tables, slots, offsets, prior, tiles, scale, self._prefill, self._parts
        )

    def fresh_attention(
        self, out: Tensor, queries: Tensor, qkv: Tensor, offsets: Tensor, tiles: Tensor, scale: float
    ) -> None:
        if self._streamed_rows:
            streamed_attention(out, queries, qkv, offsets, tiles, scale, self._queue)
        else:
            fresh_attention(out, queries, qkv, offsets, tiles, scale)

    def sample(self, logits: Tensor, slots: Tensor, state: DeviceSlots, tokens: Tensor, statuses: Tensor) -> None:
        sample(logits, slots, _draws(state), tokens, statuses, self._scan, last=state.last)

    def sample_ruled(
        self, logits: Tensor, rows: RuledRows, state: DeviceSlots, tokens: Tensor, statuses: Tensor
    ) -> None:
        apply_rules(logits, rows, state.temperature, self._scan)
        draw_ruled(rows, _draws(state), tokens, statuses, self._scan, state.last)

    def score(self, logits: Tensor, rows: ScoredRows, tokens: Tensor) -> None:
        found = (rows.logprobs, rows.top_ids, rows.top_logprobs)
        score(logits, rows.places, tokens, rows.alternatives, *found, self._scan)


def _draws(state: DeviceSlots) -> Draws:
    return Draws(state.seeds, state.lengths, state.temperature, state.top_k, state.top_p, state.min_p)


def _multiprocessors(device: torch.device) -> int:
    """The interpreter plays a large card."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _shared_bytes(device: torch.device) -> int:
    """What one program may have of it. The interpreter has as much as it likes."""
    if device.type != "cuda":
        return 1 << 30
    # Torch's stubs do not know it.
    shared: Any = torch.cuda.get_device_properties(device)
    return int(shared.shared_memory_per_block_optin)
