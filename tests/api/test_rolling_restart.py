"""Every gateway and every worker is restarted, one after the other, while clients go on asking: nobody notices."""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import openai

from tests.api.live_server import PATIENCE_S, LiveServer, eventually, live_server
from tests.api.test_several_gateways import begin, connected, content, folder, two_gateways

__all__ = ["folder"]
PER_SECOND = 50
NUM_THREADS = 10
BODY = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


class Load(threading.Thread):
    """One of several clients that ask together so many times a second, until `over`."""

    def __init__(self, ask: Callable[[int], None], over: threading.Event) -> None:
        super().__init__()
        self.num_asked = 0
        self.failures: list[str] = []
        self._ask = ask
        self._over = over
        self.start()

    def run(self) -> None:
        next_s = time.monotonic()
        while not self._over.is_set():
            try:
                self._ask(self.num_asked)
            except Exception as failed:  # noqa: BLE001 - counted, whatever it is
                self.failures.append(repr(failed))
            self.num_asked += 1
            next_s += NUM_THREADS / PER_SECOND
            time.sleep(max(0.0, next_s - time.monotonic()))


def asks_with_a_connection_each(server: LiveServer) -> Callable[[int], None]:
    def ask(number: int) -> None:
        if number % 2:
            assert list(server.stream(**BODY))
        else:
            status, answer = server.ask("POST", "/v1/chat/completions", BODY)
            assert status == 200, answer

    return ask


def asks_as_the_official_client(server: LiveServer) -> Callable[[int], None]:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key)

    def ask(number: int) -> None:
        if number % 2:
            assert list(client.chat.completions.create(**BODY, stream=True))  # type: ignore[call-overload]
        else:
            assert client.chat.completions.create(**BODY).choices  # type: ignore[call-overload]

    return ask


def rolled(server: LiveServer) -> None:
    server.signal(signal.SIGUSR2)
    eventually(lambda: "all gateways and workers were restarted" in server.said(), "it did not end", within_s=240.0)


def test_no_request_fails_while_everything_is_restarted(home: Path, folder: Path) -> None:
    with two_gateways(home, folder) as server:
        before = server.children()
        over = threading.Event()
        clients = [asks_with_a_connection_each(server), asks_as_the_official_client(server)]
        loads = [Load(clients[number % 2], over) for number in range(NUM_THREADS)]
        try:
            rolled(server)
        finally:
            over.set()
            for load in loads:
                load.join(PATIENCE_S)
        assert [failure for load in loads for failure in load.failures] == [], server.said()
        assert all(load.num_asked > 5 for load in loads)
        after = server.children()
        named = [name for name in before if name.startswith(("headrace: gateway", "headrace: worker"))]
        assert len(named) == 4 and all(before[name] != after[name] for name in named)


def test_a_stream_longer_than_the_time_to_finish_is_read_on_elsewhere(home: Path, folder: Path) -> None:
    with two_gateways(home, folder, drain_s=1) as server:
        with connected(server, 1) as first:
            lost = begin(first, "long", 4000)
            rolled(server)
            heard = list(lost)
        assert heard and b"data: [DONE]\n" not in heard, "it was ended, not left"
        last = max(int(line[4:]) for line in heard if line.startswith(b"id: "))
        with connected(server, 0) as one, connected(server, 1) as two:
            response = one.send("GET", "/v1/streams/long")
            again = list(lines_until(response, last + 20))
            assert again[1 : 1 + len(heard)] == heard[: len(again) - 1]
            assert two.send("DELETE", "/v1/streams/long").status == 204
            assert content(response)[1]


def lines_until(response: Iterable[bytes], number: int) -> Iterator[bytes]:
    """Of a stream, up to the frame of that number."""
    for line in response:
        yield line
        if line == b"id: %d\n" % number:
            return
    raise AssertionError("it did not go on")


def test_asked_of_one_gateway_only_the_workers_are_restarted(home: Path) -> None:
    with live_server(home, "--runner", "fake", "--workers", "2") as server:
        before = server.children()
        server.signal(signal.SIGUSR2)
        eventually(lambda: "the workers were restarted" in server.said(), "it did not end", within_s=240.0)
        after = server.children()
        named = [name for name in before if name.startswith(("headrace: gateway", "headrace: worker"))]
        assert len(named) == 3
        assert {name for name in named if before[name] != after.get(name)} == {
            "headrace: worker fake 0",
            "headrace: worker fake 1",
        }
        assert server.text(max_tokens=5)
