"""A request's body: read whole within its bound, and checked for what it claims to be.

The deadline is the connection's (`gateway.protocol`): a body that is too slow ends as a client that went away.
"""

from collections.abc import Mapping

from headrace.core.errors import TooLarge
from headrace.gateway.errors import UnsupportedMedia
from headrace.gateway.peer import ClientGone, Receive


async def read_body(receive: Receive, headers: Mapping[str, str], max_bytes: int) -> bytes:
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        body: bytes = message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        return body
    parts: list[bytes] = []
    size_bytes = 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size_bytes += len(part)
        if size_bytes > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)
        message = await receive()


def check_media(headers: Mapping[str, str]) -> None:
    """JSON in UTF-8, as it is: 415 for anything else."""
    coding = headers.get("content-encoding")
    if coding is not None and coding.strip().lower() not in ("", "identity"):
        raise UnsupportedMedia("Compressed bodies are not read here: send it without Content-Encoding.")
    kind = headers.get("content-type", "")
    if kind == "application/json":
        return
    media, *parameters = (part.strip().lower() for part in kind.split(";"))
    if media != "application/json":
        raise UnsupportedMedia("The body must be JSON: send Content-Type: application/json.")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip().strip('"') not in ("utf-8", "utf8"):
            raise UnsupportedMedia("The body must be in UTF-8.")


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"The body may have {max_bytes} bytes at most.")
