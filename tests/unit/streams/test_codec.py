"""What goes into the codec comes out of it; what was not written by it, or sealed with another key, does not."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.streams.codec import (
    decode_birth,
    decode_entries_of,
    decode_record,
    encode_append,
    encode_birth,
    encode_record,
    glance_append,
)
from headrace.streams.journal import Birth, Entry
from headrace.streams.record import Alternative, CallDelta, Ending, Failure, Part, Record, Score, Usage
from headrace.streams.seal import Seal
from tests.unit.streams.journals import SECRET, birth, entry, said

pytestmark = pytest.mark.unit

NUMBERS = st.integers(0, 2**40)
SIGNED = st.integers(-(2**31), 2**31)
FLOATS = st.floats(allow_nan=False)
# Any code point, also surrogates without their other half.
TEXTS = st.text(st.characters(codec=None, exclude_categories=()), max_size=6)
DATA = st.binary(max_size=6)


def some(one: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(one, max_size=3).map(tuple)


ALTERNATIVES = st.builds(Alternative, SIGNED, DATA, FLOATS)
SCORES = st.builds(Score, SIGNED, DATA, st.none() | FLOATS, some(ALTERNATIVES))
CALLS = st.builds(CallDelta, NUMBERS, TEXTS, TEXTS, TEXTS, TEXTS, NUMBERS)
PARTS = st.builds(
    Part,
    NUMBERS,
    some(SIGNED),
    TEXTS,
    some(SCORES),
    some(CALLS),
    st.none() | TEXTS,
    NUMBERS,
    NUMBERS,
    st.booleans(),
    NUMBERS,
)
USAGES = st.builds(Usage, NUMBERS, NUMBERS, NUMBERS)
FAILURES = st.builds(Failure, TEXTS, TEXTS, NUMBERS, st.none() | TEXTS, st.none() | FLOATS)
ENDINGS = st.builds(
    Ending, USAGES, st.none() | FAILURES, st.dictionaries(st.text(st.characters(codec="utf-8")), FLOATS, max_size=3)
)
RECORDS = st.builds(Record, NUMBERS, some(PARTS), st.none() | ENDINGS, NUMBERS, st.none() | USAGES, NUMBERS, FLOATS)
BIRTHS = st.builds(Birth, TEXTS, TEXTS, TEXTS, TEXTS, FLOATS, DATA, DATA, st.none() | FLOATS)
ENTRIES = st.builds(Entry, TEXTS, TEXTS, RECORDS, st.none() | BIRTHS)


@settings(max_examples=50)
@given(RECORDS)
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    assert decode_record(encode_record(record)) == record


@settings(max_examples=30)
@given(st.lists(ENTRIES, max_size=2), FLOATS)
def test_an_append_comes_back_as_it_was(entries: list[Entry], at_s: float) -> None:
    names = {(entry.tenant, entry.stream) for entry in entries}
    assert decode_entries_of(encode_append(entries, at_s), names) == (at_s, entries)


@settings(max_examples=30)
@given(st.lists(ENTRIES, max_size=2), FLOATS)
def test_a_glance_tells_whose_an_entry_is_and_whether_it_is_the_first_or_the_last(
    entries: list[Entry], at_s: float
) -> None:
    glanced = glance_append(encode_append(entries, at_s))
    assert glanced is not None and glanced[0] == at_s
    assert [(*one.name, one.number, one.is_birth, one.is_end) for one in glanced[1]] == [
        (entry.tenant, entry.stream, entry.record.number, entry.birth is not None, entry.record.ending is not None)
        for entry in entries
    ]


def test_of_others_nothing_is_decoded() -> None:
    data = encode_append([entry(1, "a"), entry(2, "b"), entry(3, "a")], 1.0)
    assert decode_entries_of(data, {("acme", "a")}) == (1.0, [entry(1, "a"), entry(3, "a")])
    assert decode_entries_of(data, {("rival", "a")}) == (1.0, [])


@given(BIRTHS)
def test_a_birth_comes_back_as_it_was(birth: Birth) -> None:
    assert decode_birth(encode_birth(birth)) == birth


def test_every_field_of_every_struct_is_carried() -> None:
    """A field that is added to a record and forgotten here would be lost without a word."""
    known: dict[type[msgspec.Struct], int] = {
        Alternative: 3, Score: 4, CallDelta: 6, Part: 10, Usage: 3, Failure: 5, Ending: 3, Record: 7, Birth: 8, Entry: 4,
    }  # fmt: skip
    assert {kind: len(msgspec.structs.fields(kind)) for kind in known} == known


@pytest.mark.parametrize("data", [b"", b"\x00", b"\xc1", b"\x93\x01\x02", msgspec.msgpack.encode([1.0, [["a"]]])])
def test_bytes_that_are_something_else_are_none(data: bytes) -> None:
    assert (decode_entries_of(data, ()), glance_append(data)) == (None, None)
    assert (decode_record(data), decode_birth(data)) == (None, None)


def test_a_plain_record_is_small() -> None:
    assert len(encode_append([entry(2, f"req-{number:032x}") for number in range(64)], 1.0)) / 64 < 100
    assert len(encode_record(said(2))) < 40
    assert len(encode_birth(birth())) < 80


def test_the_secret_the_label_the_place_and_every_byte_must_be_right() -> None:
    seal = Seal(SECRET, "label")
    sealed = seal.seal(b"words", b"place")
    assert b"words" not in sealed
    assert seal.open(sealed, b"place") == Seal(SECRET, "label").open(sealed, b"place") == b"words"
    assert seal.open(sealed, b"elsewhere") is None
    assert Seal(SECRET, "other").open(sealed, b"place") is None
    assert Seal(SECRET[::-1], "label").open(sealed, b"place") is None
    for index in range(len(sealed)):
        changed = bytes([*sealed[:index], sealed[index] ^ 1, *sealed[index + 1 :]])
        assert seal.open(changed, b"place") is None, index
        assert seal.open(sealed[:index], b"place") is None, index


def test_no_two_seals_are_alike() -> None:
    one, other = Seal(SECRET, "label"), Seal(SECRET, "label")
    assert len({seal.seal(b"words", b"")[:24] for seal in [one, other] * 50}) == 100
