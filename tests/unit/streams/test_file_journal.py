"""The journal in a folder: what was kept outlives the process, whatever happened to the files; the rest is dropped."""

import asyncio
import contextlib
import errno
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.core.errors import HeadraceError
from headrace.streams.file_journal import FileJournal
from headrace.streams.journal import Entry, Expired, Kept
from tests.unit.streams.journals import SECRET, Wall, birth, by_name, ended, entry, numbers, put, said, whole

pytestmark = pytest.mark.unit

WINDOW_S = 300.0


@contextlib.contextmanager
def life(folder: Path, wall: Wall, **settings: float) -> Iterator[tuple[FileJournal, list[Kept]]]:
    """One gateway's life, that ends as kill -9 would end it: nothing is swept or said."""
    journal = FileJournal(folder, SECRET, clock=wall, wall_s=wall, window_s=WINDOW_S, **settings)  # type: ignore[arg-type]
    with asyncio.Runner() as runner:
        kept = runner.run(journal.recover())
        try:
            yield journal, kept
        finally:
            for writer in journal._writers.values():
                writer.close()
            os.close(journal._lock)


def find(journal: FileJournal, stream: str = "s", tenant: str = "acme") -> Kept | Expired | None:
    return asyncio.run(journal.find(tenant, stream))


def found(journal: FileJournal, *streams: str) -> dict[str, list[int]]:
    """Of these streams, what lies there, ended or not; those that cannot be read are left out."""
    looked_for = {stream: find(journal, stream) for stream in streams}
    return {stream: numbers(kept) for stream, kept in looked_for.items() if isinstance(kept, Kept)}


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.journal"))


def test_the_next_life_goes_on_with_what_has_not_ended_and_finds_what_has(tmp_path: Path) -> None:
    wall = Wall()
    with life(tmp_path, wall) as (journal, kept):
        assert kept == []
        put(journal, *whole("done"), entry(1, "open"), entry(2, "open"))
    wall.time_s += 10
    with life(tmp_path, wall) as (journal, [unended]):
        assert (unended.birth, unended.ended_s) == (birth("open"), None)
        assert unended.records == [said(1), said(2)]
        done = find(journal, "done")
        assert isinstance(done, Kept) and (done.birth, done.ended_s) == (birth("done"), wall.time_s - 10)
        assert done.records == [said(1), said(2), ended(3)]


def test_a_stream_that_goes_on_in_the_next_life_is_joined_in_the_one_after(tmp_path: Path) -> None:
    wall = Wall()
    with life(tmp_path, wall) as (journal, _):
        put(journal, entry(1), entry(2))
    with life(tmp_path, wall) as (journal, _):
        put(journal, entry(3), entry(4, is_end=True))
        assert numbers(find(journal)) == [1, 2, 3, 4]
    with life(tmp_path, wall) as (journal, kept):
        done = find(journal)
        assert kept == [] and numbers(done) == [1, 2, 3, 4]
        assert isinstance(done, Kept) and done.ended_s == wall.time_s


