"""The index beside each file of a journal: it saves reading, and whatever happens to it nothing is lost or wrong."""

import asyncio
import os
import random
from pathlib import Path

import pytest

from headrace.streams.file_journal import FileJournal
from headrace.streams.journal import Expired, Kept
from headrace.streams.roll import DIGEST_BYTES, Roll, Row, digest_of
from tests.unit.streams.journals import Wall, by_name, ended, entry, put, said, whole
from tests.unit.streams.test_file_journal import WINDOW_S, files, find, found, life

pytestmark = pytest.mark.unit


def indices(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.index"))


def two_files(folder: Path, wall: Wall) -> None:
    """One with an index, whose stream `long` goes on in the second, which was being written when its life was killed."""
    with life(folder, wall) as (journal, _):
        put(journal, *whole("a"), entry(1, "long"), entry(1, "b"))
        wall.time_s += 61
        put(journal, entry(2, "long"), entry(2, "b", is_end=True), *whole("c"))
    assert (len(files(folder)), len(indices(folder))) == (2, 1)


def assert_all_there(folder: Path, wall: Wall) -> None:
    with life(folder, wall) as (journal, kept):
        assert by_name(kept) == {"long": [1, 2]}
        assert found(journal, "a", "b", "c") == {"a": [1, 2, 3], "b": [1, 2], "c": [1, 2, 3]}
        assert find(journal, "never") is None


def test_what_ended_is_known_from_the_index_alone_and_no_wrong_byte_is_read_from_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wall = Wall()
    with life(tmp_path, wall) as (journal, _):
        put(journal, *whole("a"))
        wall.time_s += 61
        put(journal, entry(1, "open"))
    data = files(tmp_path)[0].read_bytes()
    files(tmp_path)[0].write_bytes(data[:60] + bytes(len(data) - 60))
    with life(tmp_path, wall) as (journal, kept):
        assert by_name(kept) == {"open": [1]} and not caplog.records
        assert asyncio.run(journal.knows("acme", "a"))
        assert find(journal, "a") == Expired()


def test_an_index_that_was_changed_anywhere_is_made_again(tmp_path: Path) -> None:
    wall = Wall()
    two_files(tmp_path, wall)
    [path] = indices(tmp_path)
    data = path.read_bytes()
    for place in range(0, len(data), 5):
        changed = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        path.write_bytes(changed)
        assert_all_there(tmp_path, wall)
        assert len(path.read_bytes()) == len(data) and path.read_bytes() != changed


def test_an_index_that_is_torn_anywhere_is_made_again(tmp_path: Path) -> None:
    wall = Wall()
    two_files(tmp_path, wall)
    path = indices(tmp_path)[0]
    data = path.read_bytes()
    for end in range(0, len(data), 5):
        path.write_bytes(data[:end])
        assert_all_there(tmp_path, wall)
        assert len(path.read_bytes()) == len(data)


def test_an_index_that_is_older_than_its_file_or_of_another_file_does_not_count(tmp_path: Path) -> None:
    wall = Wall()
    two_files(tmp_path, wall)
    assert_all_there(tmp_path, wall)
    first, second = indices(tmp_path)
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    second.write_bytes(data[0])
    assert_all_there(tmp_path, wall)
    with files(tmp_path)[0].open("ab") as file:
        file.write(b"\0")
    assert_all_there(tmp_path, wall)


def test_an_index_that_was_lost_is_made_again_once(tmp_path: Path) -> None:
    wall = Wall()
    two_files(tmp_path, wall)
    indices(tmp_path)[0].unlink()
    assert_all_there(tmp_path, wall)
    first, second = indices(tmp_path)
    written = first.stat().st_mtime_ns, second.stat().st_mtime_ns
    assert_all_there(tmp_path, wall)
    assert (first.stat().st_mtime_ns, second.stat().st_mtime_ns) == written


def test_a_disk_that_has_no_room_for_an_index_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = Wall()
    opened = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if path.suffix == ".index":
            raise OSError(28, "No space left on device")
        return opened(path, flags, mode)

    with monkeypatch.context() as patch, life(tmp_path, wall) as (journal, _):
        patch.setattr(os, "open", refuse)
        put(journal, *whole("a"), entry(1, "long"), entry(1, "b"))
        wall.time_s += 61
        put(journal, entry(2, "long"), entry(2, "b", is_end=True), *whole("c"))
    assert indices(tmp_path) == []
    assert_all_there(tmp_path, wall)


def test_nobody_else_can_read_names_in_an_index(tmp_path: Path) -> None:
    two_files(tmp_path, Wall())
    [path] = indices(tmp_path)
    assert not any(word in path.read_bytes() for word in (b"acme", b"long"))
    assert path.stat().st_mode & 0o777 == 0o600


def test_who_has_expired_is_told_from_who_never_was_in_later_lives_too(tmp_path: Path) -> None:
    wall = Wall()
    with life(tmp_path, wall) as (journal, _):
        put(journal, *whole("a"), entry(1, "long"))
        wall.time_s += WINDOW_S
        put(journal, *whole("b"))
    for _ in range(3):
        with life(tmp_path, wall) as (journal, _):
            assert find(journal, "a") == Expired()
            assert (find(journal, "never"), find(journal, "a", "rival")) == (None, None)
        wall.time_s += WINDOW_S
    with life(tmp_path, wall) as (journal, _):
        journal.sweep()
        assert files(tmp_path) == []
    with life(tmp_path, wall) as (journal, _):
        put(journal, entry(1, "new"))
        assert int(files(tmp_path)[0].stem) > int(indices(tmp_path)[-1].stem)
        assert {name: find(journal, name) for name in ("a", "b", "long")} == dict.fromkeys(
            ("a", "b", "long"), Expired()
        )


def test_what_is_remembered_of_expired_streams_is_bounded(tmp_path: Path) -> None:
    wall = Wall()
    with life(tmp_path, wall, max_bygones=20) as (journal, _):
        for number in range(50):
            put(journal, *whole(f"s{number}"))
            wall.time_s += 61
            journal.sweep()
        wall.time_s += WINDOW_S
        journal.sweep()
        assert (find(journal, "s0"), find(journal, "s49")) == (None, Expired())
        assert len(indices(tmp_path)) == 20
    with life(tmp_path, wall) as (journal, _):
        assert (find(journal, "s0"), find(journal, "s49")) == (None, Expired())


def test_files_in_which_no_stream_was_born_leave_nothing(tmp_path: Path) -> None:
    wall = Wall()
    with life(tmp_path, wall) as (journal, _):
        for long in range(3):
            for number in range(1, 21):
                put(journal, entry(number, f"long {long}", is_end=number == 20))
                wall.time_s += 61
        put(journal, entry(1, "last"))
        wall.time_s += WINDOW_S
        journal.sweep()
        assert [find(journal, f"long {long}") for long in range(3)] == [Expired()] * 3
        assert (len(files(tmp_path)), len(indices(tmp_path))) == (1, 3)


def test_a_row_is_found_at_its_place_only() -> None:
    digest = digest_of(("acme", "s"))
    rows = [Row(digest_of(("acme", str(number))), 1.0, number, 2, 3) for number in range(50)]
    roll = Roll()
    # Bytes that look like the digest, across two rows and in the middle of one.
    roll.add(Row(digest[4:] + digest[:4], 0.0, 0, 0, int.from_bytes(digest[:4], "little")))
    roll.add(Row(digest[4:] + bytes(4), 0.0, 0, 0, 0))
    for row in rows:
        roll.add(row)
    assert roll.find(digest) is None
    assert [roll.find(row.digest) for row in rows] == rows
    later = Row(rows[7].digest, 9.0, 99, 8, 7)
    roll.add(later)
    assert Roll(bytes(roll)).find(later.digest) == later
    assert [len(one) for one in roll.digests()] == [DIGEST_BYTES] * 53


@pytest.mark.parametrize("seed", range(12))
def test_lives_that_end_anyhow_lose_nothing_that_was_kept(tmp_path: Path, seed: int) -> None:
    """Streams begin, go on and end over many short files, some of them apart; lives are killed or end well; indices
    are lost and spoiled."""
    chance = random.Random(seed)
    wall = Wall()
    truth: dict[str, int] = {}
    over: set[str] = set()
    for _ in range(8):
        with life(tmp_path, wall, segment_bytes=chance.choice((500, 2_000, 8_000))) as (journal, kept):
            assert by_name(kept) == {name: list(range(1, last + 1)) for name, last in truth.items() if name not in over}
            for _ in range(chance.randrange(60)):
                step(journal, chance, truth, over)
                wall.time_s += 0.01
            for is_apart in list(journal._writers) if chance.random() < 0.3 else ():
                journal._end_segment(is_apart)
            for name, last in truth.items():
                one = find(journal, name, tenant_of(name))
                assert isinstance(one, Kept)
                records = [*map(said, range(1, last)), ended(last) if name in over else said(last)]
                assert one.records == records
        spoil(tmp_path, chance)


def tenant_of(name: str) -> str:
    return "rival" if name.endswith(("1", "3", "5")) else "acme"


def step(journal: FileJournal, chance: random.Random, truth: dict[str, int], over: set[str]) -> None:
    """One append of some of the open streams, and of one that begins."""
    if chance.random() < 0.1:
        journal._large = chance.choice((frozenset[str](), frozenset({"rival"})))
        journal._has_apart = True
    names = [name for name in truth if name not in over and chance.random() < 0.7]
    if chance.random() < 0.3:
        names.append(f"stream {len(truth)}")
    entries = []
    for name in names:
        truth[name] = truth.get(name, 0) + 1
        is_end = truth[name] > 1 and chance.random() < 0.1
        entries.append(entry(truth[name], name, tenant_of(name), is_end=is_end))
        if is_end:
            over.add(name)
    journal.append(entries, lambda lost: None)


def spoil(folder: Path, chance: random.Random) -> None:
    for path in indices(folder):
        fate = chance.random()
        if fate < 0.2:
            path.unlink()
        elif fate < 0.4:
            path.write_bytes(chance.randbytes(chance.randrange(400)))
