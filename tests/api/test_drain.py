"""Processes that end while requests are under way: what can be saved is, the rest is told, and the next one works.

That children are replaced and signals obeyed is in test_serve_process.py; here it is what becomes of the requests.
"""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.api.live_server import PATIENCE_S, LiveServer, descendants, eventually, is_alive, live_server, written

# A prompt of 2,000 tokens takes seconds before its first token, and nobody is sent away for that.
CONFIG = """
[gateway]
drain_s = 120.0
[[tenants]]
name = "local"
tier = "batch"
[[models]]
name = "fake"
runner = "fake"
workers = {workers}
[models.fake]
profile = {{ c0_s = 0.01, c_in_s = {c_in_s}, c_out_s = 1e-6, c_kv_s = 0.0, c_att_s = 0.0 }}
"""
LONG_PROMPT = [{"role": "user", "content": "x" * 2000}]
CHAT: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}


class Asked(threading.Thread):
    """A request in a thread of its own: what it was told, and whether its stream was closed as it should be."""

    def __init__(self, server: LiveServer, **fields: Any) -> None:
        super().__init__()
        self.has_token = threading.Event()
        self.finish: str | None = None
        self.failure: dict[str, Any] | None = None
        self.broken: BaseException | None = None
        self.num_chunks = 0
        self._server, self._fields = server, fields
        self.start()

    def run(self) -> None:
        try:
            for chunk in self._server.stream(**self._fields):
                self.num_chunks += 1
                self.has_token.set()
                self.failure = chunk.get("error", self.failure)
                for choice in chunk.get("choices", ()):
                    self.finish = choice["finish_reason"] or self.finish
        except (AssertionError, OSError) as broken:
            self.broken = broken


def is_answered(server: LiveServer) -> bool:
    try:
        return server.ask("POST", "/v1/chat/completions", CHAT)[0] == 200
    except OSError:
        return False


def test_a_lost_workers_requests_go_on_whether_they_have_spoken_or_not(home: Path) -> None:
    with live_server(home, "--config", str(written(home, CONFIG.format(workers=2, c_in_s=3e-3)))) as server:
        pids = {f"fake/{index}": server.child(f"worker fake {index}") for index in range(2)}
        speaking = [Asked(server, max_tokens=8000) for _ in range(2)]
        assert all(each.has_token.wait(PATIENCE_S) for each in speaking)
        silent = [Asked(server, messages=LONG_PROMPT, max_tokens=3) for _ in range(2)]
        eventually(lambda: server.figure("headrace_replica_running", replica="fake/0") >= 2, "nothing to lose")
        assert not any(each.has_token.is_set() for each in silent)
        os.kill(pids["fake/0"], signal.SIGKILL)
        for each in silent:
            each.join(PATIENCE_S)
        # Both are answered whole, by whoever is left.
        assert [(each.finish, each.failure, each.broken) for each in silent] == [("length", None, None)] * 2
        # Of the two that had begun one was there: neither notices.
        counts = [each.num_chunks for each in speaking]
        eventually(
            lambda: all(each.num_chunks > count for each, count in zip(speaking, counts, strict=True)), "one is silent"
        )
        assert all(each.is_alive() and each.failure is None for each in speaking)
        eventually(lambda: server.figure("headrace_replica_ready") == 2, "the worker did not come back")
        assert is_answered(server)
        server.signal(signal.SIGINT)
        eventually(lambda: "stopping" in server.said(), "it does not stop")
        server.signal(signal.SIGINT)
        for each in speaking:
            each.join(PATIENCE_S)


def test_with_nobody_left_to_take_them_they_wait_for_the_next_worker(home: Path) -> None:
    with live_server(home, "--config", str(written(home, CONFIG.format(workers=1, c_in_s=3e-3)))) as server:
        silent: list[tuple[int, Any]] = []
        body = {**CHAT, "messages": LONG_PROMPT, "max_tokens": 200}
        thread = threading.Thread(target=lambda: silent.append(server.ask("POST", "/v1/chat/completions", body)))
        thread.start()
        eventually(lambda: server.figure("headrace_replica_running") == 1, "nothing runs")
        os.kill(server.child("worker fake 0"), signal.SIGKILL)
        thread.join(PATIENCE_S)
        ((status, reply),) = silent
        assert status == 200 and reply["usage"]["completion_tokens"] == 200
        assert is_answered(server)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_under_load_it_finishes_what_is_open_and_refuses_the_rest(home: Path, number: int) -> None:
    with live_server(home, "--config", str(written(home, CONFIG.format(workers=2, c_in_s=1e-3)))) as server:
        below = descendants(server.pid)
        open_ones = [Asked(server, max_tokens=800) for _ in range(16)]
        assert all(each.has_token.wait(PATIENCE_S) for each in open_ones)
        in_prompt = [Asked(server, messages=LONG_PROMPT, max_tokens=300) for _ in range(4)]
        eventually(lambda: server.figure("headrace_open_streams") == 20, "not all are open")
        server.signal(number)
        eventually(lambda: "stopping" in server.said(), "it does not stop")
        refused = eventually(lambda: _refusal(server), "still takes new work")
        assert refused in ("503", "refused")
        assert server.wait(3 * PATIENCE_S) == 0
        for each in (*open_ones, *in_prompt):
            each.join(PATIENCE_S)
            assert (each.finish, each.failure, each.broken) == ("length", None, None)
        assert len(below) >= 3
        eventually(lambda: not any(map(is_alive, below)), "processes are left behind")


def _refusal(server: LiveServer) -> str | None:
    try:
        return "503" if server.ask("POST", "/v1/chat/completions", CHAT)[0] == 503 else None
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return None


def test_a_lost_gateway_takes_its_requests_along_and_the_worker_is_free(home: Path) -> None:
    with live_server(home, "--config", str(written(home, CONFIG.format(workers=1, c_in_s=1e-3)))) as server:
        asked = [Asked(server, max_tokens=3000) for _ in range(3)]
        assert all(each.has_token.wait(PATIENCE_S) for each in asked)
        worker = server.child("worker fake 0")
        os.kill(server.child("gateway"), signal.SIGKILL)
        for each in asked:
            each.join(PATIENCE_S)
        # Cut off: no end was told that there was not.
        assert all(each.broken is not None and each.finish is None for each in asked)
        eventually(lambda: is_answered(server), "no answers")
        # Nobody waits for those any more: the worker, which lived on, has given them up.
        eventually(lambda: server.figure("headrace_replica_running") == 0, "the worker still runs them")
        total = server.figure("headrace_replica_total_blocks")
        eventually(lambda: server.figure("headrace_replica_free_blocks") == total, "blocks are left behind")
        assert server.child("worker fake 0") == worker
