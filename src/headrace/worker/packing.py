"""Makes gateways' frames of the engine's: one per gateway and step, by keys instead of numbers.

Owns what is to be told and not yet sent. A sequence leaves the table of keys with the frame that holds its end, or
keeps that end while it is nobody's. What is told again to who attaches may take several frames.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple, replace

from headrace.core.errors import HeadraceError
from headrace.core.event import Counters, Ended, EngineLoad, Outcome, StepFrame, Waits
from headrace.core.messages import End, Frame, Refusal, ScoreTable
from headrace.core.plan import Scores
from headrace.worker.keys import NO_NUMBER, NOBODY, Entry, KeyTable

# Keys, indices, tokens and counters of a frame.
Rows = tuple[bytes, bytes, bytes, bytes]

_NO_ROWS: Rows = (b"", b"", b"", b"")
# Of a frame that tells again; some 600 kB, so that frames stay far below what a link carries at once.
_MOST_ROWS = 16_384
_KEY_BYTES = 8


class _Note(Struct, eq=False):
    """What one gateway's next frame holds beside the tokens of a step. `told` are tokens of earlier steps."""

    accepted: list[int] = []
    refused: list[Refusal] = []
    ended: list[End] = []
    told: list[Rows] = []


class FramePacker:
    def __init__(self, keys: KeyTable, forget: Callable[[Entry], None], most_rows: int = _MOST_ROWS) -> None:
        """`forget` is told of every sequence that was refused or whose end was packed, or kept for who attaches."""
        self._keys = keys
        self._forget = forget
        self._most_rows = most_rows
        self._notes: dict[int, _Note] = {}

    def accept(self, entry: Entry) -> None:
        self._note(entry.link).accepted.append(entry.key)

    def refuse(self, entries: Sequence[Entry], error: HeadraceError, code: str = "") -> None:
        """All sequences of one submission, as one; some may have been attached by others meanwhile."""
        by_link: dict[int, list[int]] = {}
        for entry in entries:
            by_link.setdefault(entry.link, []).append(entry.key)
            self._keys.drop(entry)
            self._forget(entry)
        for link, keys in by_link.items():
            self.turn_away(link, keys, error, code)

    def turn_away(self, link: int, keys: Iterable[int], error: HeadraceError, code: str = "") -> None:
        """Keys that have no entry."""
        retry_after_s = getattr(error, "retry_after_s", None)
        refusal = Refusal(tuple(keys), code or error.code, error.message, error.param, retry_after_s)
        self._note(link).refused.append(refusal)

    def end_unplaced(self, entry: Entry, reason: str, waited_s: float) -> None:
        """Ends what the engine never saw: it was accepted here, and is over."""
        self.end_for(entry, reason, Counters(), Waits(wait_capacity_s=waited_s))
        self._keys.drop(entry)

    def end_for(self, entry: Entry, reason: str, counters: Counters, waits: Waits) -> None:
        """Ends it for the gateway that has it, whatever becomes of the sequence."""
        note = self._note(entry.link)
        if entry.number == NO_NUMBER:
            note.accepted.append(entry.key)
        note.ended.append(End(entry.key, Outcome.ABORTED, reason, counters, waits))

    def tell_again(self, entry: Entry, index: int, counters: Counters) -> None:
        """To the gateway that has it now: it is accepted, its tokens from `index` on, and its end if it has ended."""
        note = self._note(entry.link)
        note.accepted.append(entry.key)
        row = np.array(astuple(counters), np.int32)
        for start in range(index, len(entry.ids), self._most_rows):
            tokens = np.array(entry.ids[start : start + self._most_rows], np.int32)
            size = len(tokens)
            indices = np.arange(start, start + size, dtype=np.int32)
            note.told.append(Frame.pack_rows([entry.key] * size, indices, tokens, np.tile(row, (size, 1))))
        if entry.end is not None:
            note.ended.append(replace(entry.end, key=entry.key))
            self._keys.drop(entry)

    def drop_link(self, link: int) -> None:
        self._notes.pop(link, None)

    def pack(self, frame: StepFrame, load: EngineLoad) -> list[tuple[int, Frame]]:
        """Frames for each gateway that has something to hear; numbered 0, since the outbox numbers."""
        rows = self._rows(frame)
        scores = {} if frame.scores is None else self._scores(frame.scores)
        for event in frame.ended:
            self._end(event)
        notes, self._notes = self._notes, {}
        notes.pop(NOBODY, None)
        packed: list[tuple[int, Frame]] = []
        for link in dict.fromkeys((*rows, *scores, *notes)):
            note = notes.get(link) or _Note()
            mine = rows.get(link, _NO_ROWS)
            if note.told:
                packed.extend((link, told) for told in self._tell_early(note, load))
                mine = _joined([*note.told, mine])
            keys, indices, tokens, counters = mine
            made = Frame(
                number=0,
                step=frame.step,
                keys=keys,
                indices=indices,
                tokens=tokens,
                counters=counters,
                ended=tuple(note.ended),
                refused=tuple(note.refused),
                accepted=tuple(note.accepted),
                scores=scores.get(link),
                load=load,
            )
            packed.append((link, made))
        return packed

    def _tell_early(self, note: _Note, load: EngineLoad) -> list[Frame]:
        """What is too much for one frame; the rest stays in the note. Acceptances come with the first."""
        early = []
        while sum(len(told[0]) for told in note.told) > self._most_rows * _KEY_BYTES:
            size = taken = 0
            while taken < len(note.told) and (size := size + len(note.told[taken][0])) <= self._most_rows * _KEY_BYTES:
                taken += 1
            rows = _joined(note.told[:taken])
            early.append(Frame(0, -1, *rows, accepted=tuple(note.accepted), load=load))
            note.accepted.clear()
            del note.told[:taken]
        return early

    def _rows(self, frame: StepFrame) -> dict[int, Rows]:
        """Those of each gateway; what is nobody's is noted with its sequence."""
        mine: dict[int, tuple[list[int], list[int]]] = {}
        for row, number in enumerate(frame.numbers.tolist()):
            owner = self._keys.owner(number)
            if owner is None:
                continue
            if owner.link == NOBODY:
                owner.ids.append(int(frame.tokens[row]))
                continue
            found = mine.get(owner.link)
            if found is None:
                found = mine[owner.link] = ([], [])
            found[0].append(row)
            found[1].append(owner.key)
        return {link: _picked(frame, rows, keys) for link, (rows, keys) in mine.items()}

    def _scores(self, scores: Scores) -> dict[int, ScoreTable]:
        owners = [self._keys.owner(number) for number in scores.owners.tolist()]
        tables = {}
        for link in {owner.link for owner in owners if owner is not None} - {NOBODY}:
            mine = [(at, owner.key) for at, owner in enumerate(owners) if owner is not None and owner.link == link]
            entries = np.array([at for at, _ in mine], np.intp)
            keys = np.array([key for _, key in mine], np.int64)
            tables[link] = ScoreTable.pack(scores.take(entries, keys))
        return tables

    def _end(self, event: Ended) -> None:
        entry = self._keys.owner(event.number)
        if entry is None:
            return
        waits = replace(event.waits, wait_capacity_s=event.waits.wait_capacity_s + entry.early_s)
        end = End(entry.key, event.outcome, event.reason, event.counters, waits, event.preemptions, event.message)
        if entry.link == NOBODY:
            self._keys.keep_end(entry, end)
        else:
            self._note(entry.link).ended.append(end)
            self._keys.drop(entry)
        self._forget(entry)

    def _note(self, link: int) -> _Note:
        note = self._notes.get(link)
        if note is None:
            note = self._notes[link] = _Note()
        return note


def _picked(frame: StepFrame, rows: list[int], keys: list[int]) -> Rows:
    if len(rows) == len(frame.numbers):
        return Frame.pack_rows(keys, frame.indices, frame.tokens, frame.counters)
    return Frame.pack_rows(keys, frame.indices[rows], frame.tokens[rows], frame.counters[rows])


def _joined(rows: Sequence[Rows]) -> Rows:
    keys, indices, tokens, counters = (b"".join(column) for column in zip(*rows, strict=True))
    return keys, indices, tokens, counters
