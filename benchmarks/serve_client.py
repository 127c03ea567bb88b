"""A client that reads its stream to the end, whatever becomes of connections: what the benchmarks of faults share.

It does what docs/streams.md tells clients to do: it gives its request an id, and where a connection breaks it reads on
behind the last frame it saw; where it saw none, it asks whether there is such a stream, and sends its request if not.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from serve_rig import Server

PATIENCE_S = 90.0
AGAIN_S = 0.1
AGAIN_STATUSES = (429, 502, 503)


class Broken(Exception):
    """The connection ended before the stream did."""


@dataclass(slots=True)
class Reading:
    """One stream as its client hears it. `on_frame` is awaited after each frame; Broken cuts the connection there."""

    one: Server
    id: str
    path: str
    body: dict[str, Any]
    on_frame: Callable[["Reading"], Awaitable[None]] | None = None
    # Text, arguments of calls, scores and finish of each choice; in whatever pieces they came.
    said: dict[int, list[Any]] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    error: Any = None
    after: int = 0
    repeated: int = 0
    num_ends: int = 0
    num_connections: int = 0
    refusals: int = 0
    frames_s: list[float] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    # Why it gave up; empty where it did not have to.
    broken: str = ""

    @property
    def told(self) -> tuple[Any, ...]:
        return self.said, self.usage, self.error, self.broken

    def gap_s(self, since_s: float) -> float:
        """The longest silence that ended after that moment."""
        pairs = zip(self.frames_s, self.frames_s[1:], strict=False)
        return max((after_s - before_s for before_s, after_s in pairs if after_s >= since_s), default=0.0)

    async def run(self) -> "Reading":
        give_up_s = time.monotonic() + PATIENCE_S
        is_sent = False
        while not self.num_ends and not self.broken:
            try:
                if is_sent and await self._connected("GET", f"/v1/streams/{self.id}?after={self.after}"):
                    continue
                if self.after:
                    silent_s = time.perf_counter() - self.frames_s[-1] if self.frames_s else 0.0
                    self.broken = f"the stream is not known any more, {silent_s:.1f} s after its last words"
                elif not await self._connected("POST", self.path):
                    self.broken = "404"
                is_sent = True
            except (OSError, EOFError, Broken):
                is_sent = True
                if time.monotonic() > give_up_s:
                    self.broken = "gave up"
                await asyncio.sleep(AGAIN_S)
        self.begun.set()
        return self

    async def _connected(self, method: str, path: str) -> bool:
        """All that one connection says. False: 404."""
        url = urlsplit(self.one.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        try:
            asked = json.dumps(self.body).encode() if method == "POST" else b""
            head = (
                f"{method} {path} HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {self.one.key}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(asked)}\r\nx-request-id: {self.id}\r\n\r\n"
            )
            writer.write(head.encode() + asked)
            line = await reader.readline()
            if not line:
                raise Broken
            status = int(line.split()[1])
            while (line := await reader.readline()) not in (b"\r\n", b""):
                name, _, value = line.decode("latin-1").partition(":")
                if name.lower() == "x-request-id":
                    self.id = value.strip()
            if status == 404:
                return False
            if status in AGAIN_STATUSES:
                self.refusals += 1
                raise Broken
            if status != 200:
                self.broken = f"{status}: {(await reader.read(2000)).decode(errors='replace')}"
                return True
            self.num_connections += 1
            await self._read(reader)
            return True
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            if line.startswith(b"id: "):
                number = int(line[4:])
                self.repeated += number <= self.after
                self.after = number
            elif line.startswith(b"data: {"):
                self._hear(json.loads(line[6:]))
                if self.on_frame is not None:
                    await self.on_frame(self)
            elif line == b"data: [DONE]\n":
                self.num_ends += 1
            elif line == b"0\r\n":
                return
        raise Broken

    def _hear(self, chunk: dict[str, Any]) -> None:
        self.error = chunk.get("error", self.error)
        if chunk.get("usage"):
            self.usage = (chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"])
        for choice in chunk.get("choices", ()):
            said = self.said.setdefault(choice["index"], ["", "", [], None])
            delta = choice.get("delta") or {"content": choice.get("text")}
            said[0] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                said[1] += f"<{call['function'].get('name') or ''}>{call['function'].get('arguments') or ''}"
            scores = (choice.get("logprobs") or {}).get("content") or ()
            said[2] += [(each["token"], each["logprob"]) for each in scores]
            said[3] = choice.get("finish_reason") or said[3]
            self.ids.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
            if delta.get("content") or delta.get("tool_calls") or choice.get("token_ids"):
                self.frames_s.append(time.perf_counter())
                self.begun.set()


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0
