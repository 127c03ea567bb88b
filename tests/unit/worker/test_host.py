"""A worker's life in this process: from loading to gone, over links in memory."""

import asyncio
import threading
from typing import Any

import pytest

from headrace.core.config import CostProfile, EngineConfig
from headrace.core.errors import ModelTooLarge
from headrace.core.event import Outcome
from headrace.core.messages import PROTOCOL, Ack, Beat, Frame, FromWorker, Goodbye, Hello, Submit, Welcome, WorkerState
from headrace.core.plan import Plan
from headrace.core.ports import Link
from headrace.core.request import Request
from headrace.runner.fake import FakeRunner
from headrace.runner.faults import Faults
from headrace.transport.memory import MemoryNetwork
from headrace.worker import host as host_module
from headrace.worker.mounting import MountedModel, Report
from headrace.worker.watchdog import Watchdog
from tests.builders import engine_config, part, request
from tests.unit.worker.rig import Ear, fake_host, fake_model, ready, replicas_of, truth_of


class Stranger:
    """A gateway that acknowledges only when told to."""

    def __init__(self) -> None:
        self.heard: list[FromWorker] = []
        self.why = ""
        self.changed = asyncio.Event()

    def received(self, message: FromWorker) -> None:
        self.heard.append(message)
        self.changed.set()

    def closed(self, why: str) -> None:
        self.why = why
        self.changed.set()

    @property
    def frames(self) -> list[Frame]:
        return [message for message in self.heard if isinstance(message, Frame)]

    @property
    def num_tokens(self) -> int:
        return sum(len(frame.rows()) for frame in self.frames)

    async def until(self, done: object) -> None:
        assert callable(done)
        async with asyncio.timeout(60):
            while not done():
                self.changed.clear()
                await self.changed.wait()


async def dial(network: MemoryNetwork, gateway: str | None = "g") -> tuple[Stranger, Link]:
    stranger = Stranger()
    link = await network.dial("worker", lambda _: stranger, FromWorker)
    if gateway is not None:
        link.send(Hello(PROTOCOL, gateway))
    return stranger, link


def test_states_are_seen_from_the_first_moment_on() -> None:
    async def story() -> None:
        network, go = MemoryNetwork(), threading.Event()

        def mount(report: Report) -> MountedModel:
            report(0.25, "weights")
            go.wait()
            return fake_model()(report)

        async with fake_host(network, mount=mount).embedded():
            stranger, _ = await dial(network)
            await stranger.until(lambda: any(isinstance(heard, Beat) and heard.progress for heard in stranger.heard))
            welcome = stranger.heard[0]
            assert isinstance(welcome, Welcome) and welcome.state is WorkerState.LOADING and not welcome.card.slots
            go.set()
            await stranger.until(lambda: WorkerState.READY in [b.state for b in stranger.heard if isinstance(b, Beat)])
        beats = [heard for heard in stranger.heard if isinstance(heard, Beat)]
        assert list(dict.fromkeys(beat.state for beat in beats)) == [
            WorkerState.LOADING,
            WorkerState.VERIFYING,
            WorkerState.WARMING,
            WorkerState.READY,
            WorkerState.DRAINING,
            WorkerState.GONE,
        ]
        assert next(beat.note for beat in beats if beat.progress == 0.25) == "weights"
        assert beats[-1].card.slots == 4 and beats[-1].card.fingerprint == "f"

    asyncio.run(story())


def test_a_model_that_does_not_fit_is_a_failure_that_says_why() -> None:
    async def story() -> None:
        network = MemoryNetwork()

        def mount(report: Report) -> MountedModel:
            raise ModelTooLarge("it does not\nfit")

        host = fake_host(network, mount=mount)
        async with host.embedded():
            stranger, _ = await dial(network)
        last = stranger.heard[-1]
        assert isinstance(last, Beat) and last.state is WorkerState.FAILED and last.note == "it does not fit"

    asyncio.run(story())


