"""Records and births as bytes: msgpack of compact arrays. Owns the layout; knows nothing of where the bytes lie.

Written as tuples by position, because that is what is quick to make and small; read through structs of the same order,
so that nothing of a wrong shape becomes a record. Text may hold lone surrogates, which UTF-8 has no bytes for: such a
string travels as bytes, in an array of one, which tells it from a string.
"""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from headrace.streams.journal import Birth, Entry, Name
from headrace.streams.record import Alternative, CallDelta, Ending, Failure, Part, Record, Score, Usage

# A string, or the bytes of one that UTF-8 cannot hold.
_Text = str | tuple[bytes]


class _Alternative(Struct, array_like=True, frozen=True):
    id: int
    data: bytes
    logprob: float


class _Score(Struct, array_like=True, frozen=True):
    id: int
    data: bytes
    logprob: float | None
    top: tuple[_Alternative, ...]


class _Call(Struct, array_like=True, frozen=True):
    index: int
    id: _Text
    name: _Text
    arguments: _Text
    broken_text: _Text
    place: int = 0


class _Part(Struct, array_like=True, frozen=True):
    choice: int
    ids: tuple[int, ...]
    text: _Text
    index: int
    offset: int
    finish: _Text | None = None
    scores: tuple[_Score, ...] = ()
    calls: tuple[_Call, ...] = ()
    is_prompt: bool = False
    cached: int = 0


class _Usage(Struct, array_like=True, frozen=True):
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class _Failure(Struct, array_like=True, frozen=True):
    code: _Text
    message: _Text
    status: int
    param: _Text | None
    retry_after_s: float | None


class _Ending(Struct, array_like=True, frozen=True):
    usage: _Usage
    failure: _Failure | None
    stages: dict[str, float]


class _Record(Struct, array_like=True, frozen=True):
    number: int
    step: int
    age_s: float
    parts: tuple[_Part, ...]
    usage: _Usage | None = None
    ending: _Ending | None = None
    merged: int = 0


class _Birth(Struct, array_like=True, frozen=True):
    stream: _Text
    tenant: _Text
    model: _Text
    fingerprint: _Text
    created_s: float
    order: bytes
    dialect: bytes
    grace_s: float | None = None


class _Closed(Struct, array_like=True, frozen=True, gc=False):
    """An entry of which only the name is looked at: there are very many, and few are wanted."""

    tenant: _Text
    stream: _Text
    record: Raw
    birth: Raw = Raw()


class _ClosedAppend(Struct, array_like=True, frozen=True):
    at_s: float
    entries: list[_Closed]


class _Outline(Struct, array_like=True, frozen=True, gc=False):
    number: int
    step: Raw
    age_s: Raw
    parts: Raw
    usage: Raw = Raw()
    ending: Raw = Raw()


class Glance(Struct, array_like=True, frozen=True, gc=False):
    """What must be known of an entry to know where its stream lies, and whether it is over."""

    tenant: _Text
    stream: _Text
    record: _Outline
    birth: Raw = Raw()

    @property
    def name(self) -> Name:
        return _text(self.tenant), _text(self.stream)

    @property
    def number(self) -> int:
        return self.record.number

    @property
    def is_birth(self) -> bool:
        return _is_there(self.birth)

    @property
    def is_end(self) -> bool:
        return _is_there(self.record.ending)


class _GlancedAppend(Struct, array_like=True, frozen=True):
    at_s: float
    entries: list[Glance]


_NIL = b"\xc0"
_ENCODER = msgspec.msgpack.Encoder()
_CLOSED_APPENDS = msgspec.msgpack.Decoder(_ClosedAppend)
_GLANCED_APPENDS = msgspec.msgpack.Decoder(_GlancedAppend)
_RECORDS = msgspec.msgpack.Decoder(_Record)
_BIRTHS = msgspec.msgpack.Decoder(_Birth)


def encode_append(entries: Sequence[Entry], at_s: float) -> bytes:
    """The entries of one append, with the wall clock's time."""
    return _encode((at_s, [_entry_tuple(entry) for entry in entries]))


def decode_entries_of(data: bytes, names: Collection[Name]) -> tuple[float, list[Entry]] | None:
    """The time and the entries of these streams; of others nothing but the name is read. None: these bytes are not an
    append of this version."""
    try:
        found = _CLOSED_APPENDS.decode(data)
        entries = []
        for closed in found.entries:
            name = (_text(closed.tenant), _text(closed.stream))
            if name in names:
                birth = _birth(_BIRTHS.decode(closed.birth)) if _is_there(closed.birth) else None
                entries.append(Entry(*name, _record(_RECORDS.decode(closed.record)), birth))
        return found.at_s, entries
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def glance_append(data: bytes) -> tuple[float, list[Glance]] | None:
    """The time, and all entries without what was said. None: these bytes are not an append of this version."""
    try:
        found = _GLANCED_APPENDS.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found.at_s, found.entries


