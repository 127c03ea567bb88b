"""Whole steps over the kernels themselves: the runner says what it says over their plain reference."""

import pytest
import torch
from msgspec.structs import replace

from headrace.core.request import SamplingParams
from headrace.runner.cuda import triton_ops
from headrace.runner.cuda.device_slots import DeviceSlots, StepInputs
from headrace.runner.cuda.layout import Layout
from headrace.runner.cuda.reference_ops import ReferenceOps
from headrace.runner.cuda.slot_words import SlotWords
from headrace.runner.cuda.triton_ops import TritonOps
from tests.unit.runner.cuda.cuda_rig import CudaDesk, MakeOps
from tests.unit.runner.torch.model_rig import TensorCheckpoint, ids, model

CHANCE = SamplingParams(temperature=1.2, top_k=30, seed=3)


def _desk(checkpoint: TensorCheckpoint, ops: MakeOps | None) -> CudaDesk:
    """Steps as large as the largest of the story: every token, padding too, is dozens of programs in every layer."""
    return CudaDesk(checkpoint, slots=3, blocks=10, context_len=64, max_step_tokens=14, ops=ops)


def _story(desk: CudaDesk) -> list[list[int]]:
    """Chunks alone, chunks and a late comer beside a decode row, decode rows alone, one row alone; greedy and by chance."""
    desk.begin(0, ids(6))
    desk.begin(2, ids(17, seed=1), sampling=CHANCE)
    results = [desk.advance({0: 6, 2: 8})]
    desk.begin(1, ids(4, seed=2), sampling=replace(CHANCE, top_k=0, top_p=0.9))
    results += [desk.advance(chunks) for chunks in ({1: 4, 0: 1, 2: 9}, {0: 1, 2: 1, 1: 1}, {0: 1})]
    assert not any(result.statuses.any() for result in results)
    return [result.tokens.tolist() for result in results]


def test_steps_over_kernels_say_what_the_reference_says() -> None:
    """Greedy rows token by token; drawn ones have other, as good chances, so of them only the first logits are compared.
    One layer: the next one's kernels are the same."""
    _, checkpoint = model("qwen3")
    checkpoint.shape = replace(checkpoint.shape, num_layers=1)
    plain, kernels = (_desk(checkpoint, ops) for ops in (None, TritonOps))
    told, truth = _story(kernels), _story(plain)
    assert [told[0][0], told[1][1], told[2][0], told[3][0]] == [truth[0][0], truth[1][1], truth[2][0], truth[3][0]]
    assert (torch.stack(kernels.logits[0]) - torch.stack(plain.logits[0])).abs().max() < 1e-2
    for slot in (1, 2):
        assert (kernels.logits[slot][0] - plain.logits[slot][0]).abs().max() < 1e-2


def test_products_are_fused_where_a_program_has_room_for_their_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = model("qwen3")[1].shape
    assert TritonOps(shape, 4, torch.device("cpu")).fuses(8)
    monkeypatch.setattr(triton_ops, "_shared_bytes", lambda device: 99 << 10)
    assert not TritonOps(shape, 4, torch.device("cpu")).fuses(8)


def test_a_step_begins_as_the_reference_does() -> None:
    words = SlotWords(slots=5, width=6)
    for layout in (Layout(4, 4), Layout(3, 1, 12, 2, 2)):
        found = []
        for ops in (ReferenceOps(), TritonOps(model("qwen3")[1].shape, 4, torch.device("cpu"))):
            slots, inputs = DeviceSlots(words, torch.device("cpu")), StepInputs(16, torch.device("cpu"))
            slots.words.copy_(torch.arange(words.size))
            ops.begin(_packet(layout, words), layout, slots, inputs, 16)
            found.append((slots.words, inputs.ids, inputs.positions, inputs.cells))
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


def _packet(layout: Layout, words: SlotWords) -> torch.Tensor:
    packet = torch.zeros(200, dtype=torch.int32)
    parts = {name: packet[at : at + size] for name, (at, size) in layout.sections.items()}
    parts["slots"][:] = torch.tensor([4, 0, -1, 2][: layout.rows])
    parts["ends"][:] = torch.tensor([40, 7, 1, 90][: layout.rows])
    if layout.tokens:
        parts["owners"][:] = torch.tensor([0, *[1] * 7, *[2] * 3, -1])
        parts["positions"][:] = torch.tensor([39, *range(7), *range(3), 5])
        parts["ids"][:] = torch.tensor([-1, *range(100, 107), 1, 2, 3, 9])
    at = layout.changes_at
    changes = torch.tensor([[words.tables_at + 4 * 6 + 2, 77], [words.at("last") + 4, 55]], dtype=torch.int32)
    packet[at : at + 4] = changes.view(-1)
    packet[0] = 2
    return packet
