"""Many lines through one engine: a row for each, errors beside replies, never more open than allowed."""

from collections.abc import Iterator

import msgspec

from headrace.serving.ask import Ask
from headrace.serving.rows import RowRun
from tests.unit.serving.rig import local_rig


def lines(*rows: object) -> list[bytes]:
    return [msgspec.json.encode(row) + b"\n" for row in rows]


def test_every_line_gets_a_row_and_bad_ones_say_why() -> None:
    with local_rig() as rig:
        run = RowRun(rig.service, Ask(max_tokens=5), max_open=4)
        source = [
            *lines({"raw": "abc", "id": "first"}, {"raw": "abc", "n": 2, "max_tokens": 3}),
            b"\n",
            b"{broken\n",
            *lines({"raw": "x", "temperatur": 1}, {"prompt": "a", "raw": "b", "id": 7}, {"raw": "y" * 500}, [1]),
        ]
        rows = {row.index: row for row in run.rows(source)}
    assert sorted(rows) == [0, 1, 3, 4, 5, 6, 7]
    assert (rows[0].id, rows[0].completion_tokens, rows[0].prompt_tokens) == ("first", 5, 3)
    assert [choice.index for choice in rows[1].choices] == [0, 1]
    assert rows[1].completion_tokens == 6
    codes = {index: row.error.code for index, row in rows.items() if row.error is not None}
    assert codes == dict.fromkeys((3, 4, 5, 7), "invalid_request") | {6: "context_length_exceeded"}
    assert rows[4].error is not None and ", temperature, " in rows[4].error.message
    assert rows[5].id == 7
    assert (run.num_done, run.num_failed, run.num_tokens) == (7, 5, 11)


def test_lines_are_read_only_as_sequences_end() -> None:
    read = 0

    def source() -> Iterator[bytes]:
        nonlocal read
        for line in lines(*({"raw": f"line {index}"} for index in range(40))):
            read += 1
            yield line

    with local_rig() as rig:
        run = RowRun(rig.service, Ask(max_tokens=4), max_open=3)
        for row in run.rows(source()):
            assert row.error is None
            assert read <= run.num_done + 3
        assert rig.engine.load().used_blocks == 0
    assert run.num_done == 40


def test_the_same_line_gets_the_same_reply_wherever_it_stands() -> None:
    with local_rig() as rig:
        rows = RowRun(rig.service, Ask(max_tokens=8, seed=3), max_open=4).rows(lines(*([{"raw": "same"}] * 9)))
        assert len({row.choices[0].text for row in rows}) == 1


def test_a_line_refused_for_now_is_offered_again_until_it_is_taken() -> None:
    with local_rig(slots=1, max_queue_s=1e-3) as rig:
        run = RowRun(rig.service, Ask(max_tokens=40), max_open=50)
        rows = list(run.rows(lines(*({"raw": f"line {index}", "id": index} for index in range(12)))))
    assert sorted(row.id for row in rows) == list(range(12))  # type: ignore[type-var]
    assert [row.error for row in rows] == [None] * 12
