"""What each setting does to a row, how rows fail alone, and what is reported of them."""

import numpy as np
import pytest
import torch

from headrace.core.plan import Masks, RowStatus
from headrace.core.request import SamplingParams
from tests.unit.runner.torch.sampler_rig import FloatArray, Rig, ints, plain_logits, words

GREEDY = SamplingParams(temperature=0.0)


def greedy(**settings: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, **settings)  # type: ignore[arg-type]


def noise(rows: int, vocab_size: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).normal(0, 3, (rows, vocab_size)).astype(np.float32)


def logprobs_of(logits: FloatArray) -> FloatArray:
    values = logits.astype(np.float64)
    peak = values.max(-1, keepdims=True)
    result: FloatArray = (values - peak - np.log(np.exp(values - peak).sum(-1, keepdims=True))).astype(np.float32)
    return result


class TestGreedy:
    @pytest.mark.parametrize("vocab_size", [1, 5, 64, 65, 1000, 49152])
    def test_the_likeliest_id_is_taken(self, vocab_size: int) -> None:
        rig = Rig(vocab_size)
        for slot in range(4):
            rig.begin(slot, GREEDY)
        logits = noise(4, vocab_size)
        assert rig.sample(logits, range(4)).tokens.tolist() == logits.argmax(-1).tolist()

    def test_of_equals_the_lowest_id_is_taken(self) -> None:
        rig = Rig(300)
        rig.begin(0, GREEDY)
        logits = np.zeros(300, np.float32)
        logits[[70, 71, 200]] = 2.0
        assert rig.token(logits) == 70

    def test_no_rows_give_no_tokens(self) -> None:
        sampled = Rig(10).sample(np.zeros((0, 10), np.float32), [])
        assert (len(sampled.tokens), len(sampled.statuses), sampled.scores) == (0, 0, None)

    def test_a_slot_forgets_its_last_occupant(self) -> None:
        rig = Rig(100, eos_ids=[9])
        rig.begin(0, SamplingParams(logit_bias=((3, 50.0),), allowed_ids=(3, 4), logprobs=2, masked=True, min_tokens=9))
        rig.begin(0, GREEDY)
        sampled = rig.sample(noise(1, 100), [0])
        assert (sampled.tokens.tolist(), sampled.scores) == (noise(1, 100).argmax(-1).tolist(), None)


class TestFailures:
    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    @pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5), greedy(logprobs=1)])
    def test_a_row_that_is_not_finite_fails_alone(self, bad: float, sampling: SamplingParams) -> None:
        rig, logits = Rig(200), noise(3, 200)
        for slot in range(3):
            rig.begin(slot, sampling)
        alone = rig.sample(logits[[0, 2]], [0, 2]).tokens.tolist()
        logits[1, 150] = bad
        sampled = rig.sample(logits, range(3))
        assert sampled.statuses.tolist() == [RowStatus.OK, RowStatus.NOT_FINITE, RowStatus.OK]
        assert sampled.tokens.tolist() == [alone[0], -1, alone[1]]
        assert sampled.scores is None or sampled.scores.owners.tolist() == [0, 2]

    def test_a_row_of_nothing_fails(self) -> None:
        rig = Rig(50)
        rig.begin(0, SamplingParams())
        assert rig.sample(np.full((1, 50), -np.inf, np.float32), [0]).statuses.tolist() == [RowStatus.NOT_FINITE]

    def test_a_forbidden_id_does_not_hide_that_it_was_not_a_number(self) -> None:
        rig, logits = Rig(50), noise(1, 50)
        rig.begin(0, greedy(allowed_ids=(3, 4)))
        logits[0, 7] = np.nan
        assert rig.sample(logits, [0]).statuses.tolist() == [RowStatus.NOT_FINITE]

    def test_a_mask_that_leaves_nothing_fails_its_row_alone(self) -> None:
        rig = Rig(70)
        for slot in range(3):
            rig.begin(slot, SamplingParams(masked=True))
        masks = Masks(ints([0, 1, 2]), words(70, [[5], [], [69]]))
        sampled = rig.sample(noise(3, 70), range(3), masks=masks)
        assert sampled.statuses.tolist() == [RowStatus.OK, RowStatus.MASK, RowStatus.OK]
        assert sampled.tokens.tolist() == [5, -1, 69]

    def test_allowed_ids_that_a_mask_forbids_leave_nothing(self) -> None:
        rig = Rig(70)
        rig.begin(0, SamplingParams(allowed_ids=(1, 2), masked=True))
        assert rig.sample(noise(1, 70), [0], masks=Masks(ints([0]), words(70, [[3]]))).statuses.tolist() == [3]

    def test_a_masked_row_without_its_mask_fails_alone(self) -> None:
        rig = Rig(70)
        rig.begin(0, greedy(masked=True))
        rig.begin(1, greedy(masked=True))
        for masks in (None, Masks(ints([9]), words(70, [[5]]))):
            sampled = rig.sample(noise(2, 70), [0, 1], masks=masks, rows=[8, 9])
            assert sampled.statuses.tolist()[0] == RowStatus.MASK
            assert sampled.statuses.tolist()[1] == (RowStatus.MASK if masks is None else RowStatus.OK)

    def test_a_bias_that_overflows_fails_its_row(self) -> None:
        rig, logits = Rig(50), np.full((1, 50), 3e38, np.float32)
        rig.begin(0, SamplingParams(logit_bias=((4, 3e38),)))
        assert rig.sample(logits, [0]).statuses.tolist() == [RowStatus.NOT_FINITE]


