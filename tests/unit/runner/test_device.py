"""Plans that are wrong on purpose: each must be caught, at once or by its output."""

import pytest

from headrace.core.errors import MemoryCorrupted, RunnerFailed
from headrace.runner.fake import FakeRunner
from tests.unit.runner.plans import CONFIG, begin, generate, plan, run

PROMPT = list(range(10, 22))


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner(CONFIG)


def prefilled(runner: FakeRunner) -> FakeRunner:
    """Slot 0 holds PROMPT in blocks 3, 1, 2 and has sampled once; block 4 is given and empty."""
    run(runner, plan(0, [(0, 0, 12, True)], begun=[begin(0, PROMPT, [3, 1, 2, 4])]))
    return runner


def test_a_skipped_chunk_is_caught(runner: FakeRunner) -> None:
    run(runner, plan(0, [(0, 0, 4, False)], begun=[begin(0, PROMPT, [3, 1, 2])]))
    with pytest.raises(MemoryCorrupted, match=r"slot 0, number 0: .* skipped or repeated.*position 6, 4 are"):
        runner.launch(plan(1, [(0, 6, 6, True)]))


def test_a_repeated_chunk_is_caught(runner: FakeRunner) -> None:
    run(runner, plan(0, [(0, 0, 8, False)], begun=[begin(0, PROMPT, [3, 1, 2])]))
    with pytest.raises(MemoryCorrupted, match="position 4, 8 are computed"):
        runner.launch(plan(1, [(0, 4, 8, True)]))


def test_a_decode_row_that_skips_a_position_is_caught(runner: FakeRunner) -> None:
    with pytest.raises(MemoryCorrupted, match="skipped or repeated"):
        prefilled(runner).launch(plan(1, [(0, 13, 1, True)]))


def test_a_row_in_a_slot_that_nobody_started_is_caught(runner: FakeRunner) -> None:
    with pytest.raises(MemoryCorrupted, match="slot 5, number -1"):
        runner.launch(plan(0, [(5, 0, 1, True)]))


@pytest.mark.parametrize(("count", "samples"), [(12, False), (8, True), (13, True), (13, False), (0, False)])
def test_a_row_samples_exactly_at_the_end_of_its_ids(runner: FakeRunner, count: int, samples: bool) -> None:
    with pytest.raises(MemoryCorrupted, match="ids"):
        runner.launch(plan(0, [(0, 0, count, samples)], begun=[begin(0, PROMPT, [3, 1, 2, 4])]))


def test_one_slot_twice_in_a_plan_is_caught(runner: FakeRunner) -> None:
    with pytest.raises(MemoryCorrupted, match="two writers of one cell in one step: position 12 in block 4"):
        prefilled(runner).launch(plan(1, [(0, 12, 1, True), (0, 12, 1, True)]))


def test_a_chunk_twice_in_a_plan_is_caught(runner: FakeRunner) -> None:
    rows = [(0, 0, 8, False), (0, 0, 8, False)]
    with pytest.raises(MemoryCorrupted, match="two writers of one cell: position 0 in block 3, found written"):
        runner.launch(plan(0, rows, begun=[begin(0, PROMPT, [3, 1, 2])]))


def test_a_block_twice_in_one_table_is_caught(runner: FakeRunner) -> None:
    with pytest.raises(MemoryCorrupted, match="one step: position 8 in block 1"):
        runner.launch(plan(0, [(0, 0, 12, True)], begun=[begin(0, PROMPT, [3, 1, 1])]))


def test_a_block_twice_in_one_table_is_caught_where_its_cells_do_not_meet(runner: FakeRunner) -> None:
    run(runner, plan(0, [(0, 0, 2, False)], begun=[begin(0, PROMPT, [3, 1, 3])]))
    with pytest.raises(MemoryCorrupted, match="one step: position 8 in block 3"):
        runner.launch(plan(1, [(0, 2, 8, False)]))


def test_two_decode_rows_into_one_block_are_caught(runner: FakeRunner) -> None:
    starts = [begin(slot, PROMPT, [4 * slot + 3, 4 * slot + 1, 4 * slot + 2]) for slot in range(2)]
    run(runner, plan(0, [(0, 0, 12, True), (1, 0, 12, True)], begun=starts))
    with pytest.raises(MemoryCorrupted, match="slot 0, number 0: two writers of one block, given to number 1 since"):
        runner.launch(plan(1, [(0, 12, 1, True), (1, 12, 1, True)], grown=[(0, 9), (1, 9)]))


