"""A server for the page alone: imitates the API by script and holds each stream until the test lets it go on.

Serves the real pages. What the page asked for is kept for the test to read.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from headrace.gateway.pages import page_response

KEY = "hr-test-key"
PATIENCE_S = 60.0
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]

STAGES = {"receive": 0.0002, "tokenise": 0.001, "prefill": 0.12, "decode": 0.8, "transfer": 0.03, "client": 0.0004}


@dataclass(slots=True)
class Script:
    """How a chat request is answered. A held stream sends one piece for each `release`."""

    pieces: Iterable[str] = ("Hello", ", ", "world.")
    is_held: bool = False
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    message: str = ""
    # None: a proper end; else an error frame with this message, or with "" nothing at all.
    broken: str | None = None
    finish: str = "stop"


@dataclass(slots=True)
class Asked:
    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: Any = None


class Imitation:
    """The application. Tests set `scripts` and read `asked`, from another thread than the one that serves."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.models = ["first-model", "second-model"]
        self.models_status = 200
        self.scripts: list[Script] = []
        self.stages: dict[str, Any] = dict(STAGES)
        self.unexplained = 0  # so many questions for an explanation come too early
        self.left = threading.Event()
        self._gate = asyncio.Semaphore(0)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def chats(self) -> list[Asked]:
        return [one for one in self.asked if one.path == "/v1/chat/completions"]

    def release(self, pieces: int = 1) -> None:
        assert self._loop is not None
        for _ in range(pieces):
            self._loop.call_soon_threadsafe(self._gate.release)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        self._loop = asyncio.get_running_loop()
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        asked = Asked(scope["method"], scope["path"], scope["query_string"].decode(), headers)
        self.asked.append(asked)
        page = page_response(asked.path, headers)
        if page is not None:
            await send({"type": "http.response.start", "status": page.status, "headers": page.headers})
            await send({"type": "http.response.body", "body": page.body})
        elif headers.get("authorization") != f"Bearer {KEY}":
            await _reply(send, 401, _error("no key, or none we know"))
        elif asked.path == "/v1/models":
            await self._models(send)
        elif asked.path.endswith("/explain"):
            await self._explain(send)
        elif asked.path == "/v1/chat/completions":
            asked.body = json.loads(await _whole_body(receive))
            await self._chat(self.scripts.pop(0) if self.scripts else Script(), receive, send)
        else:
            await _reply(send, 404, _error("no such path"))

    async def _models(self, send: Send) -> None:
        if self.models_status != 200:
            await _reply(send, self.models_status, _error("no worker is ready"), {"retry-after": "1"})
            return
        models = [{"id": name, "object": "model", "max_model_len": 8192} for name in self.models]
        await _reply(send, 200, {"object": "list", "data": models})

    async def _explain(self, send: Send) -> None:
        if self.unexplained:
            self.unexplained -= 1
            await _reply(send, 404, _error("no such request"))
            return
        total_s = sum(part for part in self.stages.values() if isinstance(part, float))
        await _reply(send, 200, {"request_id": "req-1", "stages": self.stages, "total_s": total_s})

    async def _chat(self, script: Script, receive: Receive, send: Send) -> None:
        if script.status != 200:
            await _reply(send, script.status, _error(script.message), script.headers)
            return
        streaming = asyncio.ensure_future(self._stream(script, send))
        leaving = asyncio.ensure_future(_gone(receive))
        await asyncio.wait({streaming, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not streaming.done():
            self.left.set()
        for task in (streaming, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _stream(self, script: Script, send: Send) -> None:
        await send(_start(200, {"content-type": "text/event-stream", "x-request-id": "req-1"}))
        await _event(send, _chunk({"role": "assistant", "content": ""}))
        pieces = list(script.pieces)
        for piece in pieces:
            if script.is_held:
                await self._gate.acquire()
            await _event(send, _chunk({"content": piece}))
        if script.broken is None:
            usage = {"prompt_tokens": 5, "completion_tokens": len(pieces), "total_tokens": 5 + len(pieces)}
            await _event(send, _chunk({}, script.finish))
            await _event(send, {"object": "chat.completion.chunk", "choices": [], "usage": usage})
            await _event(send, "[DONE]")
        elif script.broken:
            await _event(send, _error(script.broken))
            await _event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Running:
    """An application on a free port, in a thread of its own."""

    def __init__(self, app: Imitation) -> None:
        self.app = app
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            app, ws="none", lifespan="off", loop="asyncio", log_level="error", timeout_graceful_shutdown=2
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})

    def __enter__(self) -> "Running":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self._socket.close()


def _start(status: int, headers: Mapping[str, str]) -> dict[str, Any]:
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }


async def _reply(send: Send, status: int, body: object, headers: Mapping[str, str] | None = None) -> None:
    await send(_start(status, {"content-type": "application/json", **(headers or {})}))
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


async def _event(send: Send, data: object) -> None:
    text = data if isinstance(data, str) else json.dumps(data)
    await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})


def _chunk(delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice], "usage": None}


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": None}}


async def _whole_body(receive: Receive) -> bytes:
    body = b""
    while True:
        part = await receive()
        body += bytes(part.get("body", b""))
        if not part.get("more_body"):
            return body


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
