"""A small HTTP server in the test's own loop: says the fake's truth, or whatever a test makes it do."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from headrace.cli.load.drive import Driver, RunRecord
from headrace.cli.load.http import Endpoint, Pool
from headrace.cli.load.plan import LoadPlan, TenantLoad
from headrace.cli.load.wording import Asked, Wording
from headrace.runner.truth import truth
from headrace.sim.arrivals import Arrivals
from headrace.sim.lengths import Fixed

VOCAB_SIZE, EOS = 512, 257


class Ask:
    """One request, and how to answer it."""

    def __init__(self, path: str, headers: dict[str, str], body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.path = path
        self.headers = headers
        self.body = body
        self.writer = writer

    def whole(self, body: object, status: int = 200) -> None:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        self.writer.write(head.encode() + data)

    def begin_stream(self) -> None:
        self.writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            b"x-request-id: r-1\r\n\r\n"
        )

    def chunk(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def event(self, body: object) -> None:
        self.chunk(b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n")

    def piece(self, text: str = "a", finish: str | None = None, ids: list[int] | None = None) -> None:
        choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
        if ids is not None:
            choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": finish}
        self.event({"choices": [choice]})

    def end_stream(self, tokens: int) -> None:
        self.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}})
        self.event(b"[DONE]")
        self.chunk(b"")


Script = Callable[[Ask], Awaitable[None]]


async def answer(ask: Ask) -> None:
    """As a server should."""
    if ask.path != "/v1/chat/completions" and ask.path != "/v1/completions":
        await facts(ask)
        return
    count = ask.body["max_tokens"]
    prompt = ask.body.get("prompt", [1])
    right = truth(prompt, count, vocab_size=VOCAB_SIZE, eos_ids=(EOS,), seed=ask.body["seed"])
    if not ask.body.get("stream"):
        choice = {"index": 0, "text": "a" * count, "token_ids": right, "finish_reason": "length"}
        ask.whole({"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": count}})
        return
    ask.begin_stream()
    for index, token in enumerate(right):
        ask.piece("a", "length" if index == count - 1 else None, [token])
    ask.end_stream(count)


async def facts(ask: Ask) -> None:
    replies: dict[str, object] = {
        "/v1/models": {"data": [{"id": "default"}]},
        "/tokenizer_info": {"vocab_size": VOCAB_SIZE, "eos_token_ids": [EOS]},
        "/tokenize": {"count": 200},
    }
    path = ask.path.partition("?")[0]
    if path in replies:
        ask.whole(replies[path])
    else:
        ask.whole({"error": {"message": "no such route", "code": "not_found"}}, 404)


class Server:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.endpoint = Endpoint("http", "127.0.0.1", 0)
        self.asks: list[Ask] = []
        self.lost = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while (ask := await self._read(reader, writer)) is not None:
                self.asks.append(ask)
                await self.script(ask)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.lost += 1
        except asyncio.CancelledError:
            """The test is over."""
        finally:
            self._tasks.discard(task)
            writer.close()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Ask | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.decode().strip().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Ask(first.split()[1], headers, json.loads(body or b"{}"), writer)


@asynccontextmanager
async def serving(script: Script = answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server(script)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    port = listening.sockets[0].getsockname()[1]
    server.endpoint = Endpoint("https" if tls else "http", "127.0.0.1", port)
    try:
        yield server
    finally:
        listening.close()
        await server.close()
        await listening.wait_closed()


def plan(
    arrivals: Arrivals | None = None,
    *,
    users: int = 0,
    requests: int | None = None,
    output: int = 4,
    warmup_s: float = 0.0,
    duration_s: float | None = None,
) -> LoadPlan:
    load = TenantLoad("default", "k", Fixed(5), Fixed(output), arrivals=arrivals, users=users, requests=requests)
    return LoadPlan((load,), warmup_s=warmup_s, duration_s=duration_s)


async def drive(
    server: Server, load: LoadPlan, *, streamed: bool = True, with_ids: bool = False, patience_s: float = 20.0
) -> tuple[RunRecord, Wording]:
    pool = Pool(asyncio.get_running_loop(), server.endpoint)
    await pool.start()
    api = "completions" if with_ids else "chat"
    wording = Wording(server.endpoint, load, Asked("m", api, streamed=streamed, with_ids=with_ids))
    return await Driver(pool, load, wording, streamed=streamed, patience_s=patience_s).run(), wording