class TestRules:
    def test_masks_speak_of_rows_of_the_plan(self) -> None:
        rig = Rig(100)
        for slot in range(3):
            rig.begin(slot, greedy(masked=slot != 1))
        masks = Masks(ints([6, 2]), words(100, [[31, 32], [64, 99]]))
        logits = noise(3, 100)
        tokens = rig.sample(logits, [0, 1, 2], masks=masks, rows=[2, 4, 6]).tokens.tolist()
        assert tokens == [
            64 if logits[0, 64] > logits[0, 99] else 99,
            int(logits[1].argmax()),
            31 if logits[2, 31] > logits[2, 32] else 32,
        ]

    def test_ids_that_a_mask_has_no_bit_for_are_forbidden(self) -> None:
        rig, logits = Rig(100), np.zeros((1, 100), np.float32)
        rig.begin(0, greedy(masked=True))
        logits[0, 80] = 9.0
        assert rig.sample(logits, [0], masks=Masks(ints([0]), words(64, [[40, 50]]))).tokens.tolist() == [40]

    def test_ends_are_forbidden_before_min_tokens_and_not_after(self) -> None:
        rig, logits = Rig(50, eos_ids=[7]), noise(1, 50)[0]
        logits[[7, 8]] = 50.0, 40.0
        rig.begin(0, greedy(min_tokens=2, stop_ids=(8,)), ids=range(5), num_prompt=4)
        third = int(np.argsort(logits)[-3])
        assert [rig.token(logits, position=position) for position in (4, 5, 6)] == [third, third, 7]

    def test_ends_come_back_beside_other_rules(self) -> None:
        rig, logits = Rig(50, eos_ids=[7]), np.zeros(50, np.float32)
        rig.begin(0, greedy(min_tokens=2, logit_bias=((7, 5.0), (8, 4.0))))
        assert [rig.token(logits, position=position) for position in (3, 4, 5)] == [8, 8, 7]

    def test_an_end_that_is_ignored_is_not_forbidden(self) -> None:
        rig, logits = Rig(50, eos_ids=[7]), noise(1, 50)[0]
        logits[[7, 8]] = 50.0, 60.0
        rig.begin(0, greedy(min_tokens=9, stop_ids=(8,), ignore_eos=True))
        assert rig.token(logits) == 7

    def test_bias_and_allowed_ids_choose(self) -> None:
        rig, logits = Rig(50), noise(2, 50)
        rig.begin(0, greedy(logit_bias=((11, 60.0), (11, 60.0), (12, 100.0))))
        rig.begin(1, greedy(allowed_ids=(4, 9), logit_bias=((9, 100.0), (20, 200.0))))
        assert rig.sample(logits, [0, 1]).tokens.tolist() == [11, 9]


