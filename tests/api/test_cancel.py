"""Clients that go away: what they held is free again at once, each ends exactly once, and nothing of them is left."""

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.api.live_server import PATIENCE_S, LiveServer, eventually, live_server, written

# Steps of 50 ms, of which a prompt of 200 tokens and more takes several; two at a time.
STEP_S = 0.05
SLOW = f"""
[gateway]
disconnect_grace_s = 0.0
[[models]]
name = "fake"
runner = "fake"
[models.fake]
slots = 2
blocks = 1024
profile = {{ c0_s = {STEP_S}, c_in_s = 3e-3, c_out_s = 1e-6, c_kv_s = 0.0, c_att_s = 0.0 }}
"""
QUICK = """
[gateway]
disconnect_grace_s = 0.0
[[models]]
name = "fake"
runner = "fake"
[models.fake]
slots = 16
profile = { c0_s = 0.002, c_in_s = 1e-6, c_out_s = 1e-6, c_kv_s = 0.0, c_att_s = 0.0 }
"""
NUM_REQUESTS, AT_ONCE = 1000, 40
# Threads, and what they hold, that a pool may add when more happens at once than in the first requests: under 1 in 100.
POOL_GROWTH = 6


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    home = tmp_path_factory.mktemp("slow")
    with live_server(home, "--config", str(written(home, SLOW))) as server:
        yield server


def request_bytes(server: LiveServer, request_id: str = "", **fields: Any) -> bytes:
    chat = {"model": "default", "messages": [{"role": "user", "content": "Hello"}], "stream": True, **fields}
    body = json.dumps(chat).encode()
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {server.key}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "x-headrace-ttft-target-ms: 60000",
        *([f"x-request-id: {request_id}"] if request_id else []),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@contextmanager
def asked(server: LiveServer, request_id: str = "", **fields: Any) -> Iterator[socket.socket]:
    """A request under way; leaving closes its connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as wire:
        wire.sendall(request_bytes(server, request_id, **fields))
        yield wire


def read_until(wire: socket.socket, word: bytes) -> bytes:
    told = b""
    while word not in told:
        more = wire.recv(65536)
        assert more, told
        told += more
    return told


def load_of(server: LiveServer) -> tuple[float, float, float]:
    """Sequences that run, sequences that wait, blocks that are held."""
    held = server.figure("headrace_replica_total_blocks") - server.figure("headrace_replica_free_blocks")
    return server.figure("headrace_replica_running"), server.figure("headrace_replica_waiting"), held


def wait_for(server: LiveServer, running: int, waiting: int) -> None:
    """Far sooner than any of these would have ended by itself."""
    eventually(lambda: load_of(server)[:2] == (running, waiting), f"not {running} running, {waiting} waiting")


def is_idle(server: LiveServer) -> bool:
    return load_of(server) == (0.0, 0.0, 0.0) and server.figure("headrace_open_streams") == 0.0


def explanation(server: LiveServer, request_id: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        status, found = server.ask("GET", f"/v1/requests/{request_id}/explain")
        return dict(found) if status == 200 else None

    return eventually(look, f"{request_id} never ended")


@pytest.mark.parametrize("streamed", [True, False])
def test_one_that_waits_leaves_the_line(slow: LiveServer, streamed: bool) -> None:
    name = f"waits-{streamed}"
    with asked(slow, max_tokens=2000) as first, asked(slow, max_tokens=2000) as second:
        read_until(first, b"data: ")
        read_until(second, b"data: ")
        with asked(slow, name, max_tokens=2000, stream=streamed):
            wait_for(slow, 2, 1)
        wait_for(slow, 2, 0)
        told = explanation(slow, name)
        assert told["error"] == "disconnected" and told["usage"]["completion_tokens"] == 0
        assert told["stages"]["wait:capacity"] > told["stages"]["transfer"]
    eventually(lambda: is_idle(slow), "something is held")


def test_one_in_its_prompt_frees_what_it_had(slow: LiveServer) -> None:
    # 6,000 tokens at 3 ms each, and no step longer than half a second: three dozen steps.
    long = [{"role": "user", "content": "x" * 6000}]
    with asked(slow, "in-its-prompt", messages=long, max_tokens=5):
        wait_for(slow, 1, 0)
        eventually(lambda: load_of(slow)[2] > 0, "no blocks are held")
    eventually(lambda: is_idle(slow), "something is held")
    told = explanation(slow, "in-its-prompt")
    assert told["error"] == "disconnected" and told["usage"]["completion_tokens"] == 0
    assert told["ttft_s"] is None and told["stages"]["prefill"] > told["stages"]["transfer"]


@pytest.mark.parametrize("streamed", [True, False])
def test_one_that_speaks_stops(slow: LiveServer, streamed: bool) -> None:
    name = f"speaks-{streamed}"
    with asked(slow, name, max_tokens=2000, stream=streamed) as wire:
        if streamed:
            assert b"200 OK" in read_until(wire, b"id: 5")
        wait_for(slow, 1, 0)
    eventually(lambda: is_idle(slow), "something is held")
    told = explanation(slow, name)
    assert told["error"] == "disconnected" and told["usage"]["completion_tokens"] < 2000
    assert told["stages"]["prefill"] > 0.0
    assert sum(told["stages"].values()) == pytest.approx(told["total_s"], abs=1e-4)


def seed_of_whole_letters(server: LiveServer, num_tokens: int) -> int:
    """With which every token of the reply is a frame: half a letter shows nothing."""
    seeds = range(100)
    return next(seed for seed in seeds if len(list(server.stream(max_tokens=num_tokens, seed=seed))) == num_tokens)


def test_one_that_leaves_with_its_last_token_ends_once(slow: LiveServer) -> None:
    seed = seed_of_whole_letters(slow, 6)
    ended = slow.figure("headrace_requests_total", route="/v1/chat/completions")
    num = 8
    for number in range(num):
        # The last of six tokens is told in the frame that ends the stream: at about that time the client goes.
        with asked(slow, f"last-{number}", max_tokens=6, seed=seed) as wire:
            read_until(wire, b"id: 5")
            wire.settimeout(STEP_S * number / num + 0.001)
            try:
                while wire.recv(65536):
                    pass
            except TimeoutError:
                pass
    told = [explanation(slow, f"last-{number}") for number in range(num)]
    assert all(
        (each["error"], each["finish_reasons"]) in ((None, ["length"]), ("disconnected", ["error"])) for each in told
    )
    assert all(5 <= each["usage"]["completion_tokens"] <= 6 for each in told)
    eventually(lambda: is_idle(slow), "something is held")
    assert slow.figure("headrace_requests_total", route="/v1/chat/completions") == ended + num


def test_a_stream_outlives_its_client_by_the_grace_it_was_given(home: Path) -> None:
    config = QUICK.replace("disconnect_grace_s = 0.0", "disconnect_grace_s = 60.0")
    with live_server(home, "--config", str(written(home, config))) as server:
        with asked(server, "outlives", max_tokens=200) as wire:
            read_until(wire, b"id: 3")
        told = explanation(server, "outlives")
        assert told["error"] is None and told["usage"]["completion_tokens"] == 200


class Churn:
    """Many clients, of which some read to the end, some go away at a random moment, some give up after a while."""

    def __init__(self, server: LiveServer, num_requests: int, seed: int) -> None:
        self._server = server
        self._random = random.Random(seed)
        self._left = iter([f"churn-{seed}-{number}" for number in range(num_requests)])
        # What was read to its end, and what was not, by request.
        self.told: dict[str, bytes] = {}
        self.gone: list[str] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(AT_ONCE)))

    async def _client(self) -> None:
        draw = self._random
        for name in self._left:
            limit_s = draw.choice((None, draw.uniform(0.0, 0.05), draw.uniform(0.05, 0.3)))
            wire = request_bytes(
                self._server,
                name,
                max_tokens=draw.randint(1, 40),
                stream=draw.random() < 0.7,
                n=draw.choice((1, 1, 2)),
                messages=[{"role": "user", "content": "x" * draw.randint(1, 300)}],
            )
            reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
            try:
                writer.write(wire.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
                self.told[name] = await asyncio.wait_for(reader.read(), limit_s)
            except TimeoutError:
                self.gone.append(name)
            finally:
                writer.transport.abort()


def is_whole(answer: bytes) -> bool:
    """It was answered, and ended once."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"text/event-stream" in head:
        return b" 200 OK" in head and body.count(b"data: [DONE]") == 1 and b'"error"' not in body
    return b" 200 OK" in head and bool(json.loads(body)["usage"])


