"""Several gateways behind one port, with a real Redis between them: whichever answers, a stream is one stream."""

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.api.live_server import PATIENCE_S, LiveServer, eventually, live_server, written
from tests.api.test_gateway_death import chat_body, kill, read_all, told
from tests.services import redis_server

CONFIG = """
[gateway]
processes = 2
journal = "{journal}"
resume_s = 60.0
disconnect_grace_s = {grace_s}
drain_s = {drain_s}
[[tenants]]
name = "local"
tier = "batch"
[[tenants]]
name = "other"
keys = ["{hash}"]
[[models]]
name = "fake"
runner = "fake"
workers = 2
[models.fake]
profile = {{ c0_s = 0.02, c_in_s = 1e-6, c_out_s = 1e-6, c_kv_s = 0.0, c_att_s = 0.0 }}
"""
OTHER_KEY = "hr-another-tenant-another-tenant-0000"


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a path that is short enough for a socket."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextmanager
def two_gateways(
    home: Path, folder: Path, *argv: str, drain_s: int = 30, grace_s: float = 60.0
) -> Iterator[LiveServer]:
    with redis_server(folder) as journal:
        hashed = sha256(OTHER_KEY.encode()).hexdigest()
        text = CONFIG.format(journal=journal, drain_s=drain_s, grace_s=grace_s, hash=hashed)
        with live_server(home, "--config", str(written(home, text)), *argv) as server:
            yield server


class Connection:
    """To one of the gateways, known by the index that it says of itself; kept until it is closed."""

    def __init__(self, server: LiveServer, key: str | None = None) -> None:
        self._server = server
        self._key = key
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        text = server.send(self._connection, "GET", "/metrics", None).read().decode()
        (line,) = [line for line in text.splitlines() if line.startswith("headrace_gateway{")]
        self.index = int(line.partition('index="')[2].partition('"')[0])

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> http.client.HTTPResponse:
        named = {"authorization": f"Bearer {self._key or self._server.key}", "content-type": "application/json"}
        self._connection.request(method, path, body, {**named, **headers})
        return self._connection.getresponse()

    def close(self) -> None:
        self._connection.close()


@contextmanager
def connected(server: LiveServer, index: int, key: str | None = None) -> Iterator[Connection]:
    """Which of them answers is the kernel's choice: until it is the one that is wanted."""
    refused: list[Connection] = []

    def look() -> Connection | None:
        found = Connection(server, key)
        if found.index == index:
            return found
        refused.append(found)
        return None

    with closing(eventually(look, f"gateway {index} never answered")) as found:
        for other in refused:
            other.close()
        yield found


def content(lines: Any) -> tuple[str, bool]:
    """Of server-sent events: the text, and whether it ended well."""
    text, is_done = "", False
    for line in lines:
        if line == b"data: [DONE]\n":
            is_done = True
        elif line.startswith(b"data: "):
            found = json.loads(line[6:])
            text += "".join(choice["delta"].get("content") or "" for choice in found.get("choices", ()))
    return text, is_done


def begin(connection: Connection, name: str, num_tokens: int) -> http.client.HTTPResponse:
    """A stream that has said its first word."""
    body = chat_body(messages=[{"role": "user", "content": "once"}], max_tokens=num_tokens, ignore_eos=True, seed=1)
    response = connection.send("POST", "/v1/chat/completions", body, **{"x-request-id": name})
    assert response.status == 200 and response.readline().startswith(b"id: ")
    return response


def test_one_of_two_gateways_is_killed_and_its_clients_read_on_through_the_same_port(home: Path, folder: Path) -> None:
    with two_gateways(home, folder) as server:
        truth = told(read_all(server, "calm"))
        victim = server.child("gateway 0")
        readings = read_all(server, "wild", lambda: kill(victim))
        assert told(readings) == truth
        eventually(lambda: server.children().get("headrace: gateway 0", victim) != victim, "it did not come back")
        total = server.figure("headrace_replica_total_blocks")
        eventually(lambda: server.figure("headrace_replica_free_blocks") == total, "blocks are left behind")
        assert {reading.id for reading in readings if reading.num_connections > 1}, "nobody lost a connection"


