"""What a stream has said, in the order it was said. Owns the records; knows no protocol that clients speak.

A record is what one step brought to one stream. A frame, the numbered thing a client sees, is a pure function of
a record and of the stream's dialect. Records hold nothing that could refer back to them, and there are very many:
the garbage collector need not look at them.
"""

from typing import Protocol

from msgspec import Struct


class Alternative(Struct, frozen=True, gc=False):
    id: int
    data: bytes
    logprob: float


class Score(Struct, frozen=True, gc=False):
    """A token's log-probability, with the bytes it stands for. None: the first token of a prompt has none."""

    id: int
    data: bytes
    logprob: float | None
    top: tuple[Alternative, ...] = ()


class CallDelta(Struct, frozen=True, gc=False):
    """Something of one tool call. `id` and `name` come once, with the first; arguments in fragments.

    `broken_text` comes last, with a call that stopped being one: all that the model wrote of it, which a reply that
    is not streamed shows as text instead of the call, behind so many characters of the choice's text as `place` says.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    broken_text: str = ""
    place: int = 0


class Part(Struct, frozen=True, gc=False):
    """What one choice said. `finish` is set in its last part: stop, length, tool_calls, content_filter, error.

    Where `is_prompt`, it tells of the prompt instead: its ids and scores, and its text where that is echoed.
    """

    choice: int
    ids: tuple[int, ...] = ()
    text: str = ""
    scores: tuple[Score, ...] = ()
    calls: tuple[CallDelta, ...] = ()
    finish: str | None = None
    # Generated tokens, and characters of text, that this choice had said before.
    index: int = 0
    offset: int = 0
    is_prompt: bool = False
    # Prompt tokens that did not have to be computed: in the first part of a choice.
    cached: int = 0


class Usage(Struct, frozen=True, gc=False):
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Failure(Struct, frozen=True, gc=False):
    """Why a stream broke, in the fields of the error tree."""

    code: str
    message: str
    status: int = 500
    param: str | None = None
    retry_after_s: float | None = None


class Ending(Struct, frozen=True, gc=False):
    """The last thing a stream says. `stages` are seconds by stage up to now; the client's are not over yet."""

    usage: Usage
    failure: Failure | None = None
    stages: dict[str, float] = {}


class Record(Struct, frozen=True, gc=False):
    """One numbered frame of a stream, from 1: what a step said of some choices, or, as the last one, the ending.

    `merged` is how many earlier records it holds as well. `usage` is what was used up to here; `step` is the
    worker's, `age_s` the time since the stream began; all three are for faces that show them.
    """

    number: int
    parts: tuple[Part, ...] = ()
    ending: Ending | None = None
    merged: int = 0
    usage: Usage | None = None
    step: int = 0
    age_s: float = 0.0

    @property
    def is_opening(self) -> bool:
        """It is the first that a client sees of the stream."""
        return self.number - self.merged == 1


class Dialect(Protocol):
    """How a face words a stream. Pure: the same record gives the same bytes, whoever reads it and when."""

    def bound(self, created_s: float, fingerprint: str) -> "Dialect":
        """The same for a stream of which this is known now: when it began, and whose numerics speak."""

    def frame(self, record: Record) -> bytes:
        """As it goes over the wire, with the record's number where the protocol has a place for it."""
