"""Readers are cursors: whoever reads, however it is cut, gets the same text; merged or not."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidInput
from headrace.streams.reader import Reader, merge
from headrace.streams.record import CallDelta, Ending, Part, Record, Score, Usage
from headrace.streams.stream import Stream

pytestmark = pytest.mark.unit


class PlainDialect:
    def bound(self, created_s: float, fingerprint: str) -> "PlainDialect":
        return self

    def frame(self, record: Record) -> bytes:
        return b""


def stream(*texts: str) -> Stream:
    made = Stream("s", "acme", PlainDialect())
    for text in texts:
        made.append([Part(0, (1,), text)])
    return made


def test_records_are_numbered_from_one_and_end_once() -> None:
    made = stream("a", "b")
    made.end(Ending(Usage()))
    assert [record.number for record in made.records] == [1, 2, 3]
    with pytest.raises(AssertionError, match="ended"):
        made.append([Part(0)])
    with pytest.raises(AssertionError, match="twice"):
        made.end(Ending(Usage()))


def test_a_reader_that_waits_is_woken_by_the_next_record_and_others_are_their_own() -> None:
    async def story() -> None:
        made = stream("a")
        fast, slow = Reader(made), Reader(made)
        assert [record.number for record in await fast.next()] == [1]
        waiting = asyncio.create_task(fast.next())
        await asyncio.sleep(0)
        made.append([Part(0, text="b")])
        made.append([Part(0, text="c")])
        assert [record.number for record in await waiting] == [2, 3]
        assert [record.number for record in await slow.next()] == [1, 2, 3]
        made.end(Ending(Usage()))
        assert not fast.is_done
        await fast.next()
        assert (fast.is_done, slow.is_done) == (True, False)

    asyncio.run(story())


def test_waiting_has_an_end_and_leaves_no_future_behind() -> None:
    async def story() -> None:
        made = stream()
        reader = Reader(made)
        assert await reader.wait(0.0) is False
        task = asyncio.create_task(reader.wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not made._waiting
        made.append([Part(0, text="a")])
        assert await reader.wait(0.0) is True

    asyncio.run(story())


def test_unread_is_counted_in_bytes_behind_the_cursor() -> None:
    made = stream("aé", "漢")
    reader, later = Reader(made), Reader(made, after=1)
    assert (reader.unread_bytes, later.unread_bytes) == (6, 3)
    reader.take()
    assert reader.unread_bytes == 0
    made.append([Part(0, calls=(CallDelta(0, arguments='{"é'),))])
    assert (reader.unread_bytes, later.unread_bytes) == (4, 7)


def test_a_cursor_beyond_the_end_is_refused() -> None:
    with pytest.raises(InvalidInput):
        Reader(stream("a"), after=2)


PARTS = st.lists(
    st.tuples(st.integers(0, 2), st.text(max_size=4), st.integers(0, 1), st.text("ab{}", max_size=3)), max_size=3
)


def parts_of(drawn: list[tuple[int, str, int, str]], started: set[tuple[int, int]]) -> list[Part]:
    parts: dict[int, Part] = {}
    for choice, text, index, arguments in drawn:
        is_first = (choice, index) not in started
        started.add((choice, index))
        call = CallDelta(index, "id" if is_first else "", "name" if is_first else "", arguments)
        parts[choice] = Part(choice, (len(text),), text, (Score(1, b"x", -1.0),), (call,))
    return list(parts.values())


def told(records: list[Record]) -> dict[int, tuple[list[int], str, int, dict[int, tuple[str, str, str]]]]:
    """All that a client knows after these frames, by choice."""
    found: dict[int, tuple[list[int], str, int, dict[int, tuple[str, str, str]]]] = {}
    for record in records:
        for part in record.parts:
            ids, text, scores, calls = found.get(part.choice, ([], "", 0, {}))
            for call in part.calls:
                known = calls.get(call.index, ("", "", ""))
                calls[call.index] = (known[0] + call.id, known[1] + call.name, known[2] + call.arguments)
            found[part.choice] = ([*ids, *part.ids], text + part.text, scores + len(part.scores), calls)
    return found


@given(st.lists(PARTS, min_size=1, max_size=12), st.lists(st.integers(1, 5), max_size=12))
def test_any_split_of_reads_merged_or_not_tells_the_same(
    drawn: list[list[tuple[int, str, int, str]]], cuts: list[int]
) -> None:
    made = Stream("s", "acme", PlainDialect())
    started: set[tuple[int, int]] = set()
    for entry in drawn:
        made.append(parts_of(entry, started))
    made.end(Ending(Usage(1, 2, 3)))
    left, frames = list(made.records), []
    for cut in [*cuts, *[1] * len(left)]:
        if left:
            frames.append(merge(left[:cut]))
            left = left[cut:]
    assert told(frames) == told(made.records) == told([merge(made.records)])
    assert frames[-1].ending == made.ending
    numbers = [frame.number for frame in frames]
    assert numbers == sorted(set(numbers)) and numbers[-1] == len(made.records)
    assert [frame.is_opening for frame in frames] == [True] + [False] * (len(frames) - 1)
