"""The gateway of a real server dies in mid-stream: its clients read on from where they were, and nothing is missing."""

import http.client
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.api.kinds import KINDS
from tests.api.live_server import LiveServer, eventually, live_server, written

CONFIG = """
[gateway]
resume_s = 60.0
{more}
[[tenants]]
name = "local"
tier = "batch"
[[models]]
name = "fake"
runner = "fake"
workers = {workers}
[models.fake]
profile = {{ c0_s = 0.02, c_in_s = 1e-6, c_out_s = 1e-6, c_kv_s = 0.0, c_att_s = 0.0 }}
"""
NUM_STREAMS = 2 * len(KINDS)
PATIENCE_S = 150.0


def chat_body(**fields: Any) -> bytes:
    return json.dumps({"model": "fake", "stream": True, **fields}).encode()


class Reading(threading.Thread):
    """One stream as a client reads it that comes back whenever its connection is lost, with the last id it saw."""

    def __init__(self, server: LiveServer, number: int, run: str) -> None:
        super().__init__()
        self.id = f"{run}-{number}"
        self.begun = threading.Event()
        self.events: list[bytes] = []
        self.numbers: list[int] = []
        self.num_connections = 0
        self.broken: BaseException | None = None
        self._server = server
        self._body = chat_body(
            **KINDS[number % len(KINDS)],
            messages=[{"role": "user", "content": f"question {number}"}],
            seed=number,
            max_tokens=350,
        )
        self.start()

    @property
    def is_over(self) -> bool:
        return bool(self.events) and self.events[-1].endswith(b"data: [DONE]")

    def run(self) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        try:
            while not self.is_over:
                assert time.monotonic() < give_up_s, "the stream did not go on"
                try:
                    self._read()
                except OSError:
                    time.sleep(0.05)
        except BaseException as broken:  # noqa: BLE001 - told to who waits for this thread
            self.broken = broken
        finally:
            self.begun.set()

    def _read(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
        headers = {"authorization": f"Bearer {self._server.key}", "x-request-id": self.id}
        try:
            if not self.numbers:
                headers["content-type"] = "application/json"
                connection.request("POST", "/v1/chat/completions", self._body, headers)
            else:
                connection.request("GET", f"/v1/streams/{self.id}?after={self.numbers[-1]}", headers=headers)
            response = connection.getresponse()
            if response.status == 503 and self.numbers:
                raise OSError("nobody can know yet")
            assert response.status == 200, response.read()
            self.num_connections += 1
            self._take(response)
        except http.client.HTTPException as lost:
            raise OSError(str(lost)) from lost
        finally:
            connection.close()

    def _take(self, response: http.client.HTTPResponse) -> None:
        event = b""
        while line := response.readline():
            if line != b"\n":
                event += line
                continue
            if event.startswith(b"id: "):
                number, _, said = event[4:].partition(b"\n")
                self.numbers.append(int(number))
                self.events.append(said.strip())
                if len(self.events) == 1:
                    self.begun.set()
            elif event.startswith(b"data: "):
                self.events.append(event.strip())
            event = b""


def read_all(server: LiveServer, run: str, disturb: Any = None) -> list[Reading]:
    readings = [Reading(server, number, run) for number in range(NUM_STREAMS)]
    assert all(reading.begun.wait(PATIENCE_S) for reading in readings)
    if disturb is not None:
        disturb()
    for reading in readings:
        reading.join(PATIENCE_S)
        if reading.broken is not None:
            raise AssertionError(f"{reading.id} broke: {server.said()}") from reading.broken
    return readings


def kill(*victims: int) -> None:
    for victim in victims:
        os.kill(victim, signal.SIGKILL)


def told(readings: list[Reading]) -> list[Any]:
    """What each choice said, in whatever pieces; a client that was away gets them larger."""
    found = []
    for reading in readings:
        assert reading.numbers == sorted(set(reading.numbers)), "a frame was repeated"
        choices: dict[int, list[Any]] = {}
        for event in reading.events:
            data = event.removeprefix(b"data: ")
            for choice in json.loads(data)["choices"] if data not in (b"[DONE]", b"") else ():
                said = choices.setdefault(choice["index"], ["", "", None])
                said[0] += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls") or ():
                    said[1] += call["function"].get("name", "") + (call["function"].get("arguments") or "")
                said[2] = choice["finish_reason"] or said[2]
        found.append(choices)
    return found


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What all say when nothing happens: the fake's answers follow from the questions, whoever gives them."""
    home = tmp_path_factory.mktemp("calm")
    with live_server(home, "--config", str(written(home, CONFIG.format(workers=2, more="")))) as server:
        return told(read_all(server, "calm"))


@pytest.mark.parametrize("workers", [1, 2])
def test_streams_go_on_after_their_gateway_was_killed(home: Path, truth: list[Any], workers: int) -> None:
    with live_server(home, "--config", str(written(home, CONFIG.format(workers=workers, more="")))) as server:
        victim = server.child("gateway")
        readings = read_all(server, "wild", lambda: kill(victim))
        assert told(readings) == truth
        assert sum(reading.num_connections > 1 for reading in readings) > NUM_STREAMS // 2
        # Whatever its workers had was attached, not computed again; log-probabilities they tell once.
        plain = [reading for number, reading in enumerate(readings) if "logprobs" not in KINDS[number % len(KINDS)]]
        explained = [server.ask("GET", f"/v1/requests/{reading.id}/explain") for reading in plain]
        replayed = [found["replayed_tokens"] for status, found in explained if status == 200]
        assert len(replayed) > NUM_STREAMS // 2 and not any(replayed)
        total = server.figure("headrace_replica_total_blocks")
        eventually(lambda: server.figure("headrace_replica_free_blocks") == total, "blocks are left behind")


def test_gateway_and_worker_die_together(home: Path, truth: list[Any]) -> None:
    with live_server(home, "--config", str(written(home, CONFIG.format(workers=2, more="")))) as server:
        victims = [server.child("gateway"), server.child("worker fake 0")]
        readings = read_all(server, "wild", lambda: kill(*victims))
        assert told(readings) == truth


def test_what_nobody_comes_back_for_is_ended_and_freed(home: Path) -> None:
    more = "disconnect_grace_s = 1.0"
    with live_server(home, "--config", str(written(home, CONFIG.format(workers=1, more=more)))) as server:
        body = chat_body(messages=[{"role": "user", "content": "x"}], max_tokens=3000, ignore_eos=True)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        headers = {"authorization": f"Bearer {server.key}", "content-type": "application/json", "x-request-id": "lost"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        connection.getresponse().readline()
        os.kill(server.child("gateway"), signal.SIGKILL)
        connection.close()
        total = eventually(lambda: server.figure("headrace_replica_total_blocks"), "the gateway did not come back")
        eventually(lambda: server.figure("headrace_replica_free_blocks") == total, "blocks are left behind")
        assert eventually(lambda: explained(server, "lost"), "it goes on")["error"] == "disconnected"


def asked(
    server: LiveServer, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, str, bytes]:
    """Status, id and body; waits for a gateway that is being started."""

    def ask() -> tuple[int, str, bytes] | None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        sent = {"authorization": f"Bearer {server.key}", "content-type": "application/json", **headers}
        try:
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            return response.status, response.headers["x-request-id"], response.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    return eventually(ask, "the gateway does not answer")


def explained(server: LiveServer, id: str) -> Any:
    """Nothing while it is not over."""
    status, _, found = asked(server, "GET", f"/v1/requests/{id}/explain")
    return json.loads(found) if status == 200 else None


def test_what_had_ended_is_told_again_to_the_byte_and_keeps_its_id(home: Path) -> None:
    with live_server(home, "--config", str(written(home, CONFIG.format(workers=1, more="")))) as server:
        body = chat_body(messages=[{"role": "user", "content": "x"}], max_tokens=20)
        headers = {"x-request-id": "mine"}
        first = asked(server, "POST", "/v1/chat/completions", body, **headers)
        assert first[0] == 200 and first[2].endswith(b"data: [DONE]\n\n")
        kill(server.child("gateway"))
        assert asked(server, "GET", "/v1/streams/mine?after=0")[::2] == (200, first[2])
        kill(server.child("gateway"))
        status, id, said = asked(server, "POST", "/v1/chat/completions", body, **headers)
        assert (status, id == "mine") == (200, False) and said.endswith(b"data: [DONE]\n\n")
        assert asked(server, "GET", "/v1/streams/mine?after=0")[::2] == (200, first[2])
        assert asked(server, "GET", "/v1/streams/never")[0] == 404


def test_what_has_expired_is_gone_and_not_unknown_to_the_next_gateway(home: Path) -> None:
    config = CONFIG.format(workers=1, more="").replace("resume_s = 60.0", "resume_s = 1.0")
    with live_server(home, "--config", str(written(home, config))) as server:
        body = chat_body(messages=[{"role": "user", "content": "x"}], max_tokens=2)
        assert asked(server, "POST", "/v1/chat/completions", body, **{"x-request-id": "mine"})[0] == 200

        def is_gone() -> bool:
            status = asked(server, "GET", "/v1/streams/mine")[0]
            assert status in (200, 410)  # for a while it can be read again: time without a gateway does not count
            return status == 410

        for _ in range(3):
            eventually(is_gone, "it does not expire")
            kill(server.child("gateway"))
        assert asked(server, "GET", "/v1/streams/never")[0] == 404


def test_a_stream_that_is_to_finish_without_readers_does_so_though_its_gateway_died(home: Path) -> None:
    more = "disconnect_grace_s = 0.1"
    with live_server(home, "--config", str(written(home, CONFIG.format(workers=1, more=more)))) as server:
        connections = []
        for word, max_tokens in (("finish", 500), ("", 3000)):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            headers = {"authorization": f"Bearer {server.key}", "content-type": "application/json"}
            headers |= {"x-request-id": f"to-{word}", "x-headrace-on-disconnect": word}
            body = chat_body(messages=[{"role": "user", "content": "x"}], max_tokens=max_tokens, ignore_eos=True)
            connection.request("POST", "/v1/chat/completions", body, headers)
            connection.getresponse().readline()
            connections.append(connection)
        kill(server.child("gateway"))
        for connection in connections:
            connection.close()

        finished = eventually(lambda: explained(server, "to-finish"), "it did not finish")
        assert finished["error"] is None
        assert eventually(lambda: explained(server, "to-"), "it goes on")["error"] == "disconnected"
        assert b'"finish_reason":"length"' in asked(server, "GET", "/v1/streams/to-finish")[2]