def test_kill_9_in_the_middle_of_appending_loses_nothing_that_was_kept(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from headrace.streams.file_journal import FileJournal\n"
        "from tests.unit.streams.journals import SECRET, entry\n"
        "journal = FileJournal(Path(sys.argv[1]), SECRET, segment_bytes=20_000)\n"
        "for number in range(1, 1_000_000):\n"
        "    entries = [entry(number, f's{stream}') for stream in range(8)]\n"
        "    journal.append(entries, lambda lost: print(number, flush=True))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said_kept = [int(child.stdout.readline()) for _ in range(500)]
    child.kill()
    said_kept += [int(line) for line in child.stdout.read().split("\n")[:-1]]
    child.wait()
    child.stdout.close()
    journal = FileJournal(tmp_path, SECRET)

    async def recover() -> list[Kept]:
        kept = await journal.recover()
        await journal.close()
        return kept

    kept = asyncio.run(recover())
    assert len(kept) == 8 and len(files(tmp_path)) > 3
    for one in kept:
        last = len(one.records)
        assert numbers(one) == list(range(1, last + 1))
        assert said_kept[-1] <= last <= said_kept[-1] + 1


def test_a_torn_tail_is_dropped_wherever_it_was_torn(tmp_path: Path) -> None:
    wall = Wall()
    with life(tmp_path, wall) as (journal, _):
        put(journal, entry(1))
        two_ends = files(tmp_path)[0].stat().st_size
        put(journal, entry(2))
    path = files(tmp_path)[0]
    data = path.read_bytes()
    for end in range(two_ends, len(data)):
        path.write_bytes(data[:end])
        with life(tmp_path, wall) as (_, kept):
            assert by_name(kept) == {"s": [1]}, end


def test_a_flipped_byte_costs_the_rest_of_its_file_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wall = Wall()
    with life(tmp_path, wall) as (journal, _):
        put(journal, entry(1, "a"))
        begin = files(tmp_path)[0].stat().st_size
        put(journal, entry(2, "a"), entry(1, "b"), entry(3, "a"))
    data = bytearray(files(tmp_path)[0].read_bytes())
    data[begin + 40] ^= 1
    files(tmp_path)[0].write_bytes(data)
    with life(tmp_path, wall) as (journal, kept):
        assert by_name(kept) == {"a": [1]}
        put(journal, entry(2, "a"), *whole("c"))
        assert len(caplog.records) == 1 and "changed" in caplog.text
    with life(tmp_path, wall) as (journal, kept):
        assert by_name(kept) == {"a": [1, 2]}
        assert found(journal, "a", "b", "c") == {"a": [1, 2], "c": [1, 2, 3]}


def test_a_stream_with_a_hole_in_the_middle_counts_as_expired(tmp_path: Path) -> None:
    wall = Wall()
    for first in (1, 3, 5):
        with life(tmp_path, wall) as (journal, _):
            put(journal, entry(first), entry(first + 1))
    with files(tmp_path)[1].open("r+b") as file:
        file.truncate(20)
    with life(tmp_path, wall) as (journal, kept):
        assert kept == []
        assert find(journal) == Expired()


def test_appends_that_were_moved_within_a_file_or_to_another_do_not_open(tmp_path: Path) -> None:
    wall = Wall()
    with life(tmp_path, wall) as (journal, _):
        put(journal, entry(1, "a"))
        middle = files(tmp_path)[0].stat().st_size
        put(journal, entry(1, "b"))
    data = files(tmp_path)[0].read_bytes()
    files(tmp_path)[0].write_bytes(data[:20] + data[middle:] + data[20:middle])
    with life(tmp_path, wall) as (_, kept):
        assert kept == []


def test_another_secret_opens_nothing_and_foreign_files_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wall = Wall()
    with life(tmp_path, wall) as (journal, _):
        put(journal, *whole())
    for name in ("notes.txt", "x.journal", "00000007.journal"):
        (tmp_path / name).write_text("not a journal's file")
    other = FileJournal(tmp_path, SECRET[::-1])

    async def recover() -> list[Kept]:
        kept = await other.recover()
        await other.close()
        return kept

    assert asyncio.run(recover()) == []
    assert "another key" in caplog.text
    with life(tmp_path, wall) as (journal, _):
        assert found(journal, "s") == {"s": [1, 2, 3]}
    assert (tmp_path / "notes.txt").exists() and (tmp_path / "x.journal").exists()


def test_nothing_that_was_said_can_be_read_in_the_files_and_nobody_else_may_read_them(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    with life(folder, Wall()) as (journal, _):
        put(journal, Entry("acme", "s", said(1, "a very private word"), birth()))
    data = b"".join(path.read_bytes() for path in files(folder))
    assert len(data) > 100
    assert not any(word in data for word in (b"private", b"acme", b"order of"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    with life(tmp_path, Wall()), pytest.raises(HeadraceError, match="already written by another gateway"):
        FileJournal(tmp_path, SECRET)
    with life(tmp_path, Wall()):
        pass


def test_a_folder_that_cannot_be_one_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadraceError, match=r"cannot be used: .+"):
        FileJournal(tmp_path / "file" / "journal", SECRET)


def test_files_go_when_their_last_stream_is_past_its_window(tmp_path: Path) -> None:
    wall = Wall()
    with life(tmp_path, wall, segment_s=60.0) as (journal, _):
        put(journal, *whole("a"), entry(1, "b"))
        wall.time_s += 61
        put(journal, entry(2, "b"), entry(1, "c"))
        wall.time_s += 61
        put(journal, entry(3, "b", is_end=True), entry(2, "c"))
        assert len(files(tmp_path)) == 3
        wall.time_s += WINDOW_S - 1
        assert find(journal, "a") == Expired()  # though its file is still there, for b
        assert numbers(find(journal, "b")) == [1, 2, 3]
        wall.time_s += 1
        journal.sweep()
        assert len(files(tmp_path)) == 2  # c goes on
        assert (find(journal, "b"), find(journal, "never")) == (Expired(), None)
        put(journal, entry(3, "c", is_end=True))
        wall.time_s += WINDOW_S
        journal.sweep()
        assert files(tmp_path) == []


def test_the_next_life_does_not_bring_back_what_has_expired(tmp_path: Path) -> None:
    wall = Wall()
    with life(tmp_path, wall) as (journal, _):
        put(journal, *whole("ended"), entry(1, "given up"))
    wall.time_s += WINDOW_S
    with life(tmp_path, wall) as (journal, kept):
        assert kept == []
        assert (find(journal, "ended"), find(journal, "given up")) == (Expired(), Expired())
        put(journal, entry(2, "given up"), *whole("new"))
        assert by_name([one for one in [find(journal, "new")] if isinstance(one, Kept)]) == {"new": [1, 2, 3]}
        assert len(files(tmp_path)) == 1


def test_over_the_bound_the_oldest_go_and_their_streams_have_expired(tmp_path: Path) -> None:
    wall = Wall()
    with life(tmp_path, wall, max_bytes=8_000) as (journal, _):
        put(journal, entry(1, "long"))
        for number in range(60):
            put(journal, *whole(f"s{number}"))
            put(journal, entry(number + 2, "long"))
            wall.time_s += 1
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 8_000 + 2_000
        assert find(journal, "s0") == Expired() == find(journal, "long")
        assert numbers(find(journal, "s59")) == [1, 2, 3]
    with life(tmp_path, wall) as (journal, kept):
        assert kept == []
        assert found(journal, "s59", "long", "s0") == {"s59": [1, 2, 3]}
        assert find(journal, "s0") == Expired() == find(journal, "long")


def test_who_writes_very_much_pushes_out_its_own_and_not_what_others_have_kept(tmp_path: Path) -> None:
    wall = Wall()
    with life(tmp_path, wall, max_bytes=40_000) as (journal, _):
        put(journal, *whole("early", tenant="small"), entry(1, "open", tenant="small"))
        for number in range(200):
            put(journal, *whole(f"s{number}", tenant="large"))
            wall.time_s += 1
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 50_000
        put(journal, *whole("late", tenant="small"), entry(2, "open", tenant="small"))
    with life(tmp_path, wall) as (journal, kept):
        assert by_name(kept) == {"open": [1, 2]}
        assert [numbers(find(journal, name, "small")) for name in ("early", "late")] == [[1, 2, 3]] * 2
        assert numbers(find(journal, "s199", "large")) == [1, 2, 3]
        assert find(journal, "s50", "large") == Expired()


def test_an_id_that_expired_may_be_given_away_again(tmp_path: Path) -> None:
    wall = Wall()
    with life(tmp_path, wall) as (journal, _):
        put(journal, *whole(), entry(1, "open"))
        wall.time_s += WINDOW_S
        put(journal, entry(1), entry(2))
        assert numbers(find(journal)) == [1, 2]
    with life(tmp_path, wall) as (_, kept):
        assert by_name(kept)["s"] == [1, 2]


class Disk:
    """A disk with room for so many bytes more; `os.write` takes a part, then none, as the real one does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int, error: int = errno.ENOSPC) -> None:
        self.room = room
        self.tries = 0
        self._write, self._error = os.write, error
        monkeypatch.setattr(os, "write", self.write)

    def write(self, file: int, data: bytes) -> int:
        self.tries += 1
        if self.room <= 0:
            raise OSError(self._error, os.strerror(self._error))
        taken = self._write(file, data[: self.room])
        self.room -= taken
        return taken


@pytest.mark.parametrize("can_truncate", [True, False])
def test_a_full_disk_is_survived_and_hides_nothing_that_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, can_truncate: bool
) -> None:
    wall = Wall()
    caplog.set_level(logging.INFO)
    with life(tmp_path, wall) as (journal, _):
        put(journal, entry(1, "a"), entry(1, "b"))
        with monkeypatch.context() as patch:
            disk = Disk(patch, room=50)
            if not can_truncate:
                patch.setattr(os, "ftruncate", lambda file, size: os.write(-1, b""))
            put(journal, entry(2, "a"))
            tries = disk.tries
            put(journal, entry(3, "a"), entry(1, "c"))
            assert disk.tries == tries
            wall.time_s += 1
            put(journal, entry(2, "c"), entry(1, "d"))
            assert disk.tries > tries
            is_keeping = [journal.is_keeping]
        wall.time_s += 1
        put(journal, entry(4, "a"), entry(2, "b"), entry(3, "b"), *whole("e"))
        assert [*is_keeping, journal.is_keeping] == [False, True]
        assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    with life(tmp_path, wall) as (journal, kept):
        # Readers of a have seen more of it than lies here: nobody may go on from that.
        assert by_name(kept) == {"b": [1, 2, 3]}
        assert found(journal, "a", "b", "c", "d", "e") == {"b": [1, 2, 3], "e": [1, 2, 3]}


def test_a_gap_is_written_down_though_nothing_else_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = Wall()
    with life(tmp_path, wall) as (journal, _):
        put(journal, entry(1, "a"), entry(1, "b"))
        with monkeypatch.context() as patch:
            Disk(patch, room=0)
            put(journal, entry(2, "a"))
        wall.time_s += 61  # the next file
        journal.sweep()
        journal.sweep()
        assert len(files(tmp_path)) == 2
    with life(tmp_path, wall) as (journal, kept):
        assert by_name(kept) == {"b": [1]}
        assert find(journal, "a") == Expired()


def test_a_disk_that_is_full_from_the_start_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = Wall()
    with life(tmp_path, wall) as (journal, _):
        with monkeypatch.context() as patch:
            Disk(patch, room=3, error=errno.EIO)
            put(journal, entry(1, "a"))
        assert (files(tmp_path), find(journal, "a"), journal.is_keeping) == ([], None, False)
        wall.time_s += 1
        put(journal, *whole("b"))
        assert numbers(find(journal, "b")) == [1, 2, 3]


def test_a_stream_that_could_not_be_kept_does_not_hold_its_file_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = Wall()
    with life(tmp_path, wall) as (journal, _):
        put(journal, entry(1))
        with monkeypatch.context() as patch:
            Disk(patch, room=0)
            put(journal, entry(2, is_end=True))
        wall.time_s += WINDOW_S
        journal.sweep()
        assert (files(tmp_path), find(journal)) == ([], Expired())
