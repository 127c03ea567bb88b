"""The bytes of a link: a preamble from each end, then messages as a 4-byte big-endian length and msgpack.

Owns the framing and its bounds. Moves no bytes and knows no message.
"""

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from headrace.core.errors import TooLarge

# The first byte is no letter and begins no msgpack, pickle, HTTP or TLS that a stray client might send.
MAGIC = b"\x89HDR"
VERSION = 1
PREAMBLE = MAGIC + bytes([VERSION])
_LENGTH = struct.Struct(">I")
_HEADER_BYTES = _LENGTH.size


class Limits(Struct, frozen=True):
    """What one connection may hold or hold up.

    `greeting_s`: to connect and send a preamble; `message_s`: to finish a message that has begun; `linger_s`: for
    what was sent before a close to leave. `max_links` is of one listener.
    """

    max_message_bytes: int = 64 << 20
    max_pending_bytes: int = 64 << 20
    greeting_s: float = 5.0
    message_s: float = 30.0
    linger_s: float = 5.0
    max_links: int = 1024


class BadWire(Exception):
    """The other end does not speak this protocol. The text holds nothing of what it sent."""


class Greeting:
    """Takes the other end's preamble, and refuses at the first byte that does not belong to one."""

    def __init__(self) -> None:
        self._taken = b""

    def feed(self, data: bytes) -> bytes | None:
        """What follows the preamble, once that is whole; None before."""
        taken = self._taken + data[: len(PREAMBLE) - len(self._taken)]
        rest = data[len(taken) - len(self._taken) :]
        if not taken.startswith(MAGIC[: len(taken)]):
            raise BadWire("not a Headrace link: the preamble is wrong")
        self._taken = taken
        if len(taken) < len(PREAMBLE):
            return None
        if taken != PREAMBLE:
            raise BadWire(f"the other end speaks version {taken[-1]} of the wire, this end speaks {VERSION}")
        return rest


class Parser:
    """Cuts a stream of bytes into messages. A whole message is a view into what was fed; only one that is split
    over several reads is copied, as it arrives: a length alone allocates nothing."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._partial = bytearray()

    @property
    def is_partial(self) -> bool:
        return bool(self._partial)

    def feed(self, data: bytes) -> Iterator[memoryview]:
        """Each view is to be used before the next is asked for. Raises BadWire; the parser is of no use then."""
        view = memoryview(data)
        at = self._continue(view) if self._partial else 0
        if at is None:
            return
        if self._partial:
            whole, self._partial = self._partial, bytearray()
            yield memoryview(whole)[_HEADER_BYTES:]
        while len(view) - at >= _HEADER_BYTES:
            stop = at + _HEADER_BYTES + self._size(view, at)
            if stop > len(view):
                break
            yield view[at + _HEADER_BYTES : stop]
            at = stop
        self._partial += view[at:]

    def _continue(self, view: memoryview) -> int | None:
        """Complete the message that has begun: how much of `view` that took, or None where it was not enough."""
        partial = self._partial
        at = max(0, _HEADER_BYTES - len(partial))
        partial += view[:at]
        if len(partial) < _HEADER_BYTES:
            return None
        missing = _HEADER_BYTES + self._size(partial, 0) - len(partial)
        partial += view[at : at + missing]
        return at + missing if at + missing <= len(view) else None

    def _size(self, data: memoryview | bytearray, at: int) -> int:
        size: int = _LENGTH.unpack_from(data, at)[0]
        if size > self._max_message_bytes:
            raise BadWire(f"a message of {size} bytes is longer than {self._max_message_bytes}")
        return size


class Encoder:
    """Appends messages to a buffer, as the wire has them."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._encoder = msgspec.msgpack.Encoder()

    def append(self, message: Any, buffer: bytearray) -> int:
        """How many bytes were added. Raises TooLarge, or TypeError for what no message may hold; adds nothing then."""
        start = len(buffer)
        try:
            self._encoder.encode_into(message, buffer, start + _HEADER_BYTES)
            size = len(buffer) - start - _HEADER_BYTES
            if size > self._max_message_bytes:
                raise TooLarge(f"a message of {size} bytes is longer than the {self._max_message_bytes} a link carries")
        except BaseException:
            del buffer[start:]
            raise
        _LENGTH.pack_into(buffer, start, size)
        return size + _HEADER_BYTES
