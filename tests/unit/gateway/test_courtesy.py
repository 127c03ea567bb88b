"""A client on this machine goes before the books, unless others wait or the machine is busy."""

import asyncio
import os
import select
import socket

import pytest

from headrace.gateway import courtesy
from headrace.gateway.app import Gateway
from headrace.gateway.courtesy import Courtesy
from headrace.gateway.exchange import Exchange
from headrace.gateway.routes import Route
from tests.unit.gateway.live import PATIENCE_S, play, running
from tests.unit.gateway.stub import KEY, gateway

HEADERS = (
    b" HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %s\r\ncontent-type: application/json\r\n" % KEY.encode()
)
WAITS = b"POST /whole" + HEADERS + b"content-length: 2\r\n\r\n{}"
SAID = b'content-length: 15\r\n\r\n{"text":"word"}'


class Scene:
    """A gateway at a real port, in whose order of things one is interested."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        self.is_over = asyncio.Event()
        self.client: socket.socket | None = None
        finish = Gateway._finish

        def keep_books(gateway: Gateway, exchange: Exchange, route: Route | None, over_s: float) -> None:
            self.order.append("books")
            self.is_over.set()
            finish(gateway, exchange, route, over_s)

        monkeypatch.setattr(Gateway, "_finish", keep_books)
        monkeypatch.setattr(os, "sched_yield", self._yield)

    def _yield(self) -> None:
        is_out = self.client is not None and bool(select.select([self.client], [], [], 0)[0])
        self.order.append("aside, answered" if is_out else "aside, unanswered")

    async def ask(self, port: int, request: bytes) -> list[str]:
        self.order.clear()
        self.is_over.clear()
        with socket.create_connection(("127.0.0.1", port)) as self.client:
            self.client.sendall(request)
            async with asyncio.timeout(PATIENCE_S):
                await self.is_over.wait()
        return self.order


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(b"GET /live" + HEADERS + b"\r\n", id="plain"),
        pytest.param(b"HEAD /live" + HEADERS + b"\r\n", id="head alone"),
        pytest.param(b"GET /nothing" + HEADERS + b"\r\n", id="refused"),
        pytest.param(b"POST /whole" + HEADERS + SAID, id="whole"),
        pytest.param(b"POST /say" + HEADERS + SAID, id="streamed"),
    ],
)
def test_a_client_has_its_answer_and_goes_before_the_books(
    request_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        scene = Scene(monkeypatch)
        async with running(gateway()) as live:
            assert await scene.ask(live.port, request_bytes) == ["aside, answered", "books"]

    play(story())


def test_nobody_goes_first_while_another_request_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        scene = Scene(monkeypatch)
        app = gateway()
        async with running(app) as live:
            waiting = await live.connect()
            await waiting.send(WAITS)
            async with asyncio.timeout(PATIENCE_S):
                while not app.num_open:
                    await asyncio.sleep(0.001)
            assert await scene.ask(live.port, b"GET /live" + HEADERS + b"\r\n") == ["books"]

    play(story())


@pytest.mark.parametrize("address", ["10.0.0.1", "fe80::1", "1270.example", ""])
def test_a_client_elsewhere_cannot_wait_for_this_core(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_yield", lambda: pytest.fail("stepped aside"))
    Courtesy().step_aside(address)


class Turns:
    """A clock, and a core that comes back after `away_s` whenever somebody steps aside."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.away_s, self.count = 100.0, 0.0001, 0
        monkeypatch.setattr(os, "sched_yield", self._leave)
        monkeypatch.setattr(courtesy, "monotonic", lambda: self.now_s)

    def _leave(self) -> None:
        self.now_s += self.away_s
        self.count += 1

    def asides(self, courteous: Courtesy, address: str, away_s: float, answers: int, every_s: float) -> int:
        """How often it steps aside for so many answers."""
        before, self.away_s = self.count, away_s
        for _ in range(answers):
            courteous.step_aside(address)
            self.now_s += every_s
        return self.count - before


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1"])
@pytest.mark.parametrize("away_s", [0.0006, 0.004, 0.015])
@pytest.mark.parametrize("late_of", [1, 2, 7])
def test_on_a_busy_machine_it_costs_a_fiftieth_of_the_time(
    address: str, away_s: float, late_of: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, courteous = Turns(monkeypatch), Courtesy()
    began_s, late = turns.now_s, 0
    for answer in range(20_000):
        is_late = answer % late_of == 0
        late += turns.asides(courteous, address, away_s if is_late else 0.0, 1, 0.001) * is_late
    assert 0.001 <= late * away_s / (turns.now_s - began_s) <= 0.02


def test_after_a_client_that_took_a_little_longer_it_is_tried_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, courteous = Turns(monkeypatch), Courtesy()
    assert turns.asides(courteous, "127.0.0.1", 0.0001, 10, 0.0) == 10
    assert turns.asides(courteous, "127.0.0.1", 0.0006, 10, 0.0025) == 1
    assert turns.asides(courteous, "127.0.0.1", 0.0001, 10, 0.005) >= 8


def test_after_a_very_long_time_it_is_tried_again_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, courteous = Turns(monkeypatch), Courtesy()
    assert turns.asides(courteous, "127.0.0.1", 5.0, 1, 0.999) == 1
    assert turns.asides(courteous, "127.0.0.1", 0.0001, 1, 0.002) == 0
    assert turns.asides(courteous, "127.0.0.1", 0.0001, 1, 0.0) == 1