def test_a_device_that_dies_takes_its_sequences_and_the_gateway_hears_of_it() -> None:
    async def story() -> None:
        network, ear, faults = MemoryNetwork(), Ear(), Faults()
        config = engine_config()
        runner = FakeRunner(config)
        replicas = replicas_of(network, ear)
        host = fake_host(network, mount=fake_model(config, runner=runner))
        await replicas.start()
        async with host.embedded():
            replica = await ready(replicas, ear)
            faults.die(5)
            runner.faults = faults
            replica.submit(part(1, request("a", 8, 50)))
            await ear.all_over([1])
            assert ear.lost_keys == [1] and not replica.is_ready
            assert replica.state is WorkerState.FAILED and "died" in replica.note
        await replicas.close()

    asyncio.run(story())


def submit_long(link: Link, key: int = 1) -> Request:
    made = request("long", 8, 200)
    link.send(Submit((part(key, made),)))
    return made


async def serving(network: MemoryNetwork, gateway: str = "g") -> tuple[Stranger, Link]:
    stranger, link = await dial(network, gateway)
    await stranger.until(lambda: any(isinstance(b, Beat) and b.state is WorkerState.READY for b in stranger.heard))
    return stranger, link


def test_a_gateway_that_does_not_acknowledge_is_paused_and_goes_on_when_it_does() -> None:
    async def story() -> None:
        network = MemoryNetwork()
        host = fake_host(network, max_outbox_bytes=4000)
        async with host.embedded():
            stranger, link = await serving(network)
            made = submit_long(link)
            most = 4000 // 160
            await stranger.until(lambda: stranger.num_tokens and not host.lifecycle.load.used_blocks)
            assert len(stranger.frames) <= most + 1
            while stranger.num_tokens < 200:
                link.send(Ack(stranger.frames[-1].number))
                seen = len(stranger.heard)
                await stranger.until(lambda seen=seen: len(stranger.heard) > seen)
            tokens = [token for frame in stranger.frames for _, _, token in frame.rows()]
            assert tokens == truth_of(made)
            assert [frame.number for frame in stranger.frames] == list(range(1, len(stranger.frames) + 1))
            link.send(Ack(stranger.frames[-1].number))

    asyncio.run(story())


@pytest.mark.parametrize("goodbye", [False, True])
def test_a_gateway_that_leaves_or_stays_away_frees_what_it_had(goodbye: bool) -> None:
    async def story() -> None:
        network = MemoryNetwork()
        runner = FakeRunner(engine_config(), sleep=True)
        host = fake_host(network, mount=fake_model(runner=runner), orphan_s=600.0 if goodbye else 0.0)
        async with host.embedded():
            stranger, link = await serving(network)
            submit_long(link)
            await stranger.until(lambda: stranger.num_tokens > 3)
            if goodbye:
                link.send(Goodbye())
            link.close()
            watcher, _ = await serving(network, "other")
            await watcher.until(lambda: isinstance(last := watcher.heard[-1], Beat) and not last.load.used_blocks)
            assert stranger.num_tokens < 200

    asyncio.run(story())


def test_a_second_connection_of_a_gateway_replaces_the_first() -> None:
    async def story() -> None:
        network = MemoryNetwork()
        async with fake_host(network).embedded():
            first, _ = await serving(network)
            await serving(network)
            await first.until(lambda: first.why)

    asyncio.run(story())


@pytest.mark.parametrize("opening", [Ack(1), Hello(PROTOCOL + 1, "g")])
def test_who_does_not_greet_properly_is_not_served(opening: Ack | Hello) -> None:
    async def story() -> None:
        network = MemoryNetwork()
        async with fake_host(network).embedded():
            stranger, link = await dial(network, None)
            link.send(opening)
            await stranger.until(lambda: stranger.why)
            assert stranger.heard == []

    asyncio.run(story())


def test_told_to_leave_while_it_loads_it_leaves() -> None:
    async def story() -> None:
        network = MemoryNetwork()
        go = threading.Event()

        def mount(report: Report) -> MountedModel:
            go.wait()
            report(0.5, "half")
            raise AssertionError("it should have left")

        host = fake_host(network, mount=mount)
        async with host.embedded():
            host.drain(10.0)
            go.set()
        assert host.lifecycle.state is WorkerState.GONE

    asyncio.run(story())


