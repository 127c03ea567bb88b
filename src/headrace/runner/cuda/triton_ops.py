"""The device operations as Triton kernels: which kernel, in which configuration, for a model's shape.

Owns the choice of configurations by row count; what needs none is its kernel's function as it stands. Importing it
needs Triton.
"""

from typing import Any

import torch
from torch import Tensor

from headrace.runner.cuda import upkeep
from headrace.runner.cuda.device_slots import DeviceSlots, StepInputs
from headrace.runner.cuda.kernels import activation, norms
from headrace.runner.cuda.kernels import experts as mixture
from headrace.runner.cuda.kernels import rotary_write as rotary
from headrace.runner.cuda.kernels import row_product as one_row
from headrace.runner.cuda.kernels import turned_attention as turned
from headrace.runner.cuda.kernels.decode_attention import DecodeScratch, decode_attention, decode_config
from headrace.runner.cuda.kernels.prefill_attention import ROOMY, prefill_attention, prefill_config
from headrace.runner.cuda.kernels.sampling import Draws, sample
from headrace.runner.cuda.kernels.scan import Scan
from headrace.runner.cuda.layout import Layout
from headrace.runner.cuda.products import fastest_product
from headrace.weights.shape import ModelShape

_MANY_PROGRAMS = 1056


class TritonOps:
    product = staticmethod(fastest_product)
    rms_norm = staticmethod(norms.rms_norm)
    add_rms_norm = staticmethod(norms.add_rms_norm)
    silu_mul = staticmethod(activation.silu_mul)
    rotary_write = staticmethod(rotary.rotary_write)
    row_product = staticmethod(one_row.row_product)
    turned_attention = staticmethod(turned.turned_attention)
    experts = staticmethod(mixture.experts)

    def __init__(self, shape: ModelShape, max_samples: int, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._prefill = prefill_config(shape.head_dim, _shared_bytes(device))
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

    def scratch(self, rows: int, context: int) -> DecodeScratch:
        shape, config = self._shape, decode_config(rows, self._shape.num_kv_heads, context)
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
        decode_attention(out, queries, keys, values, tables, slots, lengths, scale, scratch)

    def turns(self, rows: int) -> bool:
        """Where programs are many, norms of queries and keys are cheaper apart (measured on an H200)."""
        return not self._shape.qk_norm or rows * self._shape.num_kv_heads < _MANY_PROGRAMS

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


def _shared_bytes(device: torch.device) -> int:
    """What one program may have of it. The interpreter has as much as it likes."""
    if device.type != "cuda":
        return ROOMY
    # Torch's stubs do not know it.
    shared: Any = torch.cuda.get_device_properties(device)
    return int(shared.shared_memory_per_block_optin)
