"""What is around the choices of every chunk of a stream. Owns the constant bytes, usage, metadata and the ending.

The bytes of a stream that do not change are made once; a chunk joins them with what its record says. `headrace`, which
tells more of a chunk and in the last one the stages, is there where the client asked for it by the header, and only
there, with usage or without: a client that knows OpenAI's chunks sees nothing else.
"""

from functools import cached_property
from typing import ClassVar, Self

import msgspec
from msgspec import UNSET, Struct
from msgspec.structs import replace

from headrace.gateway.errors import error_frame
from headrace.gateway.schemas.replies import ChunkMetadata, CompletionDetails, PromptDetails, UsageReply
from headrace.streams.record import Ending, Record, Usage

DONE = b"data: [DONE]\n\n"
_DATA = b"\ndata: "
# Clients that cut text into lines by Unicode's rules would cut an event at these. Each is one UTF-8 sequence, so
# that replacing bytes cannot touch a part of another character.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))

_encoder = msgspec.json.Encoder()


class Heading(Struct, frozen=True):
    """What every chunk of a stream, and its whole body, says of the request."""

    id: str
    request_id: str
    created: int
    model: str
    fingerprint: str = ""
    service_tier: str | None = None


class Wants(Struct, frozen=True):
    """What the client wants told besides text. `running_usage`: in every chunk. `opening`: text that stands before
    each reply. `legacy_calls`: calls in the form that was before tools."""

    usage: bool = False
    running_usage: bool = False
    metadata: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    echo: bool = False
    legacy_calls: bool = False
    opening: str = ""

    @property
    def is_plain(self) -> bool:
        """A chunk of text says nothing but the text."""
        return not (self.running_usage or self.metadata or self.logprobs or self.prompt_logprobs or self.token_ids)


class Envelope:
    """`before` and `after` stand around a text in a choice that says nothing else, behind its index."""

    def __init__(self, heading: Heading, kind: str, wants: Wants, before: bytes, after: bytes) -> None:
        self._heading = heading
        self._wants = wants
        self._before = before
        # Behind `id: N` up to the choices.
        self._head = _head_of(heading, kind)
        # What is before the index of a choice that is nothing but a text, and what is behind the text.
        tail = b'],"usage":null}\n\n' if wants.usage or wants.running_usage else b"]}\n\n"
        self._text_ends = (self._head + b'{"index":', after + tail)

    def text(self, number: int, choice: int, text: str) -> bytes:
        """The chunk of a record that is a text of one choice and nothing else; nothing where that is empty."""
        if not text:
            return b""
        data = _encoder.encode(text)
        if not text.isascii():  # a text knows whether it is, where bytes must be looked through
            data = _on_one_line(data)
        head, tail = self._text_ends
        return b"id: %d%b%d%b%b%b" % (number, head, choice, self._before, data, tail)

    def chunk(self, record: Record, choices: bytes, extra: bytes = b"") -> bytes:
        """`extra` is further fields of the chunk, each with its comma before it."""
        wants = self._wants
        if wants.running_usage and record.usage is not None:
            extra += b',"usage":' + _encoder.encode(usage_reply(record.usage))
        elif wants.usage or wants.running_usage:
            extra += b',"usage":null'
        if wants.metadata:
            extra += b',"headrace":' + _encoder.encode(self._metadata(record, None))
        return b"id: %d%b%b]%b}\n\n" % (record.number, self._head, choices, extra)

    def ending(self, record: Record, ending: Ending) -> bytes:
        """The last frame: an error or what was used, then `[DONE]`."""
        if ending.failure is not None:
            return b"id: %d\n%b%b" % (record.number, error_frame(ending.failure), DONE)
        wants = self._wants
        if not (wants.usage or wants.running_usage or wants.metadata):
            return b"id: %d\n%b" % (record.number, DONE)
        extra = b""
        if wants.usage or wants.running_usage:
            extra = b',"usage":' + _encoder.encode(usage_reply(ending.usage))
        if wants.metadata:
            extra += b',"headrace":' + _encoder.encode(self._metadata(record, ending))
        return b"id: %d%b]%b}\n\n%b" % (record.number, self._head, extra, DONE)

    def _metadata(self, record: Record, ending: Ending | None) -> ChunkMetadata:
        return ChunkMetadata(
            request_id=self._heading.request_id,
            chunk_seq=record.number,
            token_index=record.parts[0].index if record.parts else 0,
            is_final=ending is not None,
            batch_id=record.step,
            latency_ms=round(record.age_s * 1e3, 3),
            stages_ms=UNSET
            if ending is None
            else {stage: round(seconds * 1e3, 3) for stage, seconds in ending.stages.items()},
        )


class Enveloped(Struct, frozen=True, dict=True):
    """What both of OpenAI's dialects are made of. `num_choices` of all prompts together; `kind` is what a chunk calls itself,
    `around` what stands around a text in a choice that says nothing else."""

    heading: Heading
    wants: Wants
    num_choices: int

    kind: ClassVar[str]
    around: ClassVar[tuple[bytes, bytes]]

    @cached_property
    def is_plain(self) -> bool:
        return self.wants.is_plain

    @cached_property
    def envelope(self) -> Envelope:
        """Made with the first frame: what is answered whole has none, nor has a dialect before it is bound."""
        return Envelope(self.heading, self.kind, self.wants, *self.around)

    def bound(self, created_s: float, fingerprint: str) -> Self:
        return replace(self, heading=replace(self.heading, created=int(created_s), fingerprint=fingerprint))


def _head_of(heading: Heading, kind: str) -> bytes:
    fields: dict[str, object] = {
        "id": heading.id,
        "object": kind,
        "created": heading.created,
        "model": heading.model,
        "system_fingerprint": heading.fingerprint or None,
    }
    if heading.service_tier is not None:
        fields["service_tier"] = heading.service_tier
    return b"\ndata: " + encode_json(fields)[:-1] + b',"choices":['


def chunk_of(event: bytes) -> bytes:
    """The JSON of a frame that is one event, for faces that have another place for its number."""
    return event[event.index(_DATA) + len(_DATA) : -2]


def encode_json(value: object) -> bytes:
    """On one line, whoever counts lines."""
    data = _encoder.encode(value)
    return data if data.isascii() else _on_one_line(data)


def _on_one_line(data: bytes) -> bytes:
    for found, escaped in _LINE_ENDS:
        data = data.replace(found, escaped)
    return data


def usage_reply(usage: Usage) -> UsageReply:
    return UsageReply(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        PromptDetails(
            cached_tokens=usage.cached_tokens,
            cache_write_tokens=usage.prompt_tokens - usage.cached_tokens,
            text_tokens=usage.prompt_tokens,
        ),
        CompletionDetails(text_tokens=usage.completion_tokens),
    )
