"""A dialect as bytes, for a journal: whoever takes a stream over words it as the gateway before did. Owns the form."""

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from headrace.core.errors import InvalidInput
from headrace.gateway.dialects.chat import ChatDialect
from headrace.gateway.dialects.completion import CompletionDialect
from headrace.gateway.dialects.envelope import Heading, Wants
from headrace.streams.record import Dialect

AnyDialect = ChatDialect | CompletionDialect

_KINDS: Mapping[str, type[ChatDialect] | type[CompletionDialect]] = {
    "chat": ChatDialect,
    "completion": CompletionDialect,
}


class JournalDialects:
    """Meets `serving.service.Dialects`."""

    def encode(self, dialect: Dialect) -> bytes:
        assert isinstance(dialect, ChatDialect | CompletionDialect), "a stream of ours is worded by one of our dialects"
        return encode_dialect(dialect)

    def decode(self, data: bytes) -> AnyDialect:
        return decode_dialect(data)


class _Spec(Struct, frozen=True, array_like=True):
    kind: str
    heading: Heading
    wants: Wants
    num_choices: int


def encode_dialect(dialect: AnyDialect) -> bytes:
    kind = next(name for name, made in _KINDS.items() if type(dialect) is made)
    return msgspec.msgpack.encode(_Spec(kind, dialect.heading, dialect.wants, dialect.num_choices))


def decode_dialect(data: bytes) -> AnyDialect:
    """InvalidInput for what is no dialect of this version."""
    try:
        spec = msgspec.msgpack.decode(data, type=_Spec)
        return _KINDS[spec.kind](spec.heading, spec.wants, spec.num_choices)
    except (msgspec.MsgspecError, KeyError) as error:
        raise InvalidInput(f"the journal words a stream in a way that is not known here: {error}") from error
