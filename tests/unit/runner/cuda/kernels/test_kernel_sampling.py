"""Sampling in the interpreter: greedy rows, drawn rows under every filter, broken rows; scores and rules."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.core.plan import RowStatus
from headrace.core.request import SamplingParams
from headrace.runner.cuda.kernels import plain, plain_rules
from headrace.runner.cuda.kernels.rules import apply_rules
from headrace.runner.cuda.kernels.sampling import Draws, draw_ruled, sample
from headrace.runner.cuda.kernels.scan import Scan, scan
from headrace.runner.cuda.kernels.scores import score
from headrace.runner.cuda.odd_space import PROMPT_BIT, RuledRows, Rules
from headrace.runner.torch import luck
from tests.unit.runner.torch.sampler_rig import Rig

pytestmark = pytest.mark.unit


def settings(slots: int, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Draws:
    """Every slot the same but for its seed."""
    return Draws(
        seeds=torch.tensor([luck.key(seed, 0) for seed in range(slots)]),
        positions=torch.arange(slots, dtype=torch.int32) + 5,
        temperature=torch.full((slots,), temperature),
        top_k=torch.full((slots,), top_k, dtype=torch.int32),
        top_p=torch.full((slots,), top_p),
        min_p=torch.full((slots,), min_p),
    )


def uniform(draws: Draws) -> Tensor:
    """The number that each slot's token depends on."""
    bits = luck.bits(draws.seeds, draws.positions.long())
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def run(logits: Tensor, slots: list[int], draws: Draws) -> tuple[list[int], list[int]]:
    tokens = torch.full((len(slots),), -7, dtype=torch.int32)
    statuses = torch.full((len(slots),), 77, dtype=torch.uint8)
    room = Scan.make(len(slots), logits.shape[1], "cpu")
    sample(logits, torch.tensor(slots, dtype=torch.int32), draws, tokens, statuses, room)
    return tokens.tolist(), statuses.tolist()


def logits_of(rows: int, vocab: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_greedy_rows_take_the_first_of_the_best(dtype: torch.dtype) -> None:
    logits = logits_of(3, 5000).to(dtype)
    logits[0, [4100, 63, 64]] = 50.0
    logits[1, 4999] = 60.0
    tokens, statuses = run(logits, [2, 0, 1], settings(3))
    assert tokens == [63, 4999, int(logits[2].float().argmax())]
    assert statuses == [RowStatus.OK] * 3


def test_a_broken_row_fails_alone() -> None:
    logits = logits_of(5, 4200)
    logits[0, 4150] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    logits[4, 17] = 99.0
    draws = settings(5, temperature=1.0, top_p=0.9)
    tokens, statuses = run(logits, [0, 1, 2, -1, 4], draws)
    assert statuses == [RowStatus.NOT_FINITE] * 3 + [RowStatus.OK] * 2
    assert tokens == [-1, -1, -1, -1, 17]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.7, 20, 0.95, 0.0), (1.0, 64, 1.0, 0.05), (0.3, 0, 0.8, 0.0), (1e-5, 0, 0.99, 0.3)],
)
def test_what_settles_among_the_best_is_drawn_in_their_order(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    slots = 3
    logits, draws = logits_of(slots, 4500), settings(slots, temperature, top_k, top_p, min_p)
    tokens, _ = run(logits, list(range(slots)), draws)
    for row, mark in enumerate(uniform(draws).tolist()):
        chances = plain.kept(logits[row], temperature, top_k, top_p, min_p)
        order = torch.argsort(logits[row], descending=True, stable=True)
        place = int((chances[order].cumsum(0) <= mark).sum())
        assert tokens[row] == int(order[place])


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 0.6, 0.0), (100, 0.9, 0.02), (0, 1.0, 0.02)])
def test_wide_draws_stay_among_what_the_filters_keep(top_k: int, top_p: float, min_p: float) -> None:
    slots = 4
    # Coarse values: many ids are equal, and the lower id is the better.
    logits = (logits_of(1, 400, spread=0.6).round(decimals=1)).expand(slots, -1).contiguous()
    chances = plain.kept(logits[0], 1.0, top_k, top_p, min_p)
    tokens, statuses = run(logits, list(range(slots)), settings(slots, 1.0, top_k, top_p, min_p))
    assert statuses == [RowStatus.OK] * slots
    assert all(chances[token] > 0 for token in tokens)
    assert len(set(tokens)) > 1


def test_without_filters_the_number_alone_says_which_id() -> None:
    slots = 4
    logits, draws = logits_of(slots, 9000, spread=1.0), settings(slots, 1.0)
    tokens, _ = run(logits, list(range(slots)), draws)
    sums = torch.softmax(logits.double(), -1).cumsum(-1)
    assert tokens == (sums <= uniform(draws)[:, None]).sum(-1).tolist()


