"""The supervisor over several gateways: each lives for itself, all are told, and one after the other is replaced."""

import asyncio
import signal
from collections.abc import Awaitable, Callable

import pytest

from headrace.cluster.local import Command
from headrace.control.child import Child
from headrace.control.orders import Step
from headrace.control.supervisor import Supervisor
from headrace.core.messages import WorkerState
from headrace.transport.memory import MemoryNetwork
from tests.unit.control.stage import LISTENING, ActedLauncher, ActedProcess, ActedWorker, reported
from tests.unit.control.virtual_loop import VirtualLoop, play

READY = WorkerState.READY
WHOLE = reported(Step.SERVING, is_whole=True)
LACKING = reported(Step.SERVING)
GATEWAYS = ("gateway 0", "gateway 1")
WORKERS = ("worker 0", "worker 1")


class Scene:
    """Two gateways, two workers."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.launcher = ActedLauncher()
        self.workers = {name: ActedWorker(self.network, name) for name in WORKERS}
        self.told: list[str] = []
        self.ups = 0
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.supervisor = Supervisor(
            [Child(name, lambda name=name: Command((name,), talks=True)) for name in GATEWAYS],  # type: ignore[misc]
            [Child(name, lambda name=name: Command((name,)), name) for name in WORKERS],  # type: ignore[misc]
            self.launcher,
            self.network,
            loop,
            gateway_s=10.0,
            tell=self.told.append,
            warn=self.told.append,
            heard=lambda child, beat: None,
            up=self.up,
        )
        self.running = asyncio.create_task(self.supervisor.run())

    def up(self) -> None:
        self.ups += 1

    def last(self, name: str) -> ActedProcess:
        return self.launcher.last(name)

    async def comes_up(self) -> None:
        await asyncio.sleep(0.1)
        for name in WORKERS:
            await self.workers[name].is_in(READY, self.last(name).pid)
        for name in GATEWAYS:
            self.last(name).say(WHOLE)
        await asyncio.sleep(0.1)

    async def comes_back(self, name: str, old: ActedProcess) -> None:
        """The next life of a child that was told to end."""
        await asyncio.sleep(0.5)
        assert not old.is_alive and self.last(name) is not old
        if name in WORKERS:
            for gateway in GATEWAYS:
                self.last(gateway).say(LACKING)
            await self.workers[name].is_in(READY, self.last(name).pid)
        for gateway in GATEWAYS:
            self.last(gateway).say(WHOLE)
        await asyncio.sleep(0.5)


def staged(story: Callable[[Scene], Awaitable[None]]) -> Scene:
    async def whole() -> Scene:
        scene = Scene()
        try:
            await story(scene)
        finally:
            scene.supervisor.kill_all()
            scene.running.cancel()
            await asyncio.gather(scene.running, return_exceptions=True)
        return scene

    return play(whole())


def test_it_is_up_when_all_of_them_serve() -> None:
    async def story(scene: Scene) -> None:
        await asyncio.sleep(0.1)
        for name in WORKERS:
            await scene.workers[name].is_in(READY, scene.last(name).pid)
        scene.last("gateway 0").say(WHOLE)
        scene.last("gateway 1").say(LISTENING)
        await asyncio.sleep(1.0)
        assert scene.ups == 0
        scene.last("gateway 1").say(WHOLE)
        await asyncio.sleep(1.0)
        assert scene.ups == 1

    staged(story)


def test_one_that_dies_is_started_again_alone() -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        scene.last("gateway 1").end(-9)
        await asyncio.sleep(1.0)
        assert [len(scene.launcher.started[name]) for name in (*GATEWAYS, *WORKERS)] == [1, 2, 1, 1]

    assert staged(story).told == ["gateway 1 died (SIGKILL); starting it again in 0.1 s"]


def test_a_reload_reaches_each_that_does_not_follow_it_yet() -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        scene.last("gateway 1").say(reported(Step.SERVING, version=1, is_whole=True))
        await asyncio.sleep(0.1)
        scene.supervisor.reload_gateways(1)
        assert [scene.last(name).signals for name in GATEWAYS] == [[signal.SIGHUP], []]

    staged(story)


def test_all_gateways_end_before_the_first_worker() -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        scene.last("gateway 1").resists.add(signal.SIGTERM)
        scene.supervisor.stop()
        await asyncio.sleep(5.0)
        assert not scene.last("gateway 0").is_alive and scene.last("gateway 1").signals == [signal.SIGTERM]
        assert [scene.last(name).signals for name in WORKERS] == [[], []]
        scene.last("gateway 1").end(0)
        assert await scene.running == 0

    assert staged(story).told == []


def test_all_are_replaced_one_after_the_other() -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        first = {name: scene.last(name) for name in (*WORKERS, *GATEWAYS)}
        scene.supervisor.roll()
        scene.supervisor.roll()
        for number, (name, process) in enumerate(first.items()):
            await scene.comes_back(name, process)
            assert [scene.last(each) is not first[each] for each in first].count(True) == min(number + 2, 4)
            how = signal.SIGTERM if name in WORKERS else signal.SIGUSR1
            assert process.signals == [how]
        assert {len(processes) for processes in scene.launcher.started.values()} == {2}

    assert staged(story).told == [
        *(line for name in (*WORKERS, *GATEWAYS) for line in (f"{name} is restarted", f"{name} is back")),
        "all gateways and workers were restarted",
    ]


def test_the_next_is_not_taken_away_before_every_gateway_has_found_the_last() -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        scene.supervisor.roll()
        await asyncio.sleep(0.5)
        for gateway in GATEWAYS:
            scene.last(gateway).say(LACKING)
        await scene.workers["worker 0"].is_in(READY, scene.last("worker 0").pid)
        scene.last("gateway 0").say(WHOLE)
        await asyncio.sleep(5.0)
        assert scene.last("worker 1").signals == []
        scene.last("gateway 1").say(WHOLE)
        await asyncio.sleep(1.0)
        assert len(scene.launcher.started["worker 1"]) == 2

    staged(story)


def test_one_that_does_not_leave_is_killed() -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        process = scene.last("worker 0")
        process.resists.add(signal.SIGTERM)
        scene.supervisor.roll()
        await asyncio.sleep(6.0)
        assert process.signals == [signal.SIGTERM, signal.SIGKILL] and scene.last("worker 0") is not process

    assert staged(story).told == ["worker 0 is restarted", "worker 0 did not end in 5 s and is killed"]


def test_told_to_stop_it_replaces_nobody_any_more() -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        scene.last("worker 0").resists.add(signal.SIGTERM)
        scene.supervisor.roll()
        await asyncio.sleep(0.1)
        scene.last("gateway 0").resists.add(signal.SIGTERM)
        scene.supervisor.stop()
        scene.last("worker 0").end(0)
        await asyncio.sleep(5.0)
        assert scene.last("worker 1").signals == [] and len(scene.launcher.started["worker 0"]) == 1
        scene.last("gateway 0").end(0)
        assert await scene.running == 0

    staged(story)


def test_before_it_is_up_nothing_is_restarted() -> None:
    async def story(scene: Scene) -> None:
        await asyncio.sleep(0.1)
        scene.supervisor.roll()
        await asyncio.sleep(0.1)
        assert all(scene.last(name).signals == [] for name in (*GATEWAYS, *WORKERS))

    assert staged(story).told == ["not restarted: the server is not up yet"]


@pytest.mark.parametrize("name", [*GATEWAYS, *WORKERS])
def test_nobody_is_taken_away_while_another_is_gone(name: str) -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        gone = scene.last(name)
        scene.launcher.refuse = OSError("no more processes")
        gone.end(-9)
        await asyncio.sleep(0.05)
        scene.supervisor.roll()
        await asyncio.sleep(5.0)
        assert not any(scene.last(each).signals for each in (*GATEWAYS, *WORKERS))
        scene.launcher.refuse = None
        await asyncio.sleep(5.0)
        assert scene.last(name) is not gone
        await scene.comes_back(name, gone)
        assert scene.last("worker 0").signals or len(scene.launcher.started["worker 0"]) > 1

    staged(story)