class TestPenalties:
    def test_greedy_takes_the_likeliest_after_penalties(self) -> None:
        sampling = greedy(repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.4)
        for seed in range(20):
            ids = np.random.default_rng(seed).integers(0, 60, 40).tolist()
            rig, logits = Rig(60), noise(1, 60, seed)[0]
            rig.begin(0, sampling, ids, num_prompt=25)
            assert rig.token(logits, position=40) == int(plain_logits(logits, sampling, ids, 25).argmax())

    def test_what_is_put_out_counts_from_then_on(self) -> None:
        sampling, logits = greedy(frequency_penalty=1.0, presence_penalty=0.5), noise(1, 60)[0]
        rig, ids = Rig(60), [1, 2, 3]
        rig.begin(0, sampling, ids)
        # Longer than the pool's lines are at first, beside a slot that has its own line.
        rig.begin(1, greedy(presence_penalty=100.0))
        others = []
        for _ in range(150):
            expected = int(plain_logits(logits, sampling, ids, 3).argmax())
            got = rig.sample(np.stack([logits, logits]), [0, 1], [len(ids)] * 2).tokens.tolist()
            assert got[0] == expected
            ids.append(got[0])
            others.append(got[1])
        assert sorted(others[:60]) == list(range(60))

    def test_a_new_occupant_inherits_no_counts(self) -> None:
        logits = noise(1, 60)[0]
        rig = Rig(60)
        rig.begin(0, greedy(presence_penalty=50.0))
        first = [rig.token(logits, position=position) for position in range(3, 8)]
        assert len(set(first)) == 5
        for _ in range(2):
            rig.begin(0, greedy(presence_penalty=50.0))
            assert [rig.token(logits, position=position) for position in range(3, 8)] == first
        rig.begin(0, GREEDY)
        assert rig.token(logits) == rig.token(logits, position=4) == first[0]

    def test_a_line_given_back_is_clean_for_another_slot(self) -> None:
        logits, rig = noise(1, 60)[0], Rig(60)
        for slot in range(8):
            rig.begin(slot, greedy(presence_penalty=50.0))
            first = rig.token(logits, slot)
            assert first == int(logits.argmax())
            rig.begin(slot, GREEDY)

    def test_a_replay_goes_on_as_the_undisturbed_run(self) -> None:
        sampling = SamplingParams(frequency_penalty=0.8, repetition_penalty=1.2, seed=3, top_p=0.9)
        rows = noise(30, 200)
        rig, whole = Rig(200), [1, 2, 3]
        rig.begin(0, sampling, whole)
        for row in rows:
            whole.append(rig.token(row, position=len(whole)))
        again, ids = Rig(200), whole[:15]
        again.begin(2, sampling, ids, num_prompt=3)
        for row in rows[12:]:
            ids.append(again.token(row, 2, position=len(ids)))
        assert ids == whole

    def test_a_failed_row_counts_nothing(self) -> None:
        logits, rig = noise(1, 60)[0], Rig(60)
        rig.begin(0, greedy(presence_penalty=50.0))
        broken = logits.copy()
        broken[logits.argmax()] = np.nan
        assert rig.sample(broken[None], [0]).statuses.tolist() == [RowStatus.NOT_FINITE]
        assert rig.token(logits) == int(logits.argmax())

    def test_repetition_makes_an_unlikely_id_less_likely(self) -> None:
        rig, logits = Rig(60), np.full(60, -2.0, np.float32)
        logits[3] = -1.5
        rig.begin(0, greedy(repetition_penalty=2.0), ids=(3,))
        assert rig.token(logits, position=1) == 0


