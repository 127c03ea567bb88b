"""What the gateway's shell costs by itself: authentication, parsing, dialect, SSE, uvicorn, over a service that answers
at once from memory. Prints CPU microseconds of the server process per request and per chunk.

    .venv/bin/python benchmarks/gateway_shell.py
"""

import asyncio
import json
import multiprocessing
import os
import socket
import time
from types import SimpleNamespace
from typing import Any

import uvloop

from headrace.accounts.keys import KeyRing, hash_key
from headrace.core.clock import SystemClock
from headrace.core.config import GatewayConfig, TenantEntry
from headrace.gateway.app import build_app
from headrace.gateway.server import serve
from headrace.streams.record import Ending, Part, Usage
from headrace.streams.stream import Stream
from headrace.telemetry.metrics import Metrics

KEY = "sk-benchmark"
STEP_S = 0.005
CONNECTIONS = 32
REQUESTS = 8000
STREAMS = 64
CHUNKS = 300


class MemoryService:
    """Ends a whole answer at once; a stream gets a word per step."""

    def __init__(self) -> None:
        self._open: dict[Stream, int] = {}

    def models(self) -> list[Any]:
        return []

    def model(self, name: str) -> Any:
        return SimpleNamespace(name=name)

    async def open(self, order: Any, caller: Any, stages: Any) -> Stream:
        stream = Stream(order.request_id, caller.tenant, order.dialect, model=order.model)
        if order.streamed:
            self._open[stream] = order.asks[0].max_tokens or CHUNKS
        else:
            stream.append([Part(0, ids=(1,), text="word " * 8, finish="stop")])
            stream.end(Ending(Usage(8, 0, 8)))
        return stream

    def step(self) -> None:
        for stream, left in list(self._open.items()):
            stream.append([Part(0, ids=(1,), text=" word", finish=None if left > 1 else "length")])
            self._open[stream] = left - 1
            if left == 1:
                stream.end(Ending(Usage(8, 0, CHUNKS)))
                del self._open[stream]

    def cancel(self, stream: Stream, why: str) -> None:
        self._open.pop(stream, None)

    def pause(self, stream: Stream) -> None: ...

    def resume(self, stream: Stream) -> None: ...

    def finished(self, stream: Stream, stages: Any) -> None: ...


def run_server(listening: socket.socket) -> None:
    async def run() -> None:
        service = MemoryService()
        app = build_app(
            service,
            KeyRing([TenantEntry("bench", keys=(hash_key(KEY),))]),
            GatewayConfig(),
            Metrics(["m"], ["bench"]),
            SystemClock(),
        )

        async def steps() -> None:
            while True:
                await asyncio.sleep(STEP_S)
                service.step()

        task = asyncio.create_task(steps())
        await serve(app, [listening], GatewayConfig(), asyncio.Event())
        task.cancel()

    uvloop.run(run())


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def request(stream: bool) -> bytes:
    body = json.dumps(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "Say something of middling length, please."}],
            "max_tokens": CHUNKS,
            "temperature": 0.7,
            "stream": stream,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        f"authorization: Bearer {KEY}\r\ncontent-type: application/json\r\naccept: application/json\r\n"
        "user-agent: OpenAI/Python\r\naccept-encoding: gzip\r\nx-stainless-lang: python\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask_whole(port: int, times: int, waits: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(times):
        began_s = time.perf_counter()
        writer.write(request(False))
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200"), head
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
        waits.append(time.perf_counter() - began_s)
    writer.close()


async def ask_stream(port: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(True))
    chunks = 0
    while True:
        line = await reader.readline()
        chunks += line.startswith(b"data: {")
        if line.startswith(b"data: [DONE]"):
            writer.close()
            return chunks


async def measure(port: int, pid: int) -> None:
    await ask_whole(port, 200, [])
    waits: list[float] = []
    spent_s, began_s = cpu_s(pid), time.perf_counter()
    await asyncio.gather(*(ask_whole(port, REQUESTS // CONNECTIONS, waits) for _ in range(CONNECTIONS)))
    spent_s, wall_s = cpu_s(pid) - spent_s, time.perf_counter() - began_s
    print(
        f"whole    {spent_s / REQUESTS * 1e6:7.1f} us CPU/request  {REQUESTS / spent_s:8.0f} requests/CPU-s  {wall_s:.1f} s"
    )
    waits = []
    await ask_whole(port, 1000, waits)
    waits.sort()
    print(f"alone    p50 {waits[500] * 1e3:.2f} ms  p99 {waits[990] * 1e3:.2f} ms")
    spent_s, began_s = cpu_s(pid), time.perf_counter()
    chunks = sum(await asyncio.gather(*(ask_stream(port) for _ in range(STREAMS))))
    spent_s, wall_s = cpu_s(pid) - spent_s, time.perf_counter() - began_s
    print(
        f"streamed {spent_s / chunks * 1e6:7.1f} us CPU/chunk    {chunks / spent_s:8.0f} chunks/CPU-s    {wall_s:.1f} s, {chunks} chunks"
    )


def main() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    server = multiprocessing.get_context("fork").Process(target=run_server, args=(listening,))
    server.start()
    assert server.pid is not None
    try:
        uvloop.run(measure(listening.getsockname()[1], server.pid))
    finally:
        server.kill()
        server.join()


if __name__ == "__main__":
    main()
