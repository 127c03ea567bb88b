"""Server-sent events from bytes that come in any pieces. Owns the cutting of events; knows nothing of what they say."""

from headrace.core.errors import HeadraceError

MAX_EVENT_BYTES = 16 << 20


class EventStream:
    """One stream. Comments are counted and dropped; of an event only its data is kept."""

    __slots__ = ("_after_cr", "_rest", "comments")

    def __init__(self) -> None:
        self.comments = 0
        self._rest = b""
        self._after_cr = False

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that these bytes complete. Raises HeadraceError for an event without end."""
        if self._after_cr or b"\r" in data:
            data = self._with_plain_ends(data)
        if self._rest:
            data = self._rest + data
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise HeadraceError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        found = []
        for event in events:
            # Most events are one line of data.
            if event.startswith(b"data: ") and b"\n" not in event:
                found.append(event[6:])
            else:
                self._read(event, found)
        return found

    @property
    def is_whole(self) -> bool:
        """Whether the stream could end here without cutting an event."""
        return not self._rest.strip(b"\n")

    def _read(self, event: bytes, found: list[bytes]) -> None:
        lines = []
        for line in event.split(b"\n"):
            if line.startswith(b":"):
                self.comments += 1
            elif line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
        if lines:
            found.append(b"\n".join(lines))

    def _with_plain_ends(self, data: bytes) -> bytes:
        """Lines may end in CR, LF or both, and both may come in two pieces."""
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
            self._after_cr = False
        if data:
            self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
