"""Many asks at once: lines of JSON in, a row for each out, through one engine. Owns neither files nor engine.

A line that is no ask, or is refused, gets a row that says so; the others go on.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from headrace.core.closed_set import complete
from headrace.core.errors import HeadraceError, InvalidInput, Refused
from headrace.core.event import Counters
from headrace.serving.ask import Ask
from headrace.serving.local import LocalService, Spoken
from headrace.serving.preparation import Prepared


class RowChoice(Struct, frozen=True, omit_defaults=True):
    index: int
    text: str
    finish_reason: str
    logprobs: list[dict[str, Any]] | None = None


class RowError(Struct, frozen=True):
    code: str
    message: str
    param: str | None = None


class Row(Struct, frozen=True, omit_defaults=True):
    """What became of one line: choices and usage, or an error. `index` is the line's number from 0."""

    index: int
    id: str | int | None = None
    choices: list[RowChoice] = []
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: RowError | None = None
    prompt_logprobs: list[dict[str, Any]] | None = None


@dataclass(slots=True)
class _Open:
    """A line whose choices have not all ended."""

    id: str | int | None
    left: int
    prompt_tokens: int
    texts: dict[int, list[str]] = field(default_factory=dict)
    scores: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    prompt_scores: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    choices: list[RowChoice] = field(default_factory=list)
    counters: list[Counters] = field(default_factory=list)
    error: RowError | None = None


@dataclass(slots=True)
class _Ready:
    """A line that was read and prepared and has not been taken by the engine."""

    index: int
    id: str | int | None
    prepared: Prepared


class RowRun:
    """At most `max_open` choices are with the engine at a time; further lines are read when some end.

    A line that the engine refuses for now is offered again as others end; it fails only if none are left.
    """

    def __init__(self, service: LocalService, defaults: Ask, *, max_open: int) -> None:
        self._service = service
        self._defaults = msgspec.structs.asdict(defaults)
        self._max_open = max_open
        self._open: dict[int, _Open] = {}
        self._ready: _Ready | None = None
        self.num_done = 0
        self.num_failed = 0
        self.num_tokens = 0
        self.num_prompt_tokens = 0

    @property
    def num_answered(self) -> int:
        return self.num_done - self.num_failed

    def rows(self, lines: Iterable[bytes]) -> Iterator[Row]:
        """A row per line, in the order in which they end. Empty lines are skipped."""
        source = enumerate(lines)
        exhausted = False
        while not exhausted or self._open or self._ready is not None:
            while self._service.num_open < self._max_open:
                if self._ready is None:
                    index, line = next(source, (-1, b""))
                    if index < 0:
                        exhausted = True
                        break
                    row = self._read(index, line) if line.strip() else None
                else:
                    row = self._offer(self._ready)
                    if self._ready is not None:
                        break
                if row is not None:
                    yield self._count(row)
            if self._open:
                for spoken in self._service.turn():
                    if (row := self._take(spoken)) is not None:
                        yield self._count(row)

    def _read(self, index: int, line: bytes) -> Row | None:
        """Make a line ready; a row at once where it is no ask."""
        name: str | int | None = None
        try:
            name, ask = self._parse(line)
            self._ready = _Ready(index, name, self._service.prepare(ask))
        except HeadraceError as error:
            return _failed(index, name, error)
        return None

    def _offer(self, ready: _Ready) -> Row | None:
        """Submit what is ready. It stays ready where the engine refuses it for now and others are still open."""
        try:
            self._service.submit(ready.index, ready.prepared)
        except Refused as error:
            if self._open:
                return None
            self._ready = None
            return _failed(ready.index, ready.id, error)
        except HeadraceError as error:
            self._ready = None
            return _failed(ready.index, ready.id, error)
        self._ready = None
        self._open[ready.index] = _Open(ready.id, ready.prepared.ask.n, len(ready.prepared.prompt_ids))
        return None

    def _parse(self, line: bytes) -> tuple[str | int | None, Ask]:
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
            name = msgspec.convert(fields.pop("id", None), str | int | None)
            return name, msgspec.convert(self._defaults | fields, Ask)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidInput(f"not a JSON object that asks for something: {complete(error, Ask)}") from None

    def _take(self, spoken: Spoken) -> Row | None:
        entry = self._open[spoken.key]
        entry.texts.setdefault(spoken.choice, []).append(spoken.text)
        if spoken.scores is not None:
            for position, score in _score_entries(spoken, entry.prompt_tokens):
                kind = entry.prompt_scores if position < entry.prompt_tokens else entry.scores
                kind.setdefault(spoken.choice, []).append(score)
        if spoken.ended is None or spoken.finish_reason is None:
            return None
        entry.left -= 1
        entry.counters.append(spoken.ended.counters)
        if spoken.finish_reason == "error":
            entry.error = RowError(spoken.ended.reason, spoken.ended.message or spoken.ended.reason)
        scores = entry.scores.get(spoken.choice)
        text = "".join(entry.texts[spoken.choice])
        entry.choices.append(RowChoice(spoken.choice, text, spoken.finish_reason, scores))
        return None if entry.left else self._close(spoken.key)

    def _close(self, index: int) -> Row:
        entry = self._open.pop(index)
        emitted = sum(counters.emitted for counters in entry.counters)
        return Row(
            index,
            entry.id,
            sorted(entry.choices, key=lambda choice: choice.index),
            entry.prompt_tokens,
            entry.counters[0].prompt_cached,
            emitted,
            entry.error,
            entry.prompt_scores.get(0),
        )

    def _count(self, row: Row) -> Row:
        self.num_done += 1
        self.num_failed += row.error is not None
        self.num_tokens += row.completion_tokens
        self.num_prompt_tokens += row.prompt_tokens
        return row


def _failed(index: int, name: str | int | None, error: HeadraceError) -> Row:
    return Row(index, name, error=RowError(error.code, error.message, error.param))


def _score_entries(spoken: Spoken, num_prompt: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Log-probabilities as plain data, by position: the id that was taken, its own, and the alternatives by id. What a
    prompt's ids are its sender knows; the last part of one is scored in the step that takes the reply's first."""
    scores = spoken.scores
    assert scores is not None
    for entry, position in enumerate(scores.positions.tolist()):
        ids, values = scores.top_ids[entry].tolist(), scores.top_logprobs[entry].tolist()
        top = {str(token): value for token, value in zip(ids, values, strict=True) if token >= 0}
        score = {"position": position, "logprob": float(scores.logprobs[entry]), "top": top}
        yield position, score if position < num_prompt or not spoken.ids else {"id": spoken.ids[-1], **score}
