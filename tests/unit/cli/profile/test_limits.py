"""Where the knee lies and what memory holds, by hand-made points."""

import pytest

from headrace.cli.profile.limits import KNEE_MEANS, binding, find_knees, knee_words, memory_lengths, memory_words
from headrace.cli.profile.report import sentences
from headrace.core.profile import DecodePoint, MemoryUse
from tests.unit.cli.profile.profile_rig import a_profile

pytestmark = pytest.mark.unit


def curve(*steps_ms: float, prompt_tokens: int = 128) -> list[DecodePoint]:
    """Steps of 1, 2, 4 … rows that take so long."""
    return [
        DecodePoint(1 << power, prompt_tokens, 100 << power, 24, ms / 1e3, ms / 1e3, (1 << power) / (ms / 1e3))
        for power, ms in enumerate(steps_ms)
    ]


def test_the_knee_is_the_last_batch_that_gains_more_tokens_than_it_costs_latency() -> None:
    # 8 rows: 1.6x the tokens for 1.25x the wait; 16 rows: 1.25x the tokens for 1.6x the wait.
    (knee,) = find_knees(curve(10, 11, 12.8, 16, 25.6, 51.2))
    assert (knee.rows, knee.is_last) == (8, False)
    assert knee.tokens_per_s == pytest.approx(500) and knee.itl_s == pytest.approx(16e-3)
    assert knee_words(knee) == "behind 128 prompt tokens the knee is at 8 rows, 500.0 tokens/s at 16.0 ms a token"


def test_steps_that_grow_with_their_rows_have_their_knee_at_one() -> None:
    (knee,) = find_knees(curve(10, 20, 40))
    assert knee.rows == 1 and "1 row," in knee_words(knee)


def test_where_rows_are_nearly_free_there_is_no_knee_yet() -> None:
    (knee,) = find_knees(curve(10, 10.1, 10.2, 10.4))
    assert knee.is_last and "no knee up to 8 rows" in knee_words(knee)


def test_one_slow_point_does_not_make_a_knee() -> None:
    (knee,) = find_knees(curve(10, 18, 12.8, 16, 32))
    assert knee.rows == 8


def test_each_length_of_prompt_has_its_own_knee() -> None:
    knees = find_knees([*curve(10, 11, 12, 30), *curve(20, 40, 80, prompt_tokens=1024)])
    assert [(knee.prompt_tokens, knee.rows) for knee in knees] == [(128, 4), (1024, 1)]


def test_memory_holds_whole_blocks() -> None:
    memory = MemoryUse(1, 1, 1, 16, 100, 100)
    assert (memory.sequences(16), memory.sequences(17), memory.sequences(1600)) == (100, 50, 1)
    assert memory.sequences(1601) == 0


def test_what_binds_is_named() -> None:
    profile = a_profile()
    # 32,000 tokens of KV for 32 slots.
    assert binding(profile, 992) == "slots" and binding(profile, 2048) == "KV"
    assert "binds before the 32 slots do when sequences come to more than 992 tokens" in memory_words(profile)
    assert memory_lengths(profile) == [16, 32, 64, 128, 256, 512, 1024, 2048]


def test_ample_memory_is_said_with_what_it_could_hold() -> None:
    roomy = a_profile(memory=MemoryUse(1, 1, 16_000, 16, 4096, 8192))
    assert "every slot may come to the whole context of 2,048 tokens; memory would hold 64 such" in memory_words(roomy)
    assert "would hold" not in memory_words(a_profile(memory=MemoryUse(1, 1, 16_000, 16, 4096, 4096)))


def test_what_costs_nothing_has_a_usual_unit() -> None:
    assert any("+ 0 s a chunk's token × its context" in line for line in sentences(a_profile(c_att_s=0.0)))


def test_the_report_says_what_a_knee_is() -> None:
    told = sentences(a_profile(notes=("something was left out",)))
    assert KNEE_MEANS in told and told[-1] == "something was left out"
    assert any("a step takes 5 ms + 20 µs a prompt token + 30 µs a decode row" in line for line in told)
