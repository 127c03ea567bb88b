"""A sweep over an engine whose costs are known finds them, measures what it says, and leaves the engine as it was."""

import pytest

from headrace.cli.profile.sweep import Findings, SweepSetting, contexts, prompt_lengths, row_counts, sweep
from headrace.core.config import CostProfile
from headrace.core.errors import InvalidInput, RunnerFailed
from headrace.core.profile import PromptPoint
from headrace.engine.loop import Engine
from headrace.runner.faults import FaultRates, Faults
from tests.unit.cli.profile.profile_rig import TRUTH, TickingRunner, ticking_engine

pytestmark = pytest.mark.unit

SETTING = SweepSetting(patience_s=1e3, steps=6, prompt_tokens=64)


def found_by(*, depth: int = 1, setting: SweepSetting = SETTING, **sizes: object) -> tuple[Findings, Engine]:
    engine, clock, config = ticking_engine(TRUTH, depth=depth, **sizes)
    return sweep(engine, clock, config, setting, lambda done, total, words: None), engine


@pytest.mark.parametrize("depth", [1, 2])
def test_it_finds_the_coefficients_that_the_steps_obey(depth: int) -> None:
    found, _ = found_by(depth=depth)
    assert found.cost.coefficients() == pytest.approx(TRUTH.coefficients(), rel=0.02)
    assert found.fit_error_worst < 0.02


def test_every_number_of_rows_is_decoded_at_once_and_takes_what_the_steps_take() -> None:
    found, _ = found_by()
    short = [point for point in found.decode if point.prompt_tokens == 64]
    assert [point.rows for point in short] == [1, 2, 4, 8]
    for point in short:
        step_s = TRUTH.c0_s + point.rows * TRUTH.c_out_s + point.kv_tokens * TRUTH.c_kv_s
        assert point.itl_p50_s == pytest.approx(step_s, rel=0.01)
        assert point.tokens_per_s == pytest.approx(point.rows / step_s, rel=0.01)
        assert 64 * point.rows < point.kv_tokens < 128 * point.rows


def test_a_longer_context_has_a_curve_of_its_own() -> None:
    found, _ = found_by()
    by_context = {point.prompt_tokens: point.itl_p50_s for point in found.decode if point.rows == 8}
    assert by_context[512] > by_context[64]


def test_prompts_go_up_to_the_context_and_their_chunks_cost_what_they_cost() -> None:
    found, _ = found_by()
    assert [point.tokens for point in found.prompts] == [32, 64, 128, 256, 512, 1017]
    first = found.prompts[0]
    expected_s = TRUTH.c0_s + 32 * (TRUTH.c_in_s + TRUTH.c_kv_s) + 32 * 32 * TRUTH.c_att_s
    assert first.ttft_s == pytest.approx(expected_s, rel=1e-6)
    assert first.tokens_per_s == pytest.approx(32 / first.ttft_s)


def test_the_engine_is_idle_and_whole_afterwards() -> None:
    _, engine = found_by(depth=2)
    assert engine.idle and engine.num_used_blocks == 0
    engine.check()


def test_what_would_take_too_long_is_left_out_and_said() -> None:
    found, _ = found_by(setting=SweepSetting(patience_s=0.012, steps=6, prompt_tokens=64))
    assert max(point.tokens for point in found.prompts) < 512
    assert any("prompts longer than" in note and "--patience" in note for note in found.notes)


def test_rows_whose_memory_does_not_fit_are_left_out_and_said() -> None:
    found, engine = found_by(blocks=32)
    rows = [point.rows for point in found.decode if point.prompt_tokens == 64]
    assert rows == [1, 2, 4]
    told = [note.partition(" rows")[0] for note in found.notes if "rows behind 64 tokens" in note]
    assert told == sorted(told, key=int) and told[0] == "8"
    assert any(note.startswith("8 rows behind 64 tokens") and "KV memory" in note for note in found.notes)
    assert engine.num_used_blocks == 0


def test_rows_that_the_engine_would_not_run_together_are_not_said_to_lack_memory() -> None:
    # A chunk of any size takes longer than a step may: nobody starts beside running rows.
    slow = CostProfile(c0_s=1e-2, c_in_s=1.0, c_out_s=1e-2, c_kv_s=0.0, c_att_s=0.0)
    engine, clock, config = ticking_engine(slow)
    found = sweep(engine, clock, config, SETTING, lambda done, total, words: None)
    assert not any("KV memory" in note for note in found.notes)
    assert found.decode[0].rows == 1


def test_slots_that_are_no_power_of_two_are_the_last_point() -> None:
    assert row_counts(1) == [1]
    assert row_counts(8) == [1, 2, 4, 8]
    assert row_counts(12) == [1, 2, 4, 8, 12]


def test_prompts_double_and_end_with_the_longest() -> None:
    assert prompt_lengths(2048) == [32, 64, 128, 256, 512, 1024, 2041]
    assert prompt_lengths(30) == [23]


def test_the_longer_context_is_the_longest_that_a_few_rows_can_fill_in_time() -> None:
    prompts = [PromptPoint(tokens, 1, tokens / 400, 400.0, None) for tokens in (32, 64, 128, 256, 512, 1024, 2048)]
    setting = SweepSetting(patience_s=20.0)
    assert contexts(prompts, 32, 8192, setting) == [128, 512]
    assert contexts(prompts, 32, 700, setting) == [128, 256]
    assert contexts(prompts, 32, 8192, SweepSetting(patience_s=2.0)) == [16, 64]


def test_a_context_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidInput, match="too short"):
        found_by(context_len=10)


def test_a_row_that_fails_ends_it_with_its_reason() -> None:
    _, clock, config = ticking_engine()
    runner = TickingRunner(config, TRUTH, clock)
    runner.faults = Faults(FaultRates(nan=1.0))
    with pytest.raises(RunnerFailed, match=r"a sequence failed: .*not finite"):
        sweep(Engine(config, runner), clock, config, SETTING, lambda done, total, words: None)


def test_a_step_without_a_fixed_part_is_found_to_have_none() -> None:
    truth = CostProfile(c0_s=1e-6, c_in_s=5e-5, c_out_s=1e-3, c_kv_s=0.0, c_att_s=0.0)
    engine, clock, config = ticking_engine(truth)
    found = sweep(engine, clock, config, SETTING, lambda done, total, words: None)
    assert found.cost.c0_s < 1e-4 and found.cost.c_out_s == pytest.approx(1e-3, rel=0.05)


def test_progress_names_what_is_measured_and_ends_at_all() -> None:
    engine, clock, config = ticking_engine()
    told: list[tuple[int, int, str]] = []
    sweep(engine, clock, config, SETTING, lambda done, total, words: told.append((done, total, words)))
    assert told[0] == (0, told[0][1], "a prompt of 32 tokens")
    assert any("8 rows behind 64 tokens" in words for _, _, words in told)
    assert told[-1][0] == told[-1][1]
