"""Processors wait awake while requests are open, and half a second longer, where that is wanted and can be had."""

import asyncio
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.gateway.wakeful import Wakeful
from tests.unit.gateway.socket_rig import SocketScene, end, play
from tests.unit.gateway.stub import KEY, Call, ask, gateway, turns

AT_ONCE, WHENEVER = 0, 2_000_000_000
HEADERS = {"host": "localhost", "authorization": f"Bearer {KEY}"}


class Machine:
    """The files that a Linux has for it."""

    def __init__(self, folder: Path) -> None:
        self.device, self.states = folder / "cpu_dma_latency", folder / "cpuidle"
        self.device.touch()
        self.named("POLL")
        self.wakeful = Wakeful(self.device, self.states)

    def named(self, state: str) -> None:
        (self.states / "state0").mkdir(parents=True, exist_ok=True)
        (self.states / "state0" / "name").write_text(f"{state}\n")

    @property
    def asked(self) -> list[int]:
        """Of processors, so far."""
        words = self.device.read_bytes()
        return [int.from_bytes(words[at : at + 4], sys.byteorder) for at in range(0, len(words), 4)]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.wakeful.close()


def test_awake_from_the_first_request_until_a_beat_finds_none(machine: Machine) -> None:
    machine.wakeful.configure(True)
    machine.wakeful.rest()
    assert machine.asked == []
    machine.wakeful.stir()
    machine.wakeful.stir()
    assert machine.asked == [AT_ONCE]
    machine.wakeful.done()
    machine.wakeful.rest()
    machine.wakeful.rest()  # one is open
    machine.wakeful.done()
    machine.wakeful.stir()
    machine.wakeful.done()
    machine.wakeful.rest()  # one came since
    assert machine.asked == [AT_ONCE]
    machine.wakeful.rest()
    machine.wakeful.rest()
    assert machine.asked == [AT_ONCE, WHENEVER]
    machine.wakeful.stir()
    assert machine.asked == [AT_ONCE, WHENEVER, AT_ONCE]


def test_unless_it_is_told_to_it_opens_nothing(machine: Machine) -> None:
    machine.device.unlink()
    machine.wakeful.configure(False)
    machine.wakeful.stir()
    machine.wakeful.rest()
    assert not machine.device.exists()


def test_told_otherwise_while_it_runs(machine: Machine) -> None:
    machine.wakeful.configure(True)
    machine.wakeful.stir()
    machine.wakeful.configure(False)  # Linux forgets it with the file
    machine.wakeful.stir()
    assert machine.asked == [AT_ONCE]
    machine.device.write_bytes(b"")
    machine.wakeful.configure(True)
    machine.wakeful.configure(True)
    machine.wakeful.rest()  # two are still open
    assert machine.asked == [AT_ONCE]


def test_who_may_not_is_told_once_and_served(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.device.unlink()
    with caplog.at_level(logging.INFO, "headrace.gateway"):
        machine.wakeful.configure(True)
        machine.wakeful.configure(True)
        machine.wakeful.stir()
        machine.wakeful.rest()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"keep_awake: processors halt as before: {machine.device}: No such file or directory"


def test_a_wish_that_is_refused_is_not_made_again(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.wakeful = Wakeful(Path("/dev/full"), machine.states)
    machine.wakeful.configure(True)
    with caplog.at_level(logging.INFO, "headrace.gateway"):
        machine.wakeful.stir()
        machine.wakeful.stir()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "keep_awake: processors halt as before: /dev/full: No space left on device"


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("POLL", "processors wait awake while requests are open"),
        ("WFI", "keep_awake: processors halt as briefly as they can, in WFI: they cannot wait awake here"),
        (None, "keep_awake changes nothing here: this kernel has no driver for how processors wait"),
    ],
)
def test_it_says_whether_they_can(
    machine: Machine, caplog: pytest.LogCaptureFixture, state: str | None, told: str
) -> None:
    machine.named(state) if state else shutil.rmtree(machine.states)
    with caplog.at_level(logging.INFO, "headrace.gateway"):
        machine.wakeful.configure(True)
    assert [record.getMessage() for record in caplog.records] == [told]
    machine.wakeful.stir()
    assert machine.asked == ([AT_ONCE] if state else [])


