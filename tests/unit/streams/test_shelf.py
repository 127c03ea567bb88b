"""Streams can be found by their tenant while they run and for a while after; who reads decides how they go on."""

import sys

import pytest

from headrace.core.errors import Expired, InvalidInput, NotFound
from headrace.streams import shelf as shelf_module
from headrace.streams.audience import ELSEWHERE_S, Audience
from headrace.streams.record import Alternative, Ending, Part, Record, Score, Usage
from headrace.streams.shelf import Bounds, Shelf
from headrace.streams.stream import MAX_FOLDED, Stream
from tests.builders import TestClock

pytestmark = pytest.mark.unit


class PlainDialect:
    def bound(self, created_s: float, fingerprint: str) -> "PlainDialect":
        return self

    def frame(self, record: Record) -> bytes:
        return b""


class Owner:
    """Does what it is told, and notes it."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def cancel(self, stream: Stream, why: str) -> None:
        self.told.append(f"cancel {why}")
        stream.end(Ending(Usage()))

    def pause(self, stream: Stream) -> None:
        self.told.append("pause")

    def resume(self, stream: Stream) -> None:
        self.told.append("resume")


class Place:
    """A shelf with a clock that stands still."""

    def __init__(self, **bounds: float) -> None:
        self.clock = TestClock()
        self.owner = Owner()
        self.shelf = Shelf(self.clock.now_s, Bounds(**bounds))  # type: ignore[arg-type]

    def put(self, id: str = "s", *words: str, tenant: str = "acme", grace_s: float = 10.0) -> Audience:
        stream = Stream(id, tenant, PlainDialect())
        for word in words:
            stream.append([Part(0, (1,), word)])
        return self.shelf.put(stream, self.owner, grace_s=grace_s)

    def over(self, id: str, *words: str, tenant: str = "acme") -> Audience:
        audience = self.put(id, *words, tenant=tenant)
        audience.stream.end(Ending(Usage(1, 0, len(words))))
        self.passes(0.0)
        return audience

    def passes(self, seconds: float) -> None:
        self.clock.time_s += seconds
        self.shelf.tick(self.clock.time_s)


def test_a_stream_is_found_by_its_tenant_alone_open_and_ended() -> None:
    place = Place()
    audience = place.put("s", "a")
    assert place.shelf.find("acme", "s") is audience
    audience.stream.end(Ending(Usage()))
    place.passes(299.0)
    assert place.shelf.find("acme", "s") is audience
    for tenant, id in (("other", "s"), ("acme", "t")):
        with pytest.raises(NotFound):
            place.shelf.find(tenant, id)


def test_after_the_window_it_is_expired_and_for_others_still_unknown() -> None:
    place = Place(window_s=60.0)
    place.over("s", "a")
    place.clock.time_s += 60.0
    for _ in range(2):
        with pytest.raises(Expired) as found:
            place.shelf.find("acme", "s")
        assert (found.value.status, found.value.code) == (410, "stream_expired")
        with pytest.raises(NotFound):
            place.shelf.find("other", "s")
        place.passes(0.0)
    assert (place.shelf.num_kept, place.shelf.size_bytes) == (0, 0)


def test_beyond_the_byte_bound_the_oldest_that_ended_go_first_and_open_ones_never() -> None:
    place = Place(size_bytes=13_000)
    running = place.put("open", "a" * 20_000)
    running.enter()
    for id in ("first", "second", "third"):
        place.over(id, "a")
    assert place.shelf.num_kept == 2 and place.shelf.size_bytes <= 13_000
    with pytest.raises(Expired):
        place.shelf.find("acme", "first")
    for id in ("open", "second", "third"):
        place.shelf.find("acme", id)


def test_who_keeps_most_loses_its_oldest_and_nobody_else_any() -> None:
    place = Place(size_bytes=40_000)
    place.over("small", "a", tenant="rival")
    for number in range(20):
        place.over(f"s{number}", "a")
    assert place.shelf.size_bytes <= 40_000
    place.shelf.find("rival", "small")
    place.shelf.find("acme", "s19")
    with pytest.raises(Expired):
        place.shelf.find("acme", "s0")
    place.passes(300.0)
    assert (place.shelf.num_kept, place.shelf.size_bytes, place.shelf._shares) == (0, 0, {})


def test_of_the_expired_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf_module, "MAX_EXPIRED", 2)
    place = Place(window_s=0.0)
    for id in ("a", "b", "c"):
        place.over(id)
    with pytest.raises(NotFound):
        place.shelf.find("acme", "a")
    for id in ("b", "c"):
        with pytest.raises(Expired):
            place.shelf.find("acme", id)


def test_an_id_is_taken_from_the_request_on_until_its_stream_is_gone() -> None:
    place = Place(window_s=60.0)
    shelf = place.shelf
    assert shelf.take_id("acme", "s") and not shelf.take_id("acme", "s")
    assert shelf.take_id("other", "s")
    audience = place.put("s", "a")
    shelf.free_id("acme", "s")
    assert not shelf.take_id("acme", "s")
    audience.stream.end(Ending(Usage()))
    place.passes(1.0)
    assert not shelf.take_id("acme", "s")
    place.passes(60.0)
    assert shelf.take_id("acme", "s")
    again = place.put("s", "b")
    assert shelf.find("acme", "s") is again
    shelf.free_id("other", "s")
    assert shelf.take_id("other", "s")


def test_a_kept_stream_is_folded_and_whole_again_for_who_reads_it() -> None:
    place = Place()
    audience = place.put("s")
    stream = audience.stream
    scores = (Score(5, b"\xff", -0.25, (Alternative(6, b"x", -1.5),)), Score(1, b"", None))
    for word in ("aé", "漢", "\U0001f600"):
        stream.append([Part(0, (7, 8), word, scores)], step=3, age_s=0.1, usage=Usage(1, 2, 3))
    stream.end(Ending(Usage(1, 0, 3), None, {"decode": 1.0}), age_s=2.5)
    said, sizes = list(stream.records), [stream.bytes_until(number) for number in range(5)]
    place.passes(0.0)
    assert stream.records == [] and place.shelf.num_kept == 1
    first, second = audience.enter(), audience.enter(2)
    assert first.take() == said and second.take() == said[2:]
    assert [stream.bytes_until(number) for number in range(5)] == sizes
    audience.leave(first, 0.0)
    assert stream.records == said, "somebody still reads"
    audience.leave(second, 0.0)
    assert stream.records == []
    with pytest.raises(InvalidInput):
        audience.enter(5)
    assert stream.records == [] and audience.enter(4).is_done


def test_what_cannot_be_folded_or_not_quickly_stays_as_it_is() -> None:
    place = Place()
    broken = place.over("broken", "\ud83d")
    long = place.over("long", *["a"] * MAX_FOLDED)
    assert len(broken.stream.records) == 2 and len(long.stream.records) == MAX_FOLDED + 1
    assert place.shelf.size_bytes > 500 * MAX_FOLDED


def test_a_kept_stream_of_a_hundred_tokens_takes_less_than_30_kib() -> None:
    place = Place()
    audience = place.put("s")
    for index in range(100):
        part = Part(0, (40_000 + index,), " something", index=index, offset=10 * index)
        audience.stream.append([part], step=100_000 + index, age_s=0.01 * index)
    audience.stream.end(Ending(Usage(10, 0, 100)))
    place.passes(0.0)
    folded = audience.stream._folded
    assert folded is not None and sys.getsizeof(folded) < 16 << 10
    assert place.shelf.size_bytes < 30 << 10


def test_the_grace_counts_from_when_the_last_reader_left() -> None:
    place = Place()
    audience = place.put("s", "a")
    first, second = audience.enter(), audience.enter()
    audience.leave(first, 0.0)
    place.passes(100.0)
    audience.leave(second, place.clock.time_s)
    place.passes(9.0)
    third = audience.enter(1)
    place.passes(100.0)
    assert place.owner.told == []
    audience.leave(third, place.clock.time_s)
    audience.leave(third, place.clock.time_s)
    place.passes(9.0)
    assert place.owner.told == []
    place.passes(1.0)
    assert place.owner.told == ["cancel disconnected"]
    assert place.shelf.find("acme", "s") is audience


def test_without_grace_it_is_cancelled_when_the_last_reader_leaves() -> None:
    place = Place()
    audience = place.put(grace_s=0.0)
    first, second = audience.enter(), audience.enter()
    audience.leave(first, 0.0)
    assert place.owner.told == []
    audience.leave(second, 0.0)
    assert place.owner.told == ["cancel disconnected"]


def test_it_pauses_only_while_every_reader_is_behind() -> None:
    place = Place(unread_bytes=100)
    audience = place.put()
    slow, fast = audience.enter(), audience.enter()
    audience.stream.append([Part(0, text="x" * 200)])
    fast.take()
    place.passes(1.0)
    assert place.owner.told == []
    audience.stream.append([Part(0, text="x" * 101)])
    place.passes(1.0)
    place.passes(1.0)
    assert place.owner.told == ["pause"]
    fast.take()
    place.passes(1.0)
    assert place.owner.told == ["pause", "resume"]
    assert slow.unread_bytes == 301


def test_a_paused_stream_goes_on_for_its_grace_when_its_readers_leave() -> None:
    place = Place(unread_bytes=100)
    audience = place.put("s", "x" * 200)
    reader = audience.enter()
    place.passes(1.0)
    audience.leave(reader, place.clock.time_s)
    assert place.owner.told == ["pause", "resume"]


def test_who_lags_too_long_goes_alone_and_the_last_one_takes_the_stream_along() -> None:
    place = Place()
    audience = place.put("s", "a")
    slow, other = audience.enter(), audience.enter()
    audience.expel(slow, "client_too_slow", 0.0)
    audience.leave(slow, 0.0)
    assert place.owner.told == [] and len(audience) == 1
    audience.expel(other, "client_too_slow", 0.0)
    assert place.owner.told == ["cancel client_too_slow"]


def test_one_stream_that_cannot_be_looked_after_does_not_stop_the_others() -> None:
    place = Place(unread_bytes=10)

    class Broken(Owner):
        def pause(self, stream: Stream) -> None:
            raise OSError("no way to the worker")

    broken = Stream("broken", "acme", PlainDialect())
    broken.append([Part(0, text="x" * 20)])
    place.shelf.put(broken, Broken(), grace_s=1.0).enter()
    place.put("s", "x" * 20).enter()
    place.passes(1.0)
    assert place.owner.told == ["pause"]


def test_closing_cancels_what_is_open_and_nothing_else() -> None:
    place = Place()
    place.over("over", "a")
    place.put("open", "a")
    place.shelf.close("overloaded")
    assert place.owner.told == ["cancel overloaded"]


def test_what_is_read_elsewhere_does_not_wait_for_who_is_slow_here_nor_end_with_them() -> None:
    place = Place(unread_bytes=8)
    audience = place.put("s", "much more than eight bytes", grace_s=0.0)
    slow, other = audience.enter(), audience.enter()
    place.passes(0.0)
    assert place.owner.told == ["pause"]
    audience.stay(place.clock.now_s())
    place.passes(0.5)
    assert place.owner.told == ["pause", "resume"]
    audience.expel(slow, "client_too_slow", place.clock.now_s())
    audience.leave(other, place.clock.now_s())
    place.passes(0.5)
    assert place.owner.told == ["pause", "resume"], "somebody reads it"
    place.passes(ELSEWHERE_S)
    assert place.owner.told == ["pause", "resume", "cancel disconnected"]