def test_a_slots_token_does_not_depend_on_its_row() -> None:
    logits, draws = logits_of(4, 300, spread=0.5), settings(4, 1.0, 0, 0.8)
    tokens, _ = run(logits, [0, 1, 2, 3], draws)
    turned, _ = run(logits.flip(0), [3, 2, 1, 0], draws)
    assert turned == tokens[::-1]


def test_the_next_input_is_noted_by_slot() -> None:
    logits = logits_of(2, 100)
    logits[1, 0] = torch.nan
    last = torch.full((4,), 55, dtype=torch.int32)
    tokens, statuses = torch.empty(2, dtype=torch.int32), torch.empty(2, dtype=torch.uint8)
    named = torch.tensor([3, 1], dtype=torch.int32)
    sample(logits, named, settings(4), tokens, statuses, Scan.make(2, 100, "cpu"), last=last)
    assert last.tolist() == [55, 0, 55, int(logits[0].argmax())]


def test_scores_are_those_of_the_model() -> None:
    logits = logits_of(4, 4300).bfloat16()
    logits[2, 7] = torch.nan
    logits[3, 10:] = -torch.inf
    # Tokens by place: that of place 1 is nobody's here, that of place 2 failed.
    places, ids, asked = torch.tensor([3, 0, -1, 2]), torch.tensor([4200, 9, -1, 4]), torch.tensor([12, 3, 5, 2])
    logprobs = torch.full((4,), 9.0)
    top_ids, top_logprobs = torch.full((4, 16), 9, dtype=torch.int32), torch.full((4, 16), 9.0)
    score(logits, places, ids, asked, logprobs, top_ids, top_logprobs, Scan.make(4, 4300, "cpu"))
    want = torch.log_softmax(logits.float(), -1)
    torch.testing.assert_close(logprobs[:2], torch.stack((want[3, 4], want[0, 4200])), atol=1e-5, rtol=1e-5)
    assert logprobs[2] == 9.0 and logprobs[3].isnan()
    best = torch.sort(want[0], descending=True, stable=True)
    assert top_ids[1].tolist() == [*best.indices[:3].tolist(), *[-1] * 13]
    torch.testing.assert_close(top_logprobs[1, :3], best.values[:3], atol=1e-5, rtol=1e-5)
    assert sorted(top_ids[0, :10].tolist()) == list(range(10)) and (top_ids[0, 10:] == -1).all()
    assert (top_ids[3] == -1).all()


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rules_of(vocab: int, **given: Tensor) -> Rules:
    """Of four rows, none of which has a line where none is given."""
    words = -(-vocab // 32)
    nothing = {
        "bias": torch.full((1, vocab), torch.nan),
        "limits": torch.zeros(1, words, dtype=torch.int32),
        "masks": torch.zeros(1, words, dtype=torch.int32),
        "counts": torch.ones(1, vocab, dtype=torch.int32),
        "factors": torch.full((3, 4), torch.nan),
    }
    lines = dict.fromkeys(("bias_lines", "limit_lines", "mask_lines", "count_lines"), ints(-1, -1, -1, -1))
    return Rules(**{**nothing, **lines, **given})


def test_rules_forbid_favour_and_penalise() -> None:
    vocab = 2100
    logits = logits_of(3, vocab)
    logits[2, 5] = torch.nan
    bias = torch.zeros(2, vocab)
    bias[1, 40], bias[1, 41] = 2.5, -torch.inf
    words, limits = torch.zeros(2, 1, 66, dtype=torch.int32)
    words[0, 2] = -(2**31) + 1
    words[0, 65] = -1
    limits[0, 2] = limits[0, 65] = 1
    counts = torch.zeros(1, vocab, dtype=torch.int32)
    counts[0, 8], counts[0, 9], counts[0, 10] = PROMPT_BIT, 3, PROMPT_BIT + 2
    rules = rules_of(
        vocab,
        bias=bias,
        bias_lines=ints(1, -1, -1, -1),
        masks=words,
        mask_lines=ints(-1, 0, 0, -1),
        limits=limits,
        limit_lines=ints(-1, -1, 0, -1),
        counts=counts,
        count_lines=ints(0, -1, -1, 0),
        factors=torch.tensor([[1.5], [0.25], [0.5]]).expand(3, 4).contiguous(),
    )
    out, room = torch.full((4, vocab), 7.0), Scan.make(4, vocab, "cpu")
    apply_rules(logits, RuledRows(ints(1, 0, 2, -1), ints(3, 2, 1, -1), rules, out), torch.ones(4), room)
    want = logits[1] + bias[1]
    for token, count in ((8, 0), (9, 3), (10, 2)):
        want[token] = want[token] / 1.5 if want[token] > 0 else want[token] * 1.5
        want[token] -= 0.25 * count
        want[token] -= 0.5 if count else 0.0
    assert torch.equal(out[0], want)
    allowed = torch.full((vocab,), -torch.inf)
    for held in ([64, 95], list(range(2080, vocab))):
        allowed[held] = logits[0, held]
    assert torch.equal(out[1], allowed)
    # What failed is seen through every mask; both hold, and what the model gave is left of the rest.
    assert out[2, 5].isnan() and out[2].isfinite().nonzero().flatten().tolist() == [64, 2080]
    assert (out[3] == 7.0).all()
    for row, place in enumerate((1, 0, 2)):
        assert torch.equal(out[row].nan_to_num(), plain_rules.ruled(logits[place], rules, row).nan_to_num())
    # The scan is that of what was written.
    assert room.best[:2, 0].tolist() == out[:2].amax(-1).tolist() and room.best[2, 0].isnan()
    assert room.at[:2, 0].tolist() == out[:2].argmax(-1).tolist()
    torch.testing.assert_close(room.mass[:2, 0].log() + room.best[:2, 0], out[:2].logsumexp(-1))


def test_what_was_chosen_under_rules_is_settled_at_its_place_and_counted() -> None:
    counts = torch.zeros(3, 40, dtype=torch.int32)
    counts[2, 10] = PROMPT_BIT + 2
    logits = torch.zeros(5, 40)
    for row, token in enumerate((10, 6, 7, 8, 9)):
        logits[row, token] = 5.0
    logits[1] = -torch.inf
    rules, places, slots = (
        rules_of(40, counts=counts, count_lines=ints(2, 0, 1, -1, 0)),
        ints(3, 0, 1, 2, -1),
        ints(0, 1, 2, 3, -1),
    )
    rows, draws, room = RuledRows(places, slots, rules, logits), settings(4), Scan.make(5, 40, "cpu")
    scan(logits, slots, draws.temperature, room)
    tokens, statuses = ints(1, -1, 3, 4), torch.tensor([0, RowStatus.NOT_FINITE, 0, 0], dtype=torch.uint8)
    last = ints(50, 51, 52, 53)
    draw_ruled(rows, draws, tokens, statuses, room, last)
    # The third had failed before rules were looked at, and the second has nothing left.
    assert tokens.tolist() == [-1, -1, 8, 10]
    assert statuses.tolist() == [RowStatus.MASK, RowStatus.NOT_FINITE, RowStatus.OK, RowStatus.OK]
    assert last.tolist() == [10, 0, 7, 8]
    assert counts[2, 10] == PROMPT_BIT + 3 and counts[:2].sum() == 0


def test_settings_are_looked_up_by_slot() -> None:
    logits = logits_of(1, 300).expand(2, -1).contiguous()
    draws = settings(2)
    draws = replace(draws, temperature=torch.tensor([0.0, 50.0]))
    tokens, _ = run(logits, [1, 0], draws)
    assert tokens[1] == int(logits[0].argmax()) != tokens[0]


@pytest.mark.parametrize(
    ("vocab", "top_k", "top_p", "min_p"),
    [
        (700, 40, 0.9, 0.0),
        (700, 64, 1.0, 0.0),
        (700, 100, 1.0, 0.0),
        (700, 256, 0.7, 0.0),
        (700, 300, 0.9, 0.0),
        (700, 300, 1.0, 0.0),
        (700, 0, 1.0, 0.02),
        (700, 0, 0.8, 0.02),
        (700, 0, 0.4, 0.0),
        (700, 256, 0.2, 0.0),
        (200, 0, 0.4, 0.0),
        (200, 100, 1.0, 0.0),
        (50, 0, 1.0, 0.0),
        (50, 0, 0.5, 0.0),
    ],
)
def test_a_token_is_the_one_that_a_cpu_draws(vocab: int, top_k: int, top_p: float, min_p: float) -> None:
    """However many ids the filters leave, and rules before them: of these logits 2 % of the best chance leaves more than a
    hundred, and every other row has thirty ids."""
    slots = 12
    logits, draws = logits_of(slots, vocab, spread=1.0), settings(slots, 1.0, top_k, top_p, min_p)
    logits[::2, 15 : vocab - 15] = -torch.inf
    tokens, _ = run(logits, list(range(slots)), draws)
    twin = Rig(vocab, slots=slots)
    for slot in range(slots):
        twin.begin(slot, SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, seed=slot))
    rows = np.arange(slots, dtype=np.int32)
    told = twin.sampler.sample(logits.clone(), rows, draws.positions.numpy(), None, rows)
    assert tokens == told.tokens.tolist()
