"""What is said over a socket, either way: JSON, one object to a message, its kind in `type`. Owns the fields, their bounds
and their encoding; knows no stream and no connection.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from headrace.core.errors import InvalidInput
from headrace.gateway.dialects.envelope import usage_reply
from headrace.gateway.errors import ErrorObject, failure_of, type_of
from headrace.gateway.schemas.decode import decode
from headrace.gateway.schemas.replies import UsageReply
from headrace.streams.record import Failure, Record

# As the path of a request may hold it.
StreamId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:@+~-]{1,128}\Z")]
Label = Annotated[str, Meta(max_length=128)]
Number = Annotated[int, Meta(ge=0, le=2**53)]
# Frames beyond the last one acknowledged. None: as many as there are; 0: none for now.
WindowSize = Annotated[int, Meta(ge=0, le=1 << 20)] | None
HeaderName = Annotated[str, Meta(pattern=r"^(x-headrace-[a-z-]{1,48}|x-request-id)\Z")]
HeaderValue = Annotated[str, Meta(pattern=r"^[ -~]{0,256}\Z")]


class Start(Struct, frozen=True, tag_field="type", tag="start"):
    """Generate. `body` is that of the HTTP route; `headers` are those of it that begin with x-headrace-, and x-request-id."""

    id: Label
    api: Literal["chat", "completions"]
    body: Raw
    window: WindowSize = None
    headers: Annotated[dict[HeaderName, HeaderValue], Meta(max_length=16)] = {}


class Ack(Struct, frozen=True, tag_field="type", tag="ack"):
    """Frames up to and with `seq` are taken."""

    stream: StreamId
    seq: Number


class Resize(Struct, frozen=True, tag_field="type", tag="window"):
    stream: StreamId
    size: WindowSize


class Cancel(Struct, frozen=True, tag_field="type", tag="cancel"):
    stream: StreamId


class Resume(Struct, frozen=True, tag_field="type", tag="resume"):
    """Go on with a stream behind frame `after`, whatever connection read it before."""

    stream: StreamId
    after: Number = 0
    window: WindowSize = None


Message = Start | Ack | Resize | Cancel | Resume


class Started(Struct, frozen=True, tag_field="type", tag="started"):
    id: str
    stream: str
    model: str


class End(Struct, frozen=True, tag_field="type", tag="end"):
    """The last message of a stream. `status` is what HTTP would say of the error; no usage is known of a stream that goes
    on, for others, behind the end that this reader met."""

    stream: str
    seq: int
    usage: UsageReply | None
    error: ErrorObject | None
    stages_ms: dict[str, float]
    status: int | UnsetType = UNSET


class Refusal(Struct, frozen=True, tag_field="type", tag="error"):
    """What could not be started, resumed or understood, and what HTTP would say of it."""

    error: ErrorObject
    status: int
    id: str | UnsetType = UNSET
    stream: str | UnsetType = UNSET
    retry_after_ms: int | UnsetType = UNSET


class _About(Struct):
    """What a message that is not understood may be about."""

    id: Label | None = None
    stream: StreamId | None = None


def read(data: bytes) -> Message:
    """InvalidInput, with `param`, for what is none of the messages."""
    kind: type[Message] = Message  # type: ignore[assignment]
    try:
        return decode(data, kind)
    except InvalidInput as error:
        raise InvalidInput(error.message.replace("the body", "the message", 1), param=error.param) from None


def read_about(data: bytes) -> tuple[str | None, str | None]:
    """The id and the stream that a message names which `read` refused."""
    try:
        about = msgspec.json.decode(data, type=_About)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None, None
    return about.id, about.stream


def write_started(id: str, stream: str, model: str) -> bytes:
    return msgspec.json.encode(Started(id, stream, model))


def frame_head(stream: str) -> bytes:
    """What all frames of a stream begin with, up to the number."""
    return b'{"type":"frame","stream":%b,"seq":' % msgspec.json.encode(stream)


def write_frame(head: bytes, seq: int, chunk: bytes) -> bytes:
    """`chunk` is JSON already."""
    return b'%b%d,"chunk":%b}' % (head, seq, chunk)


def write_end(stream: str, record: Record, failure: Failure | None = None) -> bytes:
    """Of the ending, or of a reader that is broken off by `failure` behind this record."""
    ending = record.ending
    failure = failure or (ending.failure if ending is not None else None)
    stages = ending.stages if ending is not None else {}
    end = End(
        stream,
        record.number,
        None if ending is None else usage_reply(ending.usage),
        None if failure is None else _error_of(failure),
        {stage: round(seconds * 1e3, 3) for stage, seconds in stages.items()},
        UNSET if failure is None else failure.status,
    )
    return msgspec.json.encode(end)


def write_error(error: BaseException, *, id: str | None = None, stream: str | None = None) -> bytes:
    failure = failure_of(error)
    retry_after_s = failure.retry_after_s
    return msgspec.json.encode(
        Refusal(
            _error_of(failure),
            failure.status,
            UNSET if id is None else id,
            UNSET if stream is None else stream,
            UNSET if retry_after_s is None else max(1, round(retry_after_s * 1e3)),
        )
    )


def _error_of(failure: Failure) -> ErrorObject:
    return ErrorObject(failure.message, type_of(failure.status), failure.param, failure.code)
