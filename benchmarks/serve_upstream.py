"""A bare upstream that speaks the OpenAI dialect and does no work: what a gateway or a load tool is measured against.

Whole replies at once, streams at a given pace, no parsing beyond `stream` and `max_tokens`.
Run: .venv/bin/python benchmarks/serve_upstream.py --port 8099 --gap-ms 20
"""

import argparse
import asyncio
import contextlib

import httptools
import msgspec
import uvloop
from setproctitle import setproctitle

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n"
_PIECE = b'data: {"id":"x","object":"chat.completion.chunk","created":0,"model":"m","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":%s}]}\n\n'
_USAGE = b'data: {"id":"x","object":"chat.completion.chunk","created":0,"model":"m","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d,"total_tokens":1}}\n\ndata: [DONE]\n\n'
_WHOLE = b'{"id":"x","object":"chat.completion","created":0,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"word"},"finish_reason":"length"}],"usage":{"prompt_tokens":1,"completion_tokens":%d,"total_tokens":1}}'
_MODELS = b'{"object":"list","data":[{"id":"m","object":"model","created":0,"owned_by":"bench"}]}'


class Body(msgspec.Struct):
    stream: bool = False
    max_tokens: int = 16


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Upstream(asyncio.Protocol):
    """One connection. `streams` holds what every open stream still owes."""

    def __init__(self, streams: dict["Upstream", int], gap_s: float) -> None:
        self._streams = streams
        self._gap_s = gap_s
        self._total = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def connection_lost(self, error: Exception | None) -> None:
        self._streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url, self._body = url, b""

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        if not self._url.endswith(b"/completions"):
            self._reply(_MODELS)
            return
        asked = msgspec.json.decode(self._body, type=Body)
        if not asked.stream:
            self._reply(_WHOLE % asked.max_tokens)
            return
        self._total = asked.max_tokens
        self._transport.write(_HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n")
        self._streams[self] = asked.max_tokens
        if not self._gap_s:
            while self in self._streams:
                self.step()

    def step(self) -> None:
        left = self._streams[self] - 1
        data = chunk(_PIECE % (b"null" if left else b'"length"'))
        if left:
            self._streams[self] = left
        else:
            del self._streams[self]
            data += chunk(_USAGE % self._total) + b"0\r\n\r\n"
        self._transport.write(data)

    def _reply(self, body: bytes) -> None:
        self._transport.write(_HEAD % b"application/json" + b"content-length: %d\r\n\r\n" % len(body) + body)


async def main(port: int, gap_s: float) -> None:
    streams: dict[Upstream, int] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Upstream(streams, gap_s), "127.0.0.1", port, backlog=4096)
    print(f"listening on http://127.0.0.1:{port}", flush=True)
    async with server:
        while True:
            await asyncio.sleep(gap_s or 3600)
            for stream in list(streams):
                stream.step()


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--port", type=int, default=8099)
    flags.add_argument("--gap-ms", type=float, default=0.0, help="between pieces of a stream; 0: all at once")
    given = flags.parse_args()
    # Results name the processes that they measured, and not where these lie.
    setproctitle("bare upstream")
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(main(given.port, given.gap_ms / 1e3))