def encode_record(record: Record) -> bytes:
    return _encode(_record_tuple(record))


def decode_record(data: bytes) -> Record | None:
    """None: these bytes are not a record of this version."""
    try:
        return _record(_RECORDS.decode(data))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def encode_birth(birth: Birth) -> bytes:
    return _encode(_birth_tuple(birth))


def decode_birth(data: bytes) -> Birth | None:
    """None: these bytes are not a birth of this version."""
    try:
        return _birth(_BIRTHS.decode(data))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _encode(value: object) -> bytes:
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        return _ENCODER.encode(_without_surrogates(value))


def _without_surrogates(value: Any) -> Any:
    match value:
        case str():
            return value if _is_utf8(value) else (value.encode("utf-8", "surrogatepass"),)
        case tuple() | list():
            return [_without_surrogates(item) for item in value]
        case _:
            return value


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _entry_tuple(entry: Entry) -> tuple[object, ...]:
    record = _record_tuple(entry.record)
    if entry.birth is None:
        return (entry.tenant, entry.stream, record)
    return (entry.tenant, entry.stream, record, _birth_tuple(entry.birth))


def _birth_tuple(birth: Birth) -> tuple[object, ...]:
    return (
        birth.stream,
        birth.tenant,
        birth.model,
        birth.fingerprint,
        birth.created_s,
        birth.order,
        birth.dialect,
        birth.grace_s,
    )


def _record_tuple(record: Record) -> tuple[object, ...]:
    parts = [_part_tuple(part) for part in record.parts]
    if record.usage is None and record.ending is None and not record.merged:
        return (record.number, record.step, record.age_s, parts)
    return (
        record.number,
        record.step,
        record.age_s,
        parts,
        None if record.usage is None else _usage_tuple(record.usage),
        None if record.ending is None else _ending_tuple(record.ending),
        record.merged,
    )


def _part_tuple(part: Part) -> tuple[object, ...]:
    plain = (part.choice, part.ids, part.text, part.index, part.offset)
    if part.finish is None and not (part.scores or part.calls or part.is_prompt or part.cached):
        return plain
    scores = [
        (score.id, score.data, score.logprob, [(top.id, top.data, top.logprob) for top in score.top])
        for score in part.scores
    ]
    calls = [(call.index, call.id, call.name, call.arguments, call.broken_text, call.place) for call in part.calls]
    return (*plain, part.finish, scores, calls, part.is_prompt, part.cached)


def _usage_tuple(usage: Usage) -> tuple[int, ...]:
    return (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def _ending_tuple(ending: Ending) -> tuple[object, ...]:
    failure = ending.failure
    if failure is None:
        return (_usage_tuple(ending.usage), None, ending.stages)
    told = (failure.code, failure.message, failure.status, failure.param, failure.retry_after_s)
    return (_usage_tuple(ending.usage), told, ending.stages)


def _birth(birth: _Birth) -> Birth:
    return Birth(
        _text(birth.stream),
        _text(birth.tenant),
        _text(birth.model),
        _text(birth.fingerprint),
        birth.created_s,
        birth.order,
        birth.dialect,
        birth.grace_s,
    )


def _record(record: _Record) -> Record:
    return Record(
        record.number,
        tuple(map(_part, record.parts)),
        None if record.ending is None else _ending(record.ending),
        merged=record.merged,
        usage=None if record.usage is None else _usage(record.usage),
        step=record.step,
        age_s=record.age_s,
    )


def _part(part: _Part) -> Part:
    return Part(
        part.choice,
        part.ids,
        _text(part.text),
        tuple(map(_score, part.scores)),
        tuple(map(_call, part.calls)),
        None if part.finish is None else _text(part.finish),
        part.index,
        part.offset,
        part.is_prompt,
        part.cached,
    )


def _score(score: _Score) -> Score:
    top = tuple(Alternative(one.id, one.data, one.logprob) for one in score.top)
    return Score(score.id, score.data, score.logprob, top)


def _call(call: _Call) -> CallDelta:
    texts = (_text(call.id), _text(call.name), _text(call.arguments), _text(call.broken_text))
    return CallDelta(call.index, *texts, call.place)


def _usage(usage: _Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def _ending(ending: _Ending) -> Ending:
    failure = ending.failure
    if failure is None:
        return Ending(_usage(ending.usage), None, ending.stages)
    return Ending(
        _usage(ending.usage),
        Failure(
            _text(failure.code),
            _text(failure.message),
            failure.status,
            None if failure.param is None else _text(failure.param),
            failure.retry_after_s,
        ),
        ending.stages,
    )


def _is_there(raw: Raw) -> bool:
    return len(raw) > 0 and bytes(raw) != _NIL


def _text(text: _Text) -> str:
    return text if isinstance(text, str) else text[0].decode("utf-8", "surrogatepass")