def test_run_keeps_a_loop_of_its_own_and_returns_the_exit_code() -> None:
    host = fake_host(MemoryNetwork())
    host.lifecycle.listen(lambda: host.drain(0.0) if host.lifecycle.state is WorkerState.READY else None)
    assert host.run() == 0
    assert fake_host(MemoryNetwork(), mount=_broken).run() == 1


def _broken(report: Report) -> MountedModel:
    raise ValueError("no model here")


def test_the_straggler_over_links() -> None:
    async def story() -> None:
        network, ear = MemoryNetwork(), Ear()
        config = engine_config(slots=16, blocks=256, context_len=512)
        replicas = replicas_of(network, ear)
        await replicas.start()
        async with fake_host(network, mount=fake_model(config)).embedded():
            replica = await ready(replicas, ear)
            made = {key: request(f"r{key}", 8, 10 if key else 400) for key in range(16)}
            for key, one in made.items():
                replica.submit(part(key, one))
            await ear.all_over(list(made))
            assert ear.order[-1] == 0 and len(ear.frames) >= 400
            short_steps = max(frame.step for frame in ear.frames if any(end.key for end in frame.ended))
            assert short_steps < 30
            assert all(ear.tokens[key] == truth_of(one, config) for key, one in made.items())
            assert ear.outcomes() == {Outcome.FINISHED: 16}
            await replicas.close()

    asyncio.run(story())


class Held(FakeRunner):
    """Its steps begin when they may."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.may = threading.Event()

    def launch(self, plan: Plan) -> None:
        self.may.wait()
        super().launch(plan)


def test_every_beat_says_whether_nobody_waits_for_anything() -> None:
    async def story() -> None:
        network, told = MemoryNetwork(), asyncio.Queue[bool]()
        config = engine_config()
        held = Held(config)
        host = fake_host(network, mount=fake_model(config, runner=held), sweep=told.put_nowait)
        async with host.embedded(), asyncio.timeout(60):
            assert not await told.get(), "it is not ready"
            held.may.set()
            stranger, link = await serving(network)
            while not await told.get():
                pass
            held.may.clear()
            submit_long(link)
            while await told.get():
                pass
            held.may.set()
            await stranger.until(lambda: stranger.num_tokens == 200)
            while not await told.get():
                pass

    asyncio.run(story())


def test_only_those_who_compute_are_asked_what_they_waited_for_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread and a library's: of Python's others nobody holds up a step."""
    dogs: list[Any] = []
    left_out: list[set[int]] = []

    class Dog(Watchdog):
        def __init__(self, *given: Any) -> None:
            dogs.append(given)
            super().__init__(*given)

    def waited(without: set[int]) -> float:
        left_out.append(without)
        return 7.0

    monkeypatch.setattr(host_module, "Watchdog", Dog)
    monkeypatch.setattr("headrace.core.proc.waited_s", waited)
    host = fake_host(MemoryNetwork())
    others: list[int] = []

    def leave() -> None:
        if host.lifecycle.state is WorkerState.READY:
            ((_, waited_s),) = dogs
            assert waited_s() == 7.0
            others.extend(thread.native_id or 0 for thread in threading.enumerate())
            host.drain(0.0)

    host.lifecycle.listen(leave)
    assert host.run() == 0
    mine = threading.get_native_id()
    assert mine in others and len(others) > 1
    assert left_out == [set(others) - {mine}]


@pytest.mark.parametrize(("depth", "is_seen"), [(1, True), (2, False)])
def test_steps_of_the_golden_probe_count_where_each_runs_alone(
    depth: int, is_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config()
    told: list[Any] = []

    def measure(*words: object) -> CostProfile:
        told.append(words[-1])
        return config.profile

    monkeypatch.setattr(host_module, "measure_profile", measure)
    host = fake_host(MemoryNetwork(), mount=lambda _: MountedModel(FakeRunner(config, depth=depth), config))
    host.lifecycle.listen(lambda: host.drain(0.0) if host.lifecycle.state is WorkerState.READY else None)
    assert host.run() == 0
    (seen,) = told
    assert bool(seen) is is_seen
    assert not is_seen or [work.decode_rows for work, _ in seen] == 2 * [0, 1, 1, 1, 1, 1, 1, 1]
