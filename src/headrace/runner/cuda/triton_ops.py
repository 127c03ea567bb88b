"""The device operations as Triton kernels: which kernel, in which configuration, for a model's shape.

Owns the choice of configurations by row count. Importing it needs Triton.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.runner.cuda import upkeep
from headrace.runner.cuda.device_slots import DeviceSlots, StepInputs
from headrace.runner.cuda.kernels.activation import silu_mul
from headrace.runner.cuda.kernels.decode_attention import DecodeConfig, DecodeScratch, decode_attention, decode_config
from headrace.runner.cuda.kernels.norms import add_rms_norm, rms_norm
from headrace.runner.cuda.kernels.prefill_attention import prefill_attention, prefill_config
from headrace.runner.cuda.kernels.rotary_write import rotary_write
from headrace.runner.cuda.kernels.row_product import row_product
from headrace.runner.cuda.kernels.sampling import Draws, sample
from headrace.runner.cuda.kernels.scan import Scan
from headrace.runner.cuda.kernels.turned_attention import turned_attention
from headrace.runner.cuda.layout import Layout
from headrace.runner.cuda.products import fastest_product
from headrace.weights.shape import ModelShape

_MANY_PROGRAMS = 1056


class _Scratch(NamedTuple):
    config: DecodeConfig
    memory: DecodeScratch


class TritonOps:
    def __init__(self, shape: ModelShape, max_samples: int, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._prefill = prefill_config(shape.head_dim)
        self._scan = Scan.make(max_samples, shape.vocab_size, device)
        self.tile_rows = self._prefill.tokens(shape.num_heads, shape.num_kv_heads)

    @property
    def name(self) -> str:
        return "triton"

    @property
    def row_exact(self) -> bool:
        return False

    def begin(self, packet: Tensor, layout: Layout, slots: DeviceSlots, inputs: StepInputs, block_size: int) -> None:
        upkeep.begin(packet, layout, slots, inputs, block_size)

    def product(self, rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        fastest_product(rows, weight, bias, out)

    def rms_norm(self, rows: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        rms_norm(rows, weight, eps, out)

    def add_rms_norm(self, rows: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        add_rms_norm(rows, residual, weight, eps, out)

    def rotary_write(
        self,
        qkv: Tensor,
        positions: Tensor,
        cells: Tensor,
        cosines: Tensor,
        sines: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        rotary_write(qkv, positions, cells, cosines, sines, q_norm, k_norm, eps, queries, keys, values)

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        silu_mul(gate_up, out)

    def scratch(self, rows: int, context: int) -> _Scratch:
        shape, config = self._shape, decode_config(rows, self._shape.num_kv_heads, context)
        memory = DecodeScratch.make(
            rows, shape.num_heads, shape.num_kv_heads, shape.head_dim, config.splits, self._device
        )
        return _Scratch(config, memory)

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
        scratch: _Scratch,
    ) -> None:
        decode_attention(out, queries, keys, values, tables, slots, lengths, scale, scratch.memory, scratch.config)

    def turns(self, rows: int) -> bool:
        """Where programs are many, norms of queries and keys are cheaper apart (measured on an H200)."""
        return not self._shape.qk_norm or rows * self._shape.num_kv_heads < _MANY_PROGRAMS

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
        scratch: _Scratch,
    ) -> None:
        turned_attention(
            out,
            qkv,
            cosines,
            sines,
            q_norm,
            k_norm,
            eps,
            keys,
            values,
            tables,
            slots,
            lengths,
            scale,
            scratch.memory,
            scratch.config,
        )

    def row_product(
        self,
        row: Tensor,
        weight: Tensor,
        out: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
        adds: bool = False,
        gated: bool = False,
    ) -> None:
        row_product(row, weight, out, norm=norm, eps=eps, bias=bias, adds=adds, gated=gated)

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
        prefill_attention(out, queries, keys, values, tables, slots, offsets, prior, tiles, scale, self._prefill)

    def sample(self, logits: Tensor, slots: Tensor, state: DeviceSlots, tokens: Tensor, statuses: Tensor) -> None:
        draws = Draws(state.seeds, state.lengths, state.temperature, state.top_k, state.top_p, state.min_p)
        sample(logits, slots, draws, tokens, statuses, self._scan, last=state.last)