class TestScores:
    def test_scores_are_of_the_raw_distribution(self) -> None:
        logits, rig = noise(3, 500), Rig(500)
        rig.begin(0, SamplingParams(temperature=0.3, top_k=5, logprobs=3, logit_bias=((7, 9.0),)))
        rig.begin(1, GREEDY)
        rig.begin(2, greedy(logprobs=1, allowed_ids=(4,), frequency_penalty=2.0))
        sampled = rig.sample(logits, [0, 1, 2], [10, 11, 12], rows=[5, 1, 3])
        expected, scores = logprobs_of(logits), sampled.scores
        assert scores is not None
        assert (scores.owners.tolist(), scores.positions.tolist()) == ([5, 3], [10, 12])
        tokens = sampled.tokens
        assert tokens[2] == 4
        np.testing.assert_allclose(scores.logprobs, [expected[0, tokens[0]], expected[2, 4]], atol=1e-5)
        best = np.argsort(-expected, -1, kind="stable")
        assert scores.top_ids.tolist() == [best[0, :3].tolist(), [best[2, 0], -1, -1]]
        np.testing.assert_allclose(scores.top_logprobs[0], expected[0, best[0, :3]], atol=1e-5)
        assert scores.top_ids.dtype == np.int32 and scores.top_logprobs.dtype == np.float32

    def test_a_score_without_alternatives(self) -> None:
        rig, logits = Rig(40), noise(1, 40)
        rig.begin(0, SamplingParams(logprobs=0))
        sampled = rig.sample(logits, [0])
        assert sampled.scores is not None and sampled.scores.top_ids.shape == (1, 0)
        assert sampled.scores.logprobs[0] == pytest.approx(logprobs_of(logits)[0, sampled.tokens[0]], abs=1e-5)

    def test_equal_alternatives_come_in_order_of_ids_and_impossible_ones_do_not(self) -> None:
        rig, logits = Rig(40), np.full((1, 40), -np.inf, np.float32)
        logits[0, [30, 9, 20]] = 1.0, 1.0, 2.0
        rig.begin(0, greedy(logprobs=5))
        scores = rig.sample(logits, [0]).scores
        assert scores is not None and scores.top_ids.tolist() == [[20, 9, 30, -1, -1]]

    def test_more_alternatives_than_ids(self) -> None:
        rig = Rig(3)
        rig.begin(0, greedy(logprobs=32), ids=(1, 2))
        scores = rig.sample(np.array([[1.0, 3.0, 2.0]], np.float32), [0]).scores
        assert scores is not None and scores.top_ids[0].tolist() == [1, 2, 0] + [-1] * 29

    def test_a_prompt_is_scored_as_asked(self) -> None:
        rig, logits = Rig(300), noise(40, 300)
        ids = np.random.default_rng(1).integers(0, 300, 40).astype(np.int32)
        rig.begin(2, SamplingParams(prompt_logprobs=2))
        rig.begin(3, SamplingParams())
        assert rig.sampler.wants_prompt_scores(2) and not rig.sampler.wants_prompt_scores(3)
        scores = rig.sampler.score_prompt(torch.tensor(logits), 2, 9, np.arange(1, 41, dtype=np.int32), ids)
        expected = logprobs_of(logits)
        assert (set(scores.owners.tolist()), scores.positions.tolist()) == ({9}, list(range(1, 41)))
        np.testing.assert_allclose(scores.logprobs, expected[np.arange(40), ids], atol=1e-5)
        assert scores.top_ids.tolist() == np.argsort(-expected, -1, kind="stable")[:, :2].tolist()

    def test_a_prompt_score_does_not_depend_on_the_slice(self) -> None:
        rig, logits, ids = Rig(300), noise(40, 300), np.arange(40, dtype=np.int32)
        rig.begin(0, SamplingParams(prompt_logprobs=4))
        whole = rig.sampler.score_prompt(torch.tensor(logits), 0, 0, ids, ids)
        for at in range(0, 40, 7):
            part = rig.sampler.score_prompt(torch.tensor(logits[at : at + 7]), 0, 0, ids[at : at + 7], ids[at : at + 7])
            assert part.logprobs.tobytes() == whole.logprobs[at : at + 7].tobytes()
            assert part.top_logprobs.tobytes() == whole.top_logprobs[at : at + 7].tobytes()
