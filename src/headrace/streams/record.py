"""What a stream has said, in the order it was said. Owns the records; knows no protocol that clients speak.

A record is what one step brought to one stream. A frame, the numbered thing a client sees, is a pure function of
a record and of the stream's dialect.
"""

from typing import Protocol

from msgspec import Struct


class Alternative(Struct, frozen=True):
    id: int
    data: bytes
    logprob: float


class Score(Struct, frozen=True):
    """A token's log-probability, with the bytes it stands for. None: the first token of a prompt has none."""

    id: int
    data: bytes
    logprob: float | None
    top: tuple[Alternative, ...] = ()


class CallDelta(Struct, frozen=True):
    """Something of one tool call. `id` and `name` come once, with the first; arguments in fragments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Part(Struct, frozen=True):
    """What one choice said. `finish` is set in its last part: stop, length, tool_calls, content_filter, error."""

    choice: int
    ids: tuple[int, ...] = ()
    text: str = ""
    scores: tuple[Score, ...] = ()
    calls: tuple[CallDelta, ...] = ()
    finish: str | None = None


class Usage(Struct, frozen=True):
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Failure(Struct, frozen=True):
    """Why a stream broke, in the fields of the error tree."""

    code: str
    message: str
    status: int = 500
    param: str | None = None
    retry_after_s: float | None = None


class Ending(Struct, frozen=True):
    """The last thing a stream says. `stages` are seconds by stage up to now; the client's are not over yet."""

    usage: Usage
    failure: Failure | None = None
    stages: dict[str, float] = {}


class Record(Struct, frozen=True):
    """One numbered frame of a stream, from 1: what a step said of some choices, or, as the last one, the ending."""

    number: int
    parts: tuple[Part, ...] = ()
    ending: Ending | None = None


class Dialect(Protocol):
    """How a face words a stream. Pure: the same record gives the same bytes, whoever reads it and when."""

    def frame(self, record: Record) -> bytes:
        """As it goes over the wire, with the record's number where the protocol has a place for it."""
