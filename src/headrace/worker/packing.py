"""Makes gateways' frames of the engine's: one per gateway and step, by keys instead of numbers.

Owns what is to be told and not yet sent. A sequence leaves the table of keys with the frame that holds its end.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from headrace.core.errors import HeadraceError
from headrace.core.event import Counters, Ended, EngineLoad, Outcome, StepFrame, Waits
from headrace.core.messages import End, Frame, Refusal, ScoreTable
from headrace.core.plan import Scores
from headrace.worker.keys import Entry, KeyTable


@dataclass(slots=True)
class _Note:
    """What one gateway's next frame holds beside tokens."""

    accepted: list[int] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    ended: list[End] = field(default_factory=list)


class FramePacker:
    def __init__(self, keys: KeyTable, forget: Callable[[Entry], None]) -> None:
        """`forget` is told of every sequence whose end was packed."""
        self._keys = keys
        self._forget = forget
        self._notes: dict[int, _Note] = {}

    def accept(self, entry: Entry) -> None:
        self._note(entry.link).accepted.append(entry.key)

    def refuse(self, entries: Sequence[Entry], error: HeadraceError, code: str = "") -> None:
        """All sequences of one submission, as one."""
        if entries:
            self.turn_away(entries[0].link, (entry.key for entry in entries), error, code)
        for entry in entries:
            self._keys.drop(entry)

    def turn_away(self, link: int, keys: Iterable[int], error: HeadraceError, code: str = "") -> None:
        """Keys that have no entry."""
        retry_after_s = getattr(error, "retry_after_s", None)
        refusal = Refusal(tuple(keys), code or error.code, error.message, error.param, retry_after_s)
        self._note(link).refused.append(refusal)

    def end_unplaced(self, entry: Entry, reason: str, waited_s: float) -> None:
        """Ends what the engine never saw: it was accepted here, and is over."""
        note = self._note(entry.link)
        note.accepted.append(entry.key)
        waits = Waits(wait_capacity_s=waited_s)
        note.ended.append(End(entry.key, Outcome.ABORTED, reason, Counters(), waits))
        self._keys.drop(entry)

    def drop_link(self, link: int) -> None:
        self._notes.pop(link, None)

    def pack(self, frame: StepFrame, load: EngineLoad) -> list[tuple[int, Frame]]:
        """A frame for each gateway that has something to hear; numbered 0, since the outbox numbers."""
        owners = [self._keys.owner(number) for number in frame.numbers.tolist()]
        links = {owner.link for owner in owners if owner is not None}
        rows = {link: self._rows(frame, owners, link) for link in links}
        scores = {} if frame.scores is None else self._scores(frame.scores)
        for event in frame.ended:
            self._end(event)
        notes, self._notes = self._notes, {}
        packed = []
        for link in dict.fromkeys((*rows, *scores, *notes)):
            note = notes.get(link) or _Note()
            keys, indices, tokens, counters = rows.get(link, (b"", b"", b"", b""))
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

    def _rows(self, frame: StepFrame, owners: list[Entry | None], link: int) -> tuple[bytes, bytes, bytes, bytes]:
        mine = [row for row, owner in enumerate(owners) if owner is not None and owner.link == link]
        keys = np.array([owner.key for owner in owners if owner is not None and owner.link == link], np.int64)
        if len(mine) == len(owners):
            return Frame.pack_rows(keys, frame.indices, frame.tokens, frame.counters)
        return Frame.pack_rows(keys, frame.indices[mine], frame.tokens[mine], frame.counters[mine])

    def _scores(self, scores: Scores) -> dict[int, ScoreTable]:
        owners = [self._keys.owner(number) for number in scores.owners.tolist()]
        tables = {}
        for link in {owner.link for owner in owners if owner is not None}:
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
        self._note(entry.link).ended.append(end)
        self._keys.drop(entry)
        self._forget(entry)

    def _note(self, link: int) -> _Note:
        return self._notes.setdefault(link, _Note())
