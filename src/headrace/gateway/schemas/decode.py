"""A body's bytes as a typed record, or the field that is wrong with it. Owns how complaints are worded.

Decoding is strict: "1" and true are no numbers. Fields that a type does not name are ignored.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec

from headrace.core.closed_set import possible
from headrace.core.errors import InvalidInput
from headrace.gateway.schemas.bounds import check_values

T = TypeVar("T")

_PLACE = re.compile(r"(?P<what>.*) - at (?:`key` in )?`(?P<path>[^`]*)`\Z", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_VALUE = re.compile(r"Invalid (?:enum )?value '", re.DOTALL)
# Where it is, and nothing of what is there.
_BYTE = re.compile(r"\(byte (\d+)\)")
_MAX_PARAM = 200
# As long as half of a pair of escapes: where less follows the first half, the decoder takes it for the end.
_HALF_PAIR = b" " * len(r"\udc00")


def decode(data: bytes, kind: type[T]) -> T:
    """InvalidInput, with `param` a path like `messages[2].content`, for what is no JSON or not of this kind."""
    if not data.strip():
        raise InvalidInput("the body is empty: send JSON")
    check_values(data)
    wanted: Any = kind
    try:
        decoded: T = _decoder(wanted).decode(data)
    except msgspec.ValidationError as error:
        raise _complaint(str(error), kind) from None
    except RecursionError:
        raise InvalidInput("the body nests too deeply") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidInput(f"the body is not valid JSON in UTF-8{_where(str(error), data, kind)}") from None
    return decoded


def _where(text: str, data: bytes, kind: Any) -> str:
    is_cut = "truncated" in text
    if place := _BYTE.search(_of_half_pair(data, kind) if is_cut else text):
        return f": see its byte {place[1]}"
    return ": it ends too early" if is_cut else ""


def _of_half_pair(data: bytes, kind: Any) -> str:
    """What is wrong with a body that seems to end too early, where it is half a pair of escapes near its end."""
    try:
        _decoder(kind).decode(data + _HALF_PAIR)
    except (msgspec.DecodeError, RecursionError) as error:
        place = _BYTE.search(str(error))
        if "surrogate" in str(error) and place is not None and int(place[1]) < len(data):
            return str(error)
    return ""


@cache
def _decoder(kind: Any) -> Any:
    return msgspec.json.Decoder(kind)


def _complaint(text: str, kind: Any) -> InvalidInput:
    found = _PLACE.match(text)
    what, path = (found["what"], found["path"]) if found else (text, "$")
    param = path.removeprefix("$").removeprefix(".").replace("[...]", "")
    if missing := _MISSING.search(what):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return InvalidInput(f"{param} is required", param=param[:_MAX_PARAM])
    if not param:
        return InvalidInput(f"the body must be a JSON object: {plain(what, [])}")
    return InvalidInput(f"{param}: {plain(what, possible(text, kind))}", param=param[:_MAX_PARAM])


def plain(what: str, values: Sequence[str]) -> str:
    """Types, bounds and the values that are possible are ours to tell; a value that is not is the client's and is not
    repeated."""
    if _VALUE.match(what):
        return f"must be one of {', '.join(values)}" if values else "not one of the values that are possible here"
    return what.replace("`", "").replace("Expected", "expected", 1)[:_MAX_PARAM]
