"""What is read was kept before: one append for a frame, in order, and no journal can hold a stream up for ever."""

from collections.abc import Sequence

import pytest

from headrace.serving.scribe import Scribe
from headrace.serving.service import MOVED
from headrace.streams.journal import NOBODY, Birth, Entry, MemoryJournal, Name, Then
from headrace.streams.record import Ending, Failure, Part, Usage
from headrace.streams.stream import Stream
from tests.unit.serving.network_rig import PlainDialect

pytestmark = pytest.mark.unit

BIRTH = Birth("a", "acme", "m", "fp", 1.0, b"order", b"dialect")


class SlowJournal(MemoryJournal):
    """Answers when it is told to; refuses what is another's."""

    def __init__(self) -> None:
        self.appends: list[list[Entry]] = []
        self.waiting: list[Then] = []
        self.taken: set[Name] = set()

    def append(self, entries: Sequence[Entry], then: Then) -> None:
        self.appends.append(list(entries))
        self.waiting.append(then)

    def answer(self, lost: frozenset[Name] = NOBODY) -> None:
        self.waiting.pop(0)(lost)


class BrokenJournal(MemoryJournal):
    def append(self, entries: Sequence[Entry], then: Then) -> None:
        raise RuntimeError("it must never raise")


def stream(name: str = "a") -> Stream:
    return Stream(name, "acme", PlainDialect(), model="m")


def say(one: Stream, text: str = "x") -> None:
    one.append([Part(0, (1,), text)])


def numbers(one: Stream) -> list[int]:
    return [record.number for record in one.records]


def test_one_frame_is_one_append_and_is_read_once_it_is_kept() -> None:
    journal = SlowJournal()
    scribe = Scribe(journal, lambda _: None)
    a, b = stream("a"), stream("b")
    scribe.follow(a, lambda: BIRTH)
    scribe.follow(b)
    with scribe.held():
        say(a)
        say(b)
        say(a)
        assert not journal.appends
    assert [[(entry.stream, entry.record.number) for entry in one] for one in journal.appends] == [
        [("a", 1), ("b", 1), ("a", 2)]
    ]
    assert [entry.birth for entry in journal.appends[0]] == [BIRTH, None, None]
    assert (numbers(a), numbers(b)) == ([], [])
    journal.answer()
    assert (numbers(a), numbers(b)) == ([1, 2], [1])
    say(a)
    a.end(Ending(Usage()))
    assert len(journal.appends) == 3 and a.is_closed and not a.is_ended
    journal.answer()
    journal.answer()
    assert numbers(a) == [1, 2, 3, 4] and a.is_ended


def test_what_another_took_over_ends_here_even_with_its_own_ending_on_the_way() -> None:
    journal = SlowJournal()
    moved: list[Stream] = []

    def lose(one: Stream) -> None:
        moved.append(one)
        one.abandon(MOVED)

    scribe = Scribe(journal, lose)
    a, b = stream("a"), stream("b")
    scribe.follow(a)
    scribe.follow(b)
    with scribe.held():
        say(a)
        say(b)
    with scribe.held():
        a.end(Ending(Usage()))
        say(b)
    journal.answer(frozenset({("acme", "a")}))
    assert a.ending is not None and a.ending.failure == MOVED and numbers(a) == [0]
    # Its journal has lost count of it: the others of this append are read all the same.
    journal.answer()
    assert numbers(a) == [0] and numbers(b) == [1, 2] and moved == [a]


def test_a_stream_whose_birth_cannot_be_written_is_told_and_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Birth:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates")

    journal = SlowJournal()
    scribe = Scribe(journal, lambda _: None)
    a, b = stream("a"), stream("b")
    scribe.follow(a, fail)
    scribe.follow(b)
    with scribe.held():
        say(a)
        say(b)
        say(a)
    journal.answer()
    a.end(Ending(Usage()))
    assert numbers(a) == [1, 2, 3] and a.is_ended and numbers(b) == [1]
    assert [entry.stream for one in journal.appends for entry in one] == ["b"]
    assert "cannot be kept" in caplog.text


def test_a_journal_that_raises_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    scribe = Scribe(BrokenJournal(), lambda _: None)
    a, b = stream("a"), stream("b")
    scribe.follow(a)
    scribe.follow(b)
    with scribe.held():
        say(a)
        say(b)
    a.end(Ending(Usage()))
    assert numbers(a) == [1, 2] and a.is_ended and numbers(b) == [1]
    assert "the journal failed" in caplog.text


def test_what_said_nothing_is_forgotten_and_the_dead_are_buried() -> None:
    journal = SlowJournal()
    scribe = Scribe(journal, lambda _: None)
    a = stream()
    scribe.follow(a, lambda: BIRTH)
    scribe.forget(a)
    assert not scribe._births
    failure = Failure("stream_lost", "it cannot go on", 503)
    scribe.bury(BIRTH, 7, failure)
    ((buried,),) = journal.appends
    assert (buried.tenant, buried.stream, buried.record.number) == ("acme", "a", 7)
    assert buried.record.ending is not None and buried.record.ending.failure == failure
    journal.answer()
