"""Every slot's state on the device, and the arrays that a step's tokens are described by.

Owns these tensors. Addresses are `SlotWords`'; who writes what and when is the kernels' affair.
"""

import torch
from torch import Tensor

from headrace.runner.cuda.slot_words import SlotWords


class DeviceSlots:
    """One run of words; the fields are views of it. `tables` [slots, width]."""

    def __init__(self, layout: SlotWords, device: torch.device) -> None:
        self.layout = layout
        self.words = torch.zeros(layout.size, dtype=torch.int32, device=device)
        slots = layout.slots
        self.seeds = self.words[: 2 * slots].view(torch.int64)
        self.tables = self.words[layout.tables_at :].view(slots, layout.width)
        self.lengths = self._field("lengths")
        self.last = self._field("last")
        self.temperature = self._field("temperature").view(torch.float32)
        self.top_k = self._field("top_k")
        self.top_p = self._field("top_p").view(torch.float32)
        self.min_p = self._field("min_p").view(torch.float32)

    def _field(self, name: str) -> Tensor:
        at = self.layout.at(name)
        return self.words[at : at + self.layout.slots]


class StepInputs:
    """Of every token of a step: its id, its position, and the cell (block times block size plus offset) that its keys
    and values go to, -1 for padding."""

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self.ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self.cells = torch.full((max_tokens,), -1, dtype=torch.int64, device=device)
