"""Many asks at once: lines of JSON in, a row for each out, through one engine. Owns neither files nor engine.

A line that is no ask, or is refused, gets a row that says so; the others go on.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from headrace.core.errors import HeadraceError, InvalidInput
from headrace.core.event import Counters
from headrace.serving.ask import Ask
from headrace.serving.local import LocalService, Spoken


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


@dataclass(slots=True)
class _Open:
    """A line whose choices have not all ended."""

    id: str | int | None
    left: int
    prompt_tokens: int
    texts: dict[int, list[str]] = field(default_factory=dict)
    scores: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    choices: list[RowChoice] = field(default_factory=list)
    counters: list[Counters] = field(default_factory=list)
    error: RowError | None = None


class RowRun:
    """At most `max_open` choices are with the engine at a time; further lines are read when some end."""

    def __init__(self, service: LocalService, defaults: Ask, *, max_open: int) -> None:
        self._service = service
        self._defaults = msgspec.structs.asdict(defaults)
        self._max_open = max_open
        self._open: dict[int, _Open] = {}
        self.num_done = 0
        self.num_failed = 0
        self.num_tokens = 0
        self.num_prompt_tokens = 0

    def rows(self, lines: Iterable[bytes]) -> Iterator[Row]:
        """A row per line, in the order in which they end. Empty lines are skipped."""
        source = enumerate(lines)
        exhausted = False
        while not exhausted or self._open:
            while not exhausted and self._service.num_open < self._max_open:
                index, line = next(source, (-1, b""))
                if index < 0:
                    exhausted = True
                elif line.strip() and (row := self._begin(index, line)) is not None:
                    yield self._count(row)
            if self._open:
                for spoken in self._service.turn():
                    if (row := self._take(spoken)) is not None:
                        yield self._count(row)

    def _begin(self, index: int, line: bytes) -> Row | None:
        """Submit a line; a row at once where it is refused."""
        name: str | int | None = None
        try:
            name, ask = self._parse(line)
            prepared = self._service.prepare(ask)
            self._service.submit(index, prepared)
        except HeadraceError as error:
            return Row(index, name, error=RowError(error.code, error.message, error.param))
        self._open[index] = _Open(name, prepared.n, len(prepared.prompt_ids))
        return None

    def _parse(self, line: bytes) -> tuple[str | int | None, Ask]:
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
            name = msgspec.convert(fields.pop("id", None), str | int | None)
            return name, msgspec.convert(self._defaults | fields, Ask)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidInput(f"the line is no ask: {error}") from None

    def _take(self, spoken: Spoken) -> Row | None:
        entry = self._open[spoken.key]
        entry.texts.setdefault(spoken.choice, []).append(spoken.text)
        if spoken.scores is not None:
            entry.scores.setdefault(spoken.choice, []).extend(_score_entries(spoken))
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
        )

    def _count(self, row: Row) -> Row:
        self.num_done += 1
        self.num_failed += row.error is not None
        self.num_tokens += row.completion_tokens
        self.num_prompt_tokens += row.prompt_tokens
        return row


def _score_entries(spoken: Spoken) -> Iterator[dict[str, Any]]:
    """Log-probabilities as plain data: position, id's own, and the alternatives by id."""
    scores = spoken.scores
    assert scores is not None
    for entry in range(len(scores.positions)):
        ids, values = scores.top_ids[entry].tolist(), scores.top_logprobs[entry].tolist()
        top = {str(token): value for token, value in zip(ids, values, strict=True) if token >= 0}
        yield {"position": int(scores.positions[entry]), "logprob": float(scores.logprobs[entry]), "top": top}
