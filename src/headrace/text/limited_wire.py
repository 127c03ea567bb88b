"""What a limited process and its parent say to each other: length-prefixed msgpack over one socket.

Owns the framing and the two records. Knows neither the jobs nor how a process is started.
"""

import socket
import struct
import time

from msgspec import Raw, Struct

_LENGTH = struct.Struct(">I")
# The kind of a job that is a list of jobs; its value is a list of answers.
BATCH = "batch"


class Confinement(Struct, frozen=True):
    """What a child may use, told to it on its command line."""

    parent_pid: int
    memory_bytes: int
    niceness: int
    max_job_bytes: int


class Job(Struct, frozen=True, array_like=True):
    kind: str
    payload: Raw
    cpu_s: float


class Answer(Struct, frozen=True, array_like=True):
    """`error` is empty or a code of `core.errors`; `spent` says that the process should not be used again."""

    value: Raw = Raw(b"\xc0")
    error: str = ""
    message: str = ""
    param: str | None = None
    spent: bool = False


def frame_of(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def body_of(received: bytearray, max_bytes: int) -> bytes | None:
    """The body of the frame that was received; None: more of it is to come. Raises ValueError where it is longer than
    `max_bytes`, or than it says."""
    if len(received) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack_from(received)
    missing = _LENGTH.size + size - len(received)
    if size > max_bytes or missing < 0:
        raise ValueError(f"a frame of {size} bytes is too long")
    return None if missing else bytes(received[_LENGTH.size :])


def send_frame(channel: socket.socket, body: bytes) -> None:
    channel.sendall(frame_of(body))


def receive_frame(
    channel: socket.socket, max_bytes: int, until_s: float | None = None, received: bytes | bytearray = b""
) -> bytes | None:
    """One frame, of which `received` is here already, or None at the end. Raises TimeoutError past `until_s`,
    ValueError above `max_bytes`."""
    header = _receive(channel, _LENGTH.size, until_s, received[: _LENGTH.size])
    if header is None:
        return None
    (size,) = _LENGTH.unpack(header)
    if size > max_bytes:
        raise ValueError(f"a frame of {size} bytes is longer than {max_bytes}")
    rest = received[_LENGTH.size :]
    if len(rest) > size:
        raise ValueError(f"{len(rest) - size} bytes follow a frame")
    return _receive(channel, size, until_s, rest)


def _receive(channel: socket.socket, size: int, until_s: float | None, before: bytes | bytearray) -> bytes | None:
    received = bytearray(before)
    while len(received) < size:
        if until_s is not None:
            channel.settimeout(max(until_s - time.monotonic(), 1e-6))
        part = channel.recv(min(size - len(received), 1 << 20))
        if not part:
            return None
        received += part
    return bytes(received)
