"""One request of a connection and its answer, as bytes. Owns how an answer's head and body are written.

uvicorn's own takes headers from any application, and looks through each of them. Ours have lower-case names, and are
looked through together: what a client could have put into one cannot end its line.
"""

from collections.abc import MutableMapping
from itertools import chain
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

_LINE = b"%b: %b\r\n"
_LINE_END = b"\r\n"
# All but control characters; a tab may be in a value.
_PLAIN = bytes({9, *range(32, 127), *range(128, 256)})
_WITHOUT_BODY = (204, 304)


class Cycle(RequestResponseCycle):
    """`send` takes what ASGI has for an answer: its start, then its body in one piece or several."""

    _ends_with_connection = False

    async def send(self, message: MutableMapping[str, Any]) -> None:  # type: ignore[override]
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if not self.response_started:
            assert message["type"] == "http.response.start", f"an answer begins with {message['type']}"
            self.response_started = True
            self.waiting_for_100_continue = False
            self.transport.write(self._head(message["status"], message["headers"]))
            return
        assert not self.response_complete, f"{message['type']} behind the end of an answer"
        body, has_more = message["body"], message["more_body"]
        if self.scope["method"] == "HEAD":
            pass
        elif self._ends_with_connection:
            if body:
                self.transport.write_soon(body)  # type: ignore[attr-defined]
        elif not self.chunked_encoding:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0 or (self.expected_content_length and not has_more):
                raise RuntimeError("a body is not as long as its head said")
            self.transport.write(body)
        elif has_more:
            if body:
                self.transport.write_soon(b"%x\r\n%b\r\n" % (len(body), body))  # type: ignore[attr-defined]
        else:
            self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n")
        if not has_more:
            self._complete()

    def _head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        found = dict(headers)
        length = found.get(b"content-length")
        if length is not None:
            self.expected_content_length = int(length)
        elif self.scope["http_version"] == "1.0":
            # It knows no chunks; its connection is never kept.
            self._ends_with_connection = True
        elif self.scope["method"] != "HEAD" and status not in _WITHOUT_BODY:
            self.chunked_encoding = True
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        if found.get(b"connection") == b"close":
            self.keep_alive = False
        elif not self.keep_alive:
            headers = [*headers, (b"connection", b"close")]
        lines = (*self.default_headers, *headers)
        head = STATUS_LINE[status] + (_LINE * len(lines)) % tuple(chain.from_iterable(lines)) + _LINE_END
        if head.translate(None, _PLAIN) != _LINE_END * (len(lines) + 2):
            raise RuntimeError("a header of an answer holds a control character")
        return head

    def _complete(self) -> None:
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
