"""The ways in which models write tool calls, read from text as it streams. Owns tags, lists and what lies between.

What is not a call comes out as text, every character of it: prose, other JSON, a call of what nobody offered, one that
was cut off before its arguments began. How the text was cut into deltas makes no difference.
"""

from collections.abc import Collection
from enum import Enum, auto
from typing import Protocol

from msgspec import Struct

from headrace.core.errors import InvalidInput
from headrace.text.tools.call import CallParser
from headrace.text.tools.events import ArgumentsDelta, CallEnded, CallStarted, EventLog, ToolEvent
from headrace.text.tools.scan import WHITE_SPACE, Step

# White space that is held while it may lie between calls; more than that is text.
MAX_GAP_CHARS = 256


class ToolSyntax(Protocol):
    """Reads one stream: push its text, then finish once."""

    def push(self, text: str) -> list[ToolEvent]: ...

    def finish(self) -> list[ToolEvent]: ...


class Dialect(Struct, frozen=True):
    """`open_tag` says that a call follows. Where `is_bare`, an object or list at the start of a line may
    also be one. Between bare calls white space and one `separator` are syntax."""

    open_tag: str = ""
    close_tag: str = ""
    is_bare: bool = False
    has_lists: bool = False
    separator: str = ""


DIALECTS = {
    "hermes": Dialect(open_tag="<tool_call>", close_tag="</tool_call>"),
    "llama3": Dialect(open_tag="<|python_tag|>", is_bare=True, separator=";"),
    "json": Dialect(is_bare=True, has_lists=True),
}


def open_syntax(name: str, names: Collection[str] | None = None) -> ToolSyntax:
    """A reader for one stream; `names` are the tools that can be called, None: any."""
    if name not in DIALECTS:
        raise InvalidInput(f"The tool syntax {name!r} is not one of {', '.join(DIALECTS)}.", param="tool_syntax")
    return CallStream(DIALECTS[name], names)


def pick_syntax(template: str, architecture: str) -> str:
    """The likeliest syntax of a model: by what its template tells it to write, else by its family."""
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or "<|eom_id|>" in template or "Environment: ipython" in template:
        return "llama3"
    return "hermes" if architecture.lower().startswith("qwen") else "json"


class _Place(Enum):
    TEXT = auto()
    # Behind a tag or a `[`: white space, then a call.
    OPENED = auto()
    CALL = auto()
    # Behind a call: white space, then the closing tag.
    CLOSING = auto()
    # Behind a bare call: white space, a separator, the end of a list or the next call.
    GAP = auto()


class CallStream:
    """`_held` is what was read and not yet given out: text if no call comes of it, else syntax."""

    def __init__(self, dialect: Dialect, names: Collection[str] | None = None) -> None:
        self._dialect = dialect
        self._names = names
        self._log = EventLog()
        self._place = _Place.TEXT
        self._held = ""
        self._call: CallParser | None = None
        self._index = 0
        self._is_announced = False
        self._is_line_start = True
        self._in_list = False
        self._is_separated = False

    def push(self, text: str) -> list[ToolEvent]:
        for character in text:
            # A character that ends one place is read again in the next.
            while not _STEPS[self._place](self, character):
                pass
        self._give_arguments()
        return self._log.take()

    def finish(self) -> list[ToolEvent]:
        if self._call is not None:
            self._abandon(self._call)
        self._log.text(self._held)
        self._held = ""
        return self._log.take()

    def _read_text(self, character: str) -> bool:
        tag = self._dialect.open_tag
        if tag.startswith(self._held + character):
            self._held += character
            if self._held == tag:
                self._place = _Place.OPENED
            return True
        if self._held:
            return self._to_text()
        if self._is_line_start and self._dialect.is_bare:
            if character == "{":
                return self._begin_call(character)
            if character == "[" and self._dialect.has_lists:
                self._held, self._in_list, self._place = character, True, _Place.OPENED
                return True
        self._is_line_start = character == "\n" or (self._is_line_start and character in WHITE_SPACE)
        self._log.text(character)
        return True

    def _read_opened(self, character: str) -> bool:
        if character == "{":
            return self._begin_call(character)
        return self._hold(character) or self._to_text()

    def _begin_call(self, character: str) -> bool:
        is_tagged = self._held.startswith(self._dialect.open_tag) and bool(self._dialect.close_tag)
        self._call = CallParser(is_tagged=is_tagged, names=self._names)
        self._place = _Place.CALL
        self._is_announced = False
        return self._read_call(character)

    def _read_call(self, character: str) -> bool:
        call = self._call
        assert call is not None, "a call is read that was not begun"
        step = call.feed(character)
        if step is Step.BAD:
            self._abandon(call)
            return False
        if step is Step.DONE:
            self._give_arguments()
            self._log.add(CallEnded(self._index))
            self._leave_call(_Place.CLOSING if self._dialect.close_tag else _Place.GAP)
        return True

    def _read_closing(self, character: str) -> bool:
        tag = self._dialect.close_tag
        seen = (self._held + character).lstrip(WHITE_SPACE)
        if not seen:
            return self._hold(character) or self._to_text()
        if not tag.startswith(seen):
            return self._to_text()
        self._held += character
        if seen == tag:
            self._held, self._place = "", _Place.TEXT
        return True

    def _read_gap(self, character: str) -> bool:
        if character == "{":
            return self._begin_call(character)
        if character == "]" and self._in_list:
            self._held, self._in_list, self._place = "", False, _Place.TEXT
            self._is_line_start = False
            return True
        separator = "," if self._in_list else self._dialect.separator
        if character == separator and not self._is_separated:
            self._is_separated = True
            self._held += character
            return True
        return self._hold(character) or self._to_text()

    def _hold(self, character: str) -> bool:
        if character not in WHITE_SPACE or len(self._held) >= MAX_GAP_CHARS:
            return False
        self._held += character
        return True

    def _to_text(self) -> bool:
        """What is held was no syntax. False: the character that showed it is to be read as text."""
        self._log.text(self._held)
        self._is_line_start = self._held.strip(" \t\r")[-1:] == "\n"
        self._held, self._in_list, self._place = "", False, _Place.TEXT
        return False

    def _give_arguments(self) -> None:
        call = self._call
        if call is None or not call.has_started:
            return
        if not self._is_announced:
            self._is_announced = True
            self._log.add(CallStarted(self._index, call.name))
        if arguments := call.take_arguments():
            self._log.add(ArgumentsDelta(self._index, arguments))

    def _abandon(self, call: CallParser) -> None:
        """The object is no call, or was cut off: text, unless it was announced already."""
        self._give_arguments()
        written = self._held + call.source
        if self._is_announced:
            self._log.add(CallEnded(self._index, broken_text=written))
        else:
            self._log.text(written)
        self._in_list = False
        self._is_line_start = False
        self._leave_call(_Place.TEXT)

    def _leave_call(self, place: _Place) -> None:
        self._index += self._is_announced
        self._call = None
        self._held = ""
        self._is_separated = False
        self._place = place


# Not of the stream's own: what holds its methods would hold the stream.
_STEPS = {
    _Place.TEXT: CallStream._read_text,
    _Place.OPENED: CallStream._read_opened,
    _Place.CALL: CallStream._read_call,
    _Place.CLOSING: CallStream._read_closing,
    _Place.GAP: CallStream._read_gap,
}