def test_requests_of_a_gateway_keep_them_awake_and_probes_and_strangers_do_not(machine: Machine) -> None:
    app = gateway(wakeful=machine.wakeful, keep_awake=True)
    for path, status in (("/live", 200), ("/things/one", 401), ("/docs", 200), ("/metrics", 401)):
        assert ask(app, "GET", path).status == status
    assert machine.asked == []
    assert ask(app, "GET", "/things/one", HEADERS).status == 200
    assert machine.asked == [AT_ONCE]
    app.context.pulse.tick()
    assert machine.asked == [AT_ONCE]
    app.context.pulse.tick()
    assert machine.asked == [AT_ONCE, WHENEVER]


class Upgrade:
    """What a connection offers."""

    def __init__(self) -> None:
        self.connections: set[Any] = set()
        self.connection: Any = None

    def become(self, head: bytes, connection: Any) -> bool:
        self.connection = connection
        return True


def test_a_socket_that_is_merely_open_lets_them_halt(machine: Machine) -> None:
    app = gateway(wakeful=machine.wakeful, keep_awake=True)
    wanted = {"upgrade": "websocket", "connection": "Upgrade", "sec-websocket-version": "13"}
    call = Call(app, "GET", "/v1/stream", {**HEADERS, **wanted, "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA=="})
    upgrade = Upgrade()
    call.scope["state"] = {"offer": upgrade}

    async def run() -> None:
        answering = asyncio.create_task(call.run())
        await turns()
        app.context.pulse.tick()
        assert app.num_open == 1 and upgrade.connection is not None
        upgrade.connection.connection_lost(None)
        await answering

    asyncio.run(run())
    assert machine.asked == []


def test_what_is_asked_through_a_socket_keeps_them_awake(machine: Machine) -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts()
        await scene.passes(2)
        assert machine.asked == [AT_ONCE]
        await end(stream)
        await scene.passes(1)
        assert machine.asked == [AT_ONCE, WHENEVER]

    play(story, wakeful=machine.wakeful, keep_awake=True)


def test_one_that_is_broken_off_is_over(machine: Machine) -> None:
    app = gateway(wakeful=machine.wakeful, keep_awake=True)

    async def run() -> None:
        call = Call(app, "GET", "/things/one", HEADERS)
        call.hold()
        answering = asyncio.create_task(call.run())
        await turns()
        assert machine.asked == [AT_ONCE] and app.num_open == 1
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)

    asyncio.run(run())
    app.context.pulse.tick()
    app.context.pulse.tick()
    assert app.num_open == 0 and machine.asked == [AT_ONCE, WHENEVER]


def test_as_long_as_one_is_open(machine: Machine) -> None:
    app = gateway(wakeful=machine.wakeful, keep_awake=True)

    async def run() -> list[int]:
        call = Call(app, "GET", "/things/one", HEADERS)
        call.hold()
        answering = asyncio.create_task(call.run())
        await turns()
        for _ in range(5):
            app.context.pulse.tick()
        while_open = machine.asked
        call.release()
        await answering
        return while_open

    assert asyncio.run(run()) == [AT_ONCE]
    app.context.pulse.tick()
    assert machine.asked == [AT_ONCE, WHENEVER]


def test_a_gateway_follows_its_configuration(machine: Machine) -> None:
    app = gateway(wakeful=machine.wakeful)
    ask(app, "GET", "/things/one", HEADERS)
    assert machine.asked == []
    app.reconfigure(replace(app.context.config, keep_awake=True))
    for _ in range(3):
        ask(app, "GET", "/things/one", HEADERS)
    assert machine.asked == [AT_ONCE]
