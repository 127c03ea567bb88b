"""What a tool syntax sees in generated text. Owns the events; parses nothing."""

from msgspec import Struct


class TextDelta(Struct, frozen=True):
    """Text that belongs to no call."""

    text: str


class CallStarted(Struct, frozen=True):
    index: int
    name: str


class ArgumentsDelta(Struct, frozen=True):
    """The next characters of the arguments, as the model wrote them. All of a call's are one JSON object."""

    index: int
    text: str


class CallEnded(Struct, frozen=True):
    """`broken_text` is empty, or all that the model wrote of a call that stopped being one after it had
    started: what was sent of it stays sent, and a reply that was not streamed can show this as text."""

    index: int
    broken_text: str = ""


ToolEvent = TextDelta | CallStarted | ArgumentsDelta | CallEnded


class EventLog:
    """Events in order; neighbouring texts become one."""

    def __init__(self) -> None:
        self._events: list[ToolEvent] = []
        self._text: list[str] = []

    def text(self, text: str) -> None:
        self._text.append(text)

    def add(self, event: ToolEvent) -> None:
        self._end_text()
        self._events.append(event)

    def take(self) -> list[ToolEvent]:
        self._end_text()
        events, self._events = self._events, []
        return events

    def _end_text(self) -> None:
        if text := "".join(self._text):
            self._events.append(TextDelta(text))
        self._text.clear()
