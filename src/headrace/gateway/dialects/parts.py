"""JSON of what is large, made in parts, so that a thread which makes it lets the loop in between. Pure.

The encoder itself keeps the interpreter until it is done, which for megabytes is longer than a stream may wait.
"""

import msgspec
from msgspec import UNSET, Struct

# Of a list: tokens with twenty alternatives each are encoded in a millisecond.
_PART = 128
# A reply has choices, a choice has log-probabilities, and these have the lists.
_DEPTH = 4


def encode_in_parts(value: object, depth: int = _DEPTH) -> bytes:
    """What `msgspec.json.encode` gives."""
    if depth and isinstance(value, Struct):
        found = [(field.encode_name, getattr(value, field.name)) for field in msgspec.structs.fields(value)]
        return b"{%b}" % b",".join(
            [
                b'"%b":%b' % (name.encode(), encode_in_parts(inner, depth - 1))
                for name, inner in found
                if inner is not UNSET
            ]
        )
    if isinstance(value, list):
        if depth and len(value) <= _PART:
            return b"[%b]" % b",".join([encode_in_parts(inner, depth - 1) for inner in value])
        starts = range(0, len(value), _PART)
        return b"[%b]" % b",".join([msgspec.json.encode(value[start : start + _PART])[1:-1] for start in starts])
    return msgspec.json.encode(value)
