"""Whole steps over the kernels themselves: the runner says what it says over their plain reference."""

import torch
from msgspec.structs import replace

from headrace.core.request import SamplingParams
from headrace.runner.cuda.device_slots import DeviceSlots, StepInputs
from headrace.runner.cuda.lane import HostLane
from headrace.runner.cuda.layout import Layout
from headrace.runner.cuda.reference_ops import ReferenceOps
from headrace.runner.cuda.runner import CudaRunner
from headrace.runner.cuda.slot_words import SlotWords
from headrace.runner.cuda.triton_ops import TritonOps
from headrace.runner.cuda.weights import from_checkpoint
from tests.unit.runner.cuda.cuda_rig import CudaDesk
from tests.unit.runner.torch.model_rig import TensorCheckpoint, ids, model

CHANCE = SamplingParams(temperature=1.2, top_k=30, seed=3)


def _kernel_desk(checkpoint: TensorCheckpoint) -> CudaDesk:
    desk = CudaDesk(checkpoint, slots=4, blocks=40, context_len=200, max_step_tokens=64)
    lane = HostLane()
    runner = CudaRunner(
        desk.config,
        checkpoint.shape,
        from_checkpoint(checkpoint),
        TritonOps(checkpoint.shape, desk.config.slots, lane.device),
        lane,
        dtype=torch.float32,
        poison=True,
        keep_logits=True,
    )
    runner.load()
    desk.runner = runner  # type: ignore[assignment]
    return desk


def _story(desk: CudaDesk) -> list[list[int]]:
    """Chunks beside decode rows, a late comer, chance; every token that came."""
    desk.begin(0, ids(20))
    desk.begin(2, ids(33, seed=1), sampling=CHANCE)
    told = []
    for chunks in ({0: 20, 2: 7}, {0: 1, 2: 26}, {0: 1, 2: 1}, {2: 1}):
        result = desk.advance(chunks)
        assert not result.statuses.any()
        told.append(result.tokens.tolist())
    desk.begin(3, ids(5, seed=2), sampling=replace(CHANCE, top_k=0, top_p=0.9))
    told += [desk.advance({3: 5, 0: 1, 2: 1}).tokens.tolist(), desk.advance({0: 1, 2: 1, 3: 1}).tokens.tolist()]
    return told


def test_steps_over_kernels_say_what_the_reference_says() -> None:
    """Greedy rows token by token; drawn ones have other, as good chances, so of them only the first logits are compared."""
    _, checkpoint = model("qwen3")
    kernels, plain = _kernel_desk(checkpoint), CudaDesk(checkpoint, slots=4, blocks=40, context_len=200)
    told, truth = _story(kernels), _story(plain)
    assert [tokens[0] for tokens in told[:3]] == [tokens[0] for tokens in truth[:3]]
    assert told[4][1] == truth[4][1] and told[5][0] == truth[5][0]
    assert (torch.stack(kernels.logits[0]) - torch.stack(plain.logits[0])).abs().max() < 1e-2
    assert (kernels.logits[2][0] - plain.logits[2][0]).abs().max() < 1e-2


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
