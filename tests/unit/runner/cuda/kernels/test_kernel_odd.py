"""Odd rows over the kernels themselves: what the sampler of processors says, and what the plain reference does."""

import pytest
import torch
from msgspec.structs import replace

from headrace.core.plan import RowStatus
from headrace.core.request import MAX_LOGPROBS
from headrace.runner.cuda.device_slots import DeviceSlots
from headrace.runner.cuda.exact_ops import ExactOps
from headrace.runner.cuda.odd_space import PROMPT_BIT, OddSpace, score_words
from headrace.runner.cuda.ops import Ops
from headrace.runner.cuda.reference_ops import ReferenceOps
from headrace.runner.cuda.slot_words import SlotWords
from headrace.runner.cuda.triton_ops import TritonOps
from tests.unit.runner.cuda.odd_rig import ODD, TwinDesk
from tests.unit.runner.torch.model_rig import ids, model

VOCAB = 160
CPU = torch.device("cpu")


@pytest.mark.parametrize("kinds", [("frequency", "all"), ("no end yet", "scores"), ("allowed", "presence, drawn")])
def test_odd_rows_over_kernels_are_told_what_the_sampler_says(kinds: tuple[str, str]) -> None:
    """Beside a plain row and a chunk; drawn tokens may differ by the last bits of a chance."""
    _, checkpoint = model("qwen3")
    checkpoint.shape = replace(checkpoint.shape, num_layers=1)
    desk = TwinDesk(checkpoint, slots=3, blocks=10, context_len=64, max_step_tokens=14, ops=TritonOps, is_exact=False)
    for slot, kind in enumerate(kinds):
        desk.begin(slot, ids(4 + slot, seed=slot), sampling=ODD[kind])
    desk.advance({0: 4, 1: 5})
    desk.begin(2, ids(4, seed=2))
    desk.advance({2: 4, 1: 1, 0: 1})
    desk.advance({0: 1, 2: 1, 1: 1})


def _chosen(ops: Ops) -> tuple[torch.Tensor, ...]:
    """Four samples: one whose every id is forbidden, one with a NaN, one that had none to begin with, one that goes well."""
    space, state = OddSpace(4, VOCAB, CPU), DeviceSlots(SlotWords(4, 2), CPU)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2))
    logits[1, 9] = torch.nan
    logits[2] = -torch.inf
    tokens, statuses = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.uint8)
    ops.sample(logits, torch.arange(4, dtype=torch.int32), state, tokens, statuses)
    assert statuses.tolist() == [0, RowStatus.NOT_FINITE, RowStatus.NOT_FINITE, 0]
    space.set_counts(3, torch.tensor([1, 2, 2, int(logits[3].argmax())], dtype=torch.int32), 2)
    space.set_limit(5, torch.zeros(VOCAB // 32, dtype=torch.int32))
    packet = torch.full((space.layout.masks_at,), -1, dtype=torch.int32)
    sections = {name: packet[space.layout.at(name) :] for name in ("places", "slots", "limits", "counts")}
    sections["places"][:4] = sections["slots"][:4] = torch.tensor([3, 0, 1, 2])
    sections["limits"][1:4] = 5
    sections["counts"][:1] = 3
    for name in ("repetition", "frequency", "presence"):
        packet[space.layout.at(name) :][:4] = torch.full((4,), 50.0).view(torch.int32)
    packet[space.layout.at("scored") :][:2] = torch.tensor([3, 1])
    packet[space.layout.at("alternatives") :][:2] = torch.tensor([MAX_LOGPROBS, 2])
    space.receive(packet)
    (rows,) = space.ruled(4)
    ops.sample_ruled(logits, rows, state, tokens, statuses)
    scored = space.scored(2, torch.zeros(score_words(2), dtype=torch.int32))
    ops.score(logits, scored, tokens)
    counts = rows.rules.counts[3].clone()
    return tokens, statuses, state.last, counts, scored.top_ids[:1], scored.top_logprobs[:1], scored.logprobs[:1]


@pytest.mark.parametrize("kind", [TritonOps, ExactOps])
def test_whatever_failed_keeps_its_reason_and_is_not_counted(kind: type[TritonOps]) -> None:
    found = _chosen(kind(model("qwen3")[1].shape, 4, CPU))
    for one, other in zip(found, _chosen(ReferenceOps()), strict=True):
        torch.testing.assert_close(one, other)
    tokens, statuses, last, counts, *_ = found
    assert statuses.tolist() == [RowStatus.MASK, RowStatus.NOT_FINITE, RowStatus.NOT_FINITE, RowStatus.OK]
    assert tokens[:3].tolist() == [-1, -1, -1] and last.tolist() == [0, 0, 0, int(tokens[3])]
    # Two of the prompt, one of which was said as well, the likeliest, and the token, which is another now.
    assert sorted(counts[counts != 0].tolist()) == [1, 1, PROMPT_BIT, PROMPT_BIT + 1]
    assert counts[tokens[3]] == 1