def counts_of(server: LiveServer, folder: str) -> dict[str, int]:
    """How many descriptors (fd) or threads (task) each process has."""
    return {title: len(list(Path(f"/proc/{pid}/{folder}").iterdir())) for title, pid in server.children().items()}


def grown(server: LiveServer, before: dict[str, dict[str, int]]) -> dict[str, str]:
    """By folder and process: what has grown by more than pools do that were not full when it was counted."""
    return {
        f"{folder} of {title}": f"{counts[title]} -> {count}"
        for folder, counts in before.items()
        for title, count in counts_of(server, folder).items()
        if count > counts[title] + POOL_GROWTH
    }


def test_a_thousand_that_come_and_go_leave_nothing(home: Path) -> None:
    with live_server(home, "--config", str(written(home, QUICK))) as server:
        # The first fill caches and pools.
        asyncio.run(Churn(server, 50, seed=1).run())
        eventually(lambda: is_idle(server), "something is held")
        before = server.figure("headrace_request_seconds_count")
        counts, pids = {folder: counts_of(server, folder) for folder in ("fd", "task")}, server.children()
        churn = Churn(server, NUM_REQUESTS, seed=2)
        asyncio.run(churn.run())
        assert len(churn.told) > 100 and len(churn.gone) > 100 and len(churn.told) + len(churn.gone) == NUM_REQUESTS
        eventually(lambda: is_idle(server), "something is held")
        assert [name for name, answer in churn.told.items() if not is_whole(answer)] == []
        ends = {name: ending_of(server, name) for name in (*churn.told, *churn.gone)}
        assert {ends[name] for name in churn.told} == {"finished"}

        def is_counted() -> bool:
            """Each that ended is counted once. One whose client went may still have been on its way to a worker."""
            ends.update({name: ending_of(server, name) for name, end in ends.items() if end == "unknown"})
            known = sum(end != "unknown" for end in ends.values())
            return server.figure("headrace_request_seconds_count") - before == known

        eventually(is_counted, "the requests that ended are not those that were counted")
        # Who goes before a worker has its request has asked for nothing.
        assert {ends[name] for name in churn.gone} <= {"finished", "disconnected", "unknown"}
        eventually(lambda: not grown(server, counts), "descriptors or threads are left")
        assert grown(server, counts) == {} and server.children() == pids


def ending_of(server: LiveServer, request_id: str) -> str:
    status, found = server.ask("GET", f"/v1/requests/{request_id}/explain")
    return "unknown" if status == 404 else found["error"] or "finished"
