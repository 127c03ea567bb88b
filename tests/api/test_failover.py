"""Workers of a real server that die or hang in mid-stream: what its clients read is what they would have read."""

import functools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.api.kinds import KINDS
from tests.api.live_server import LiveServer, eventually, live_server, written

# Steps of ten milliseconds: a reply of 350 tokens takes long enough to be disturbed, even if whoever does it is held up.
CONFIG = """
[[tenants]]
name = "local"
tier = "batch"
[[models]]
name = "fake"
runner = "fake"
workers = {workers}
[models.fake]
profile = {{ c0_s = 0.01, c_in_s = 1e-6, c_out_s = 1e-6, c_kv_s = 0.0, c_att_s = 0.0 }}
"""
MODEL = """
[engine]
max_queue_s = 600.0
[[tenants]]
name = "local"
tier = "batch"
[[models]]
name = "default"
source = "{path}"
workers = 2
kv_tokens = 4096
"""
NUM_STREAMS = 40
PATIENCE_S = 180.0
LETHAL = 300


class Reading(threading.Thread):
    """One stream, read to its end: what each choice said, in whatever pieces."""

    def __init__(self, server: LiveServer, number: int, max_tokens: int = 350) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.id = ""
        self.said: dict[int, list[Any]] = {}
        self.usage: tuple[int, int] | None = None
        self.failure: Any = None
        self.broken: BaseException | None = None
        self._server = server
        self._fields = {
            **KINDS[number % len(KINDS)],
            "messages": [{"role": "user", "content": f"question {number}"}],
            "seed": number,
            "max_tokens": max_tokens,
            "stream_options": {"include_usage": True},
        }
        self.start()

    def run(self) -> None:
        try:
            for chunk in self._server.stream(**self._fields):
                self.id = chunk.get("id", self.id)
                self.failure = chunk.get("error", self.failure)
                if chunk.get("usage"):
                    # What was cached depends on who asked before.
                    self.usage = (chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"])
                for choice in chunk.get("choices", ()):
                    self._hear(choice)
        except (AssertionError, OSError) as broken:
            self.broken = broken
        finally:
            self.begun.set()

    def _hear(self, choice: dict[str, Any]) -> None:
        text, arguments, scores, finish = self.said.setdefault(choice["index"], ["", "", [], None])
        delta = choice["delta"]
        if delta.get("content") or delta.get("tool_calls"):
            self.begun.set()
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            arguments += f"<{function['name']}>" if function.get("name") else ""
            arguments += function.get("arguments") or ""
        scores += [(each["token"], each["logprob"]) for each in (choice.get("logprobs") or {}).get("content") or ()]
        self.said[choice["index"]] = [
            text + (delta.get("content") or ""),
            arguments,
            scores,
            choice["finish_reason"] or finish,
        ]


def attempts(server: LiveServer, reading: Reading) -> int:
    status, found = server.ask("GET", f"/v1/requests/req_{reading.id.removeprefix('chatcmpl-')}/explain")
    assert status == 200
    return int(found["attempts"])


def read_all(
    server: LiveServer,
    disturb: Callable[[], None] | None = None,
    *,
    num_streams: int = NUM_STREAMS,
    num_begun: int = NUM_STREAMS,
    max_tokens: int = 350,
) -> list[tuple[Any, ...]]:
    """What was said in all streams. `disturb` hits those of one worker, when so many have begun."""
    readings = [Reading(server, number, max_tokens) for number in range(num_streams)]
    eventually(
        lambda: sum(reading.begun.is_set() for reading in readings) >= num_begun, "they do not begin", PATIENCE_S
    )
    if disturb is not None:
        disturb()
    for reading in readings:
        reading.join(PATIENCE_S)
        assert not reading.is_alive()
    if disturb is not None:
        assert sum(attempts(server, reading) > 1 for reading in readings) >= num_streams // 4
    return [(reading.said, reading.usage, reading.failure, reading.broken) for reading in readings]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """What the forty say when nothing happens: the fake's answers follow from the questions, whoever gives them."""
    home = tmp_path_factory.mktemp("calm")
    with live_server(home, "--config", str(written(home, CONFIG.format(workers=2)))) as server:
        calm = read_all(server)
    assert all(failure is None and broken is None for _, _, failure, broken in calm)
    return calm


@pytest.mark.parametrize(("workers", "blow"), [(2, signal.SIGKILL), (1, signal.SIGKILL), (2, signal.SIGSTOP)])
def test_forty_streams_do_not_notice_that_their_worker_is_gone(
    home: Path, truth: list[tuple[Any, ...]], workers: int, blow: signal.Signals
) -> None:
    with live_server(home, "--config", str(written(home, CONFIG.format(workers=workers)))) as server:
        victim = server.child("worker fake 0")
        assert read_all(server, lambda: os.kill(victim, blow)) == truth
        if blow is signal.SIGSTOP:
            os.kill(victim, signal.SIGKILL)
        eventually(lambda: server.figure("headrace_replica_ready") == workers, "the worker did not come back")
        total = server.figure("headrace_replica_total_blocks")
        eventually(lambda: server.figure("headrace_replica_free_blocks") == total, "blocks are left behind")


def test_a_request_that_kills_two_workers_fails_alone(home: Path, truth: list[tuple[Any, ...]]) -> None:
    config = CONFIG.format(workers=2) + f"lethal_id = {LETHAL}\n"
    with live_server(home, "--config", str(written(home, config))) as server:
        before, ends = server.children(), []

        def poison() -> None:
            with server.connect() as connection:
                body = {"model": "fake", "prompt": [LETHAL], "max_tokens": 5, "stream": True}
                ends.append(server.send(connection, "POST", "/v1/completions", body).read().decode())

        # Both workers die of it, and so everybody has to move.
        assert read_all(server, poison) == truth
        (said,) = ends
        assert "worker_killed" in said and said.count("data: ") <= 2
        eventually(lambda: server.figure("headrace_replica_ready") == 2, "the workers did not come back")
        workers = [f"worker fake {index}" for index in range(2)]
        assert all(server.children()[f"headrace: {name}"] != before[f"headrace: {name}"] for name in workers)
        # It is remembered: the next who says the same is not tried.
        poison()
        assert "worker_killed" in ends[1]
        assert all(server.child(name) for name in workers)
        total = server.figure("headrace_replica_total_blocks")
        eventually(lambda: server.figure("headrace_replica_free_blocks") == total, "blocks are left behind")


def test_a_draining_worker_hands_its_streams_over(home: Path, truth: list[tuple[Any, ...]]) -> None:
    with live_server(home, "--config", str(written(home, CONFIG.format(workers=2)))) as server:
        leaving = server.child("worker fake 0")
        assert read_all(server, lambda: os.kill(leaving, signal.SIGTERM)) == truth


def test_what_a_worker_says_after_it_was_given_up_is_not_heard(home: Path, truth: list[tuple[Any, ...]]) -> None:
    """It stands still until its streams are with the other one, and then goes on as if nothing had been."""
    with live_server(home, "--config", str(written(home, CONFIG.format(workers=2)))) as server:
        zombie = server.child("worker fake 0")

        def stand_still() -> None:
            os.kill(zombie, signal.SIGSTOP)
            try:
                eventually(lambda: server.figure("headrace_replica_ready") == 1, "nobody noticed")
            finally:
                os.kill(zombie, signal.SIGCONT)

        assert read_all(server, stand_still) == truth
        eventually(lambda: server.figure("headrace_replica_ready") == 2, "it was not found again")
        assert server.child("worker fake 0") == zombie
        total = server.figure("headrace_replica_total_blocks")
        eventually(lambda: server.figure("headrace_replica_free_blocks") == total, "blocks are left behind")


def test_streams_of_a_real_model_do_not_notice_that_their_worker_is_gone(home: Path, smollm2_path: Path) -> None:
    """One of each kind: greedy, seeded, stop strings, penalties, JSON schema, tools, log-probabilities and n = 4."""
    with live_server(home, "--config", str(written(home, MODEL.format(path=smollm2_path)))) as server:
        read_kinds = functools.partial(read_all, server, num_streams=len(KINDS), num_begun=4, max_tokens=40)
        truth = read_kinds()
        assert all(failure is None and broken is None for _, _, failure, broken in truth)
        # One that was slow enough to count as hung has left by itself, and its successor has nothing to lose yet.
        eventually(lambda: server.figure("headrace_replica_ready") == 2, "a worker does not come back", PATIENCE_S)
        victim = server.child("worker default 0")
        kill = functools.partial(os.kill, victim, signal.SIGKILL)
        assert read_kinds(kill) == truth
        total = server.figure("headrace_replica_total_blocks")
        eventually(lambda: server.figure("headrace_replica_free_blocks") == total, "blocks are left behind")