def test_twenty_readers_over_both_gateways_get_the_same(home: Path, folder: Path) -> None:
    with two_gateways(home, folder) as server, connected(server, 0) as first:
        opened = begin(first, "shared", 150)
        heard: list[tuple[str, bool]] = []

        def read() -> None:
            with server.connect() as connection:
                response = server.send(connection, "GET", "/v1/streams/shared", None)
                assert response.status == 200, response.read()
                heard.append(content(response))

        readers = [threading.Thread(target=read) for _ in range(20)]
        for reader in readers:
            reader.start()
        assert content(opened)[1]
        for reader in readers:
            reader.join(PATIENCE_S)
        with connected(server, 0) as one, connected(server, 1) as two:
            again = [content(each.send("GET", "/v1/streams/shared")) for each in (one, two)]
        assert len(heard) == 20 and set(heard) == set(again) and again[0][1] and len(again[0][0]) > 100


def test_what_is_read_at_another_gateway_goes_on_and_can_be_cancelled_there(home: Path, folder: Path) -> None:
    with two_gateways(home, folder, grace_s=4.0) as server, connected(server, 1) as elsewhere:
        with connected(server, 0) as first:
            begin(first, "long", 4000)
            response = elsewhere.send("GET", "/v1/streams/long")
        # Its first reader is gone; the grace is over long before these have come.
        for _ in range(800):
            assert response.readline(), "it ended while it was read"
        with connected(server, 1) as canceller:
            assert canceller.send("DELETE", "/v1/streams/long").status == 204
        _, is_done = content(response)
        assert is_done
        total = server.figure("headrace_replica_total_blocks")
        eventually(lambda: server.figure("headrace_replica_free_blocks") == total, "blocks are left behind")


def test_streams_of_others_and_unknown_ones_are_not_found_at_either(home: Path, folder: Path) -> None:
    with two_gateways(home, folder) as server, connected(server, 0) as first:
        opened = begin(first, "mine", 100)
        for index in (0, 1):
            with connected(server, index, OTHER_KEY) as stranger:
                for method in ("GET", "DELETE"):
                    answer = stranger.send(method, "/v1/streams/mine")
                    assert answer.status == 404 and json.loads(answer.read())["error"]["code"] == "not_found"
            with connected(server, index) as owner:
                assert owner.send("GET", "/v1/streams/never").status == 404
        assert content(opened)[1]


def test_streams_go_on_while_redis_stands_still(home: Path, folder: Path) -> None:
    with two_gateways(home, folder) as server:
        truth = told(read_all(server, "calm"))
        pid = int(subprocess.check_output(["pgrep", "-f", f"redis-server.*{folder}"]).split()[0])

        def stand_still() -> None:
            os.kill(pid, signal.SIGSTOP)
            try:
                eventually(lambda: server.figure("headrace_journal_keeping") == 0.0, "nobody noticed")
                with connected(server, 0) as connection:
                    assert connection.send("GET", "/v1/streams/never").status == 503
            finally:
                os.kill(pid, signal.SIGCONT)

        readings = read_all(server, "wild", stand_still)
        assert told(readings) == truth and {reading.num_connections for reading in readings} == {1}
        eventually(lambda: server.figure("headrace_journal_keeping") == 1.0, "it did not recover")


def test_two_gateways_without_redis_are_refused_in_one_sentence(home: Path) -> None:
    command = [sys.executable, "-m", "headrace.cli.main", "serve", "--runner", "fake", "--gateways", "2", "--port", "0"]
    environment = {**os.environ, "HEADRACE_HOME": str(home)}  # noqa: TID251
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=2 * PATIENCE_S)
    assert ended.returncode == 2
    assert "more than one gateway needs Redis" in ended.stderr and ended.stderr.strip().count("\n") == 0
