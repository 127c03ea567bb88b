"""Request traces: one JSON object a line, in order of arrival.

Owns the shape of a row, its reading and writing, and which files are read and written at all. A row says what a client does, never what became of
it. The generated load of a scenario takes the same shape, so that it can be saved and replayed.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import msgspec
from msgspec import Meta, Struct

from headrace.core.closed_set import complete
from headrace.core.errors import InvalidInput

Tokens = Annotated[int, Meta(ge=1, le=10_000_000)]
Seconds = Annotated[float, Meta(gt=0, le=1e6)]
Name = Annotated[str, Meta(min_length=1, max_length=100)]
TierName = Literal["batch", "free", "plus", "enterprise"]
AdmissionName = Literal["elastic", "guaranteed"]
EndName = Literal["length", "stop"]


class TraceRow(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request. `ends` is `length` when the client asked for exactly `output_tokens`, and `stop`
    when the model stops there by itself, which no scheduler can foresee; `max_tokens` may then be more."""

    arrival_s: Annotated[float, Meta(ge=0, le=1e9)]
    prompt_tokens: Tokens
    output_tokens: Tokens
    tenant: Name = "default"
    tier: TierName | None = None
    admission: AdmissionName = "elastic"
    ends: EndName = "length"
    max_tokens: Tokens | None = None
    prefix_group: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    prefix_tokens: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    cancel_after_s: Seconds | None = None
    cancel_after_tokens: Tokens | None = None
    reader_tokens_per_s: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    ttft_target_s: Seconds | None = None
    itl_target_s: Seconds | None = None
    queue_timeout_s: Seconds | None = None
    deadline_s: Seconds | None = None


_DECODER = msgspec.json.Decoder(TraceRow)
_ENCODER = msgspec.json.Encoder()
MAX_LINE = 10_000
# A slower one would be waited for longer than there is time.
SLOWEST_READER = 1e-6


def read_trace(path: str | os.PathLike[str]) -> Iterator[TraceRow]:
    """Rows one by one. Raises InvalidInput that names file, line and field."""
    name = Path(path).name
    try:
        with open_source(path) as lines:
            yield from _decode_lines(name, lines)
    except OSError as error:
        raise InvalidInput(f"trace {path}: {error.strerror or error}", param="trace") from None


def _decode_lines(name: str, lines: BinaryIO) -> Iterator[TraceRow]:
    last_s = 0.0
    # No line is read further than it may be long.
    for line_number, line in enumerate(iter(lambda: lines.readline(MAX_LINE + 1), b""), 1):
        where = f"trace {name} line {line_number}"
        if len(line) > MAX_LINE:
            raise InvalidInput(f"{where}: longer than {MAX_LINE} bytes", param=where)
        if not line.strip():
            continue
        row = _decode_line(line, where)
        if row.arrival_s < last_s:
            raise InvalidInput(f"{where}: arrival_s goes back from {last_s:g} to {row.arrival_s:g}", param="arrival_s")
        last_s = row.arrival_s
        yield row


def _decode_line(line: bytes, where: str) -> TraceRow:
    try:
        row = _DECODER.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{where}: {complete(error, TraceRow)}", param=where) from None
    if not is_pace(row.reader_tokens_per_s):
        param = "reader_tokens_per_s"
        raise InvalidInput(f"{where}: {param} must be 0 or at least {SLOWEST_READER:g}", param=param)
    return row


def is_pace(tokens_per_s: float | None) -> bool:
    """Whether a reader reads nothing, or fast enough that the wait for it is a number."""
    return not tokens_per_s or tokens_per_s >= SLOWEST_READER


def write_trace(path: str | os.PathLike[str], rows: Iterable[TraceRow]) -> int:
    """Returns the number of rows written."""
    count = 0
    try:
        check_target(path)
        with Path(path).open("wb") as lines:
            for row in rows:
                lines.write(_ENCODER.encode(row) + b"\n")
                count += 1
    except OSError as error:
        raise InvalidInput(f"trace {path}: {error.strerror or error}", param="trace") from None
    return count


def open_source(path: str | os.PathLike[str]) -> BinaryIO:
    """Open for reading. Raises OSError for whatever is no regular file: a device or a pipe may never end."""
    if "\0" in os.fspath(path):
        raise OSError(errno.EINVAL, "a name cannot hold a zero byte")
    # Without blocking: to open a pipe that nobody writes to would wait for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def check_target(path: str | os.PathLike[str]) -> None:
    """Raises OSError for what could not be written as a regular file; touches nothing."""
    where = Path(path)
    try:
        _check_regular(where.stat().st_mode)
    except FileNotFoundError:
        if not where.parent.is_dir():
            raise
        where = where.parent
    if not os.access(where, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def _check_regular(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file")
