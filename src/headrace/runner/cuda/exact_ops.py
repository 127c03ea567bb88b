"""The device operations of a row-exact runner: a row's bits depend on its own sequence alone.

Neither on its neighbours nor on how its prompt was cut, cached or computed again. Decode rows are chunks of one token
to the attention of prefills, and products have one kernel for every number of rows. Importing it needs Triton.
"""

from typing import Any

import torch
from torch import Tensor

from headrace.runner.cuda.compilers import Compilers
from headrace.runner.cuda.device_slots import DeviceSlots, StepInputs
from headrace.runner.cuda.kernels.exact_product import exact_product
from headrace.runner.cuda.kernels.experts import exact_experts
from headrace.runner.cuda.kernels.prefill_attention import prefill_attention
from headrace.runner.cuda.layout import Layout
from headrace.runner.cuda.triton_ops import TritonOps
from headrace.weights.shape import ModelShape


class ExactOps(TritonOps):
    product = staticmethod(exact_product)
    experts = staticmethod(exact_experts)

    def __init__(self, shape: ModelShape, slots: int, device: torch.device, compilers: Compilers | None = None) -> None:
        super().__init__(shape, slots, device, compilers)
        # Of the step at hand: what its decode rows are as chunks.
        self._offsets = torch.arange(slots + 1, dtype=torch.int32, device=device)
        self._prior = torch.zeros(slots, dtype=torch.int32, device=device)
        self._tiles = torch.zeros(slots, 4, dtype=torch.int32, device=device)

    @property
    def name(self) -> str:
        return "triton, row-exact"

    @property
    def row_exact(self) -> bool:
        return True

    def begin(self, packet: Tensor, layout: Layout, slots: DeviceSlots, inputs: StepInputs, block_size: int) -> None:
        super().begin(packet, layout, slots, inputs, block_size)
        count = layout.decodes
        if count:
            at = layout.sections["slots"][0]
            of = packet[at : at + count]
            self._prior[:count] = slots.lengths[of.clamp(min=0).long()] - 1
            self._tiles[:count, 0] = torch.where(of >= 0, self._offsets[:count], -1)

    def scratch(self, rows: int, context: int, *, last: bool = False) -> Any:
        return None

    def turns(self, rows: int) -> bool:
        return False

    def fuses(self, rows: int) -> bool:
        return False

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
        scratch: Any,
    ) -> None:
        """Rows of padding are left alone: nobody reads them."""
        count = len(queries)
        offsets, prior, tiles = self._offsets[: count + 1], self._prior[:count], self._tiles[:count]
        prefill_attention(out, queries, keys, values, tables, slots, offsets, prior, tiles, scale, self._prefill)
