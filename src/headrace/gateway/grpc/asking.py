"""What clients say in a call, read strictly: the bounds are those of the socket's messages. Pure."""

from typing import Any

import msgspec
from google.protobuf.message import DecodeError

from headrace.core.closed_set import possible
from headrace.core.errors import InvalidInput
from headrace.gateway.grpc import headrace_pb2 as pb
from headrace.gateway.schemas.decode import plain
from headrace.gateway.websocket.messages import Number, Resume, Start, WindowSize

Said = pb.PredictRequest | pb.ResumeRequest


def read(data: bytes, kind: type[Said]) -> Said:
    """InvalidInput for what is none of the messages."""
    try:
        said: Said = kind.FromString(data)
    except DecodeError:
        raise InvalidInput(f"This is no {kind.DESCRIPTOR.full_name}.") from None
    return said


def read_first(said: Said) -> Start | Resume:
    """What a call begins with."""
    if isinstance(said, pb.PredictRequest):
        return _start(said)
    if said.WhichOneof("message") != "resume":
        raise InvalidInput("The first message of ResumePredict is resume.", param="resume")
    resume = said.resume
    fields: dict[str, Any] = {"type": "resume", "stream": resume.stream, "after": resume.after}
    if resume.HasField("window"):
        fields["window"] = resume.window
    found: Resume = _checked(fields, Resume)
    return found


def _start(said: pb.PredictRequest) -> Start:
    if said.WhichOneof("message") != "start":
        raise InvalidInput("The first message of Predict is start.", param="start")
    start = said.start
    fields: dict[str, Any] = {"type": "start", "id": "", "api": start.api, "headers": dict(start.headers)}
    fields["body"] = msgspec.Raw(start.body)
    if start.HasField("window"):
        fields["window"] = start.window
    found: Start = _checked(fields, Start)
    return found


def read_ack(said: Said) -> int:
    seq: int = _checked(said.ack.seq, Number, "seq")
    return seq


def read_size(said: Said) -> int | None:
    """None: no limit."""
    size: int | None = _checked(said.window.size, WindowSize, "size") if said.window.HasField("size") else None
    return size


def _checked(value: object, kind: Any, param: str | None = None) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at ")
        param = param or place.rpartition("$.")[2].strip("`").removesuffix("[...]") or None
        raise InvalidInput(
            f"{param or 'the message'}: {plain(what, possible(str(error), kind))}", param=param
        ) from None