def test_a_block_given_to_a_second_sequence_is_caught(runner: FakeRunner) -> None:
    prefilled(runner)
    run(runner, plan(1, [(1, 0, 4, False)], begun=[begin(1, PROMPT, [4, 5, 6])]))
    with pytest.raises(MemoryCorrupted, match="two writers of one cell: position 12 in block 4, found written"):
        runner.launch(plan(2, [(0, 12, 1, True)]))


def test_a_chunk_into_a_block_given_to_a_second_sequence_is_caught(runner: FakeRunner) -> None:
    run(runner, plan(0, [(0, 0, 4, False)], begun=[begin(0, PROMPT, [3, 1, 2])]))
    with pytest.raises(
        MemoryCorrupted, match="two writers of one block, given to number 1 since: position 4 in block 1"
    ):
        runner.launch(plan(1, [(0, 4, 8, True)], begun=[begin(1, PROMPT, [1, 5, 6])]))


def test_a_stolen_prompt_block_is_caught(runner: FakeRunner) -> None:
    """Block 2 holds positions 8 to 11 of slot 0: the next read of position 11 finds it unwritten."""
    with pytest.raises(MemoryCorrupted, match="not written: position 11 in block 2, found unwritten"):
        prefilled(runner).launch(plan(1, [(0, 12, 1, True)], begun=[begin(1, PROMPT, [2, 5, 6])]))


def test_reading_a_freed_block_is_caught(runner: FakeRunner) -> None:
    with pytest.raises(MemoryCorrupted, match="not written: position 11 in block 2, found poison"):
        prefilled(runner).launch(plan(1, [(0, 12, 1, True)], freed=[2]))


def test_writing_to_a_freed_block_is_caught(runner: FakeRunner) -> None:
    with pytest.raises(MemoryCorrupted, match="write to a freed block: position 12 in block 4, found poison"):
        prefilled(runner).launch(plan(1, [(0, 12, 1, True)], freed=[4]))


def test_an_earlier_freed_block_is_caught_when_sampling_looks_at_it(runner: FakeRunner) -> None:
    """Positions 0 to 3 are not a decode row's predecessor; sampling peeks at one of them soon."""
    prefilled(runner)
    run(runner, plan(1, freed=[3]))

    def decode() -> None:
        for position in range(12, 60):
            grown = [(0, position)] if position % 4 == 0 and position > 12 else []
            run(runner, plan(position, [(0, position, 1, True)], grown=grown))

    with pytest.raises(MemoryCorrupted, match=r"not written: position [0-3] in block 3, found poison"):
        decode()
    with pytest.raises(RunnerFailed, match="unusable: slot 0"):
        runner.sample(60, None)


def test_a_missing_block_is_caught(runner: FakeRunner) -> None:
    run(runner, plan(0, [(0, 0, 12, True)], begun=[begin(0, PROMPT, [3, 1, 2])]))
    with pytest.raises(MemoryCorrupted, match="position 12 in no block, found poison"):
        runner.launch(plan(1, [(0, 12, 1, True)]))


def test_a_chunk_beyond_its_blocks_is_caught(runner: FakeRunner) -> None:
    with pytest.raises(MemoryCorrupted, match="no block for position 11: 2 blocks were given"):
        runner.launch(plan(0, [(0, 0, 12, True)], begun=[begin(0, PROMPT, [3, 1])]))


def test_more_blocks_than_the_context_holds_are_caught(runner: FakeRunner) -> None:
    with pytest.raises(MemoryCorrupted, match="more than the context holds"):
        runner.launch(plan(0, begun=[begin(0, PROMPT, range(20))]))
    fresh = FakeRunner(CONFIG)
    with pytest.raises(MemoryCorrupted, match="block 18 is more than the context holds"):
        fresh.launch(plan(0, begun=[begin(0, PROMPT, range(18))], grown=[(0, 18)]))


@pytest.mark.parametrize("bad", [-1, 64, 65])
def test_a_block_that_does_not_exist_is_caught(bad: int) -> None:
    for wrong in (
        plan(0, begun=[begin(0, PROMPT, [3, 1, bad])]),
        plan(0, begun=[begin(0, PROMPT, [3, 1, 2])], grown=[(0, bad)]),
        plan(0, freed=[bad]),
    ):
        with pytest.raises(MemoryCorrupted, match=f"block {bad} does not exist"):
            FakeRunner(CONFIG).launch(wrong)


def test_a_prefix_hit_gives_the_same_tokens(runner: FakeRunner) -> None:
    prefilled(runner)
    hit = begin(1, [*PROMPT[:8], 400, 401], [3, 1, 20], num_computed=8)
    tokens = generate(runner, hit, 9, spare=[30, 31, 32], first_step=1)
    assert tokens == runner.truth([*PROMPT[:8], 400, 401], 9)


def test_a_prefix_hit_on_a_block_not_yet_written_is_caught(runner: FakeRunner) -> None:
    run(runner, plan(0, [(0, 0, 6, False)], begun=[begin(0, PROMPT, [3, 1, 2])]))
    with pytest.raises(MemoryCorrupted, match="slot 1, number 1: bad prefix hit: block 1 at position 4"):
        runner.launch(plan(1, begun=[begin(1, PROMPT, [3, 1, 9], num_computed=8)]))


def test_a_prefix_hit_on_a_freed_block_is_caught(runner: FakeRunner) -> None:
    with pytest.raises(MemoryCorrupted, match="bad prefix hit: block 3 at position 0"):
        prefilled(runner).launch(plan(1, freed=[3], begun=[begin(1, PROMPT, [3, 9, 10], num_computed=4)]))


def test_a_prefix_hit_on_other_ids_is_caught(runner: FakeRunner) -> None:
    other = [*PROMPT[:5], 99, *PROMPT[6:]]
    with pytest.raises(MemoryCorrupted, match="bad prefix hit: block 1 holds other ids at position 5"):
        prefilled(runner).launch(plan(1, begun=[begin(1, other, [3, 1, 9], num_computed=8)]))


@pytest.mark.parametrize("blocks", [[1, 3], [3, 3], [3, 2]])
def test_a_prefix_hit_on_wrong_blocks_is_caught(runner: FakeRunner, blocks: list[int]) -> None:
    with pytest.raises(MemoryCorrupted, match="bad prefix hit"):
        prefilled(runner).launch(plan(1, begun=[begin(1, PROMPT, [*blocks, 9], num_computed=8)]))


@pytest.mark.parametrize(
    ("ids", "blocks"),
    [([*PROMPT[:5], 99, *PROMPT[6:]], [3, 1]), (PROMPT, [1, 3]), (PROMPT, [3, 2])],
    ids=["other ids", "swapped blocks", "wrong block"],
)
def test_a_bad_prefix_hit_that_nobody_verifies_gives_wrong_tokens(ids: list[int], blocks: list[int]) -> None:
    runner = prefilled(FakeRunner(CONFIG, verify_prefix=False))
    hit = begin(1, ids, [*blocks, 9], num_computed=8)
    assert generate(runner, hit, 6, spare=[30, 31], first_step=1) != runner.truth(ids, 6)


def test_a_partial_block_cannot_be_hit(runner: FakeRunner) -> None:
    with pytest.raises(MemoryCorrupted, match="position 5 in block 1, found unwritten"):
        prefilled(runner).launch(plan(1, [(1, 6, 6, True)], begun=[begin(1, PROMPT, [3, 1, 9], num_computed=6)]))


def test_a_right_replay_continues_and_a_wrong_one_does_not(runner: FakeRunner) -> None:
    right = runner.truth(PROMPT, 12)
    again = begin(0, PROMPT + right[:5], range(5), num_prompt=12)
    assert generate(runner, again, 7, spare=[10, 11]) == right[5:]
    wrong = begin(1, [*PROMPT, *right[:4], right[4] ^ 1], range(20, 25), num_prompt=12)
    assert generate(runner, wrong, 7, spare=[30, 31], first_step=20) != right[5:]


@pytest.mark.parametrize(("ids", "num_computed"), [([], 0), ([500], 0), ([-1], 0), (PROMPT, 12), (PROMPT, -1)])
def test_a_start_that_makes_no_sense_is_caught(runner: FakeRunner, ids: list[int], num_computed: int) -> None:
    with pytest.raises(MemoryCorrupted, match="slot 0, number 0: starts with"):
        runner.launch(plan(0, begun=[begin(0, ids, [3, 1, 2], num_computed=num_computed)]))


def test_more_computed_than_blocks_hold_is_caught(runner: FakeRunner) -> None:
    with pytest.raises(MemoryCorrupted, match="8 ids computed in 1 blocks"):
        prefilled(runner).launch(plan(1, begun=[begin(1, PROMPT, [3], num_computed=8)]))


def test_after_a_caught_mistake_the_runner_is_unusable(runner: FakeRunner) -> None:
    with pytest.raises(MemoryCorrupted):
        runner.launch(plan(0, [(0, 0, 1, True)]))
    with pytest.raises(RunnerFailed, match="unusable: slot 0"):
        runner.launch(plan(0, [(0, 0, 12, True)], begun=[begin(0, PROMPT, [3, 1, 2])]))
