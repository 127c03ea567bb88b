"""The supervisor: children start again after a wait, the server is up once, and it ends in order."""

import asyncio
import errno
import signal
from collections.abc import Awaitable, Callable

import pytest

from headrace.cluster.local import Command
from headrace.control.child import Child
from headrace.control.orders import Step
from headrace.control.supervisor import LAST_WORDS_S, StartFailed, Supervisor
from headrace.core.messages import Beat, WorkerState
from headrace.transport.memory import MemoryNetwork
from tests.unit.control.stage import LISTENING, SERVING, ActedLauncher, ActedWorker, reported
from tests.unit.control.virtual_loop import VirtualLoop, play

READY, LOADING, FAILED = WorkerState.READY, WorkerState.LOADING, WorkerState.FAILED
GATEWAY_S = 10.0


class Scene:
    """One gateway, one worker, and what a person was told."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.launcher = ActedLauncher()
        self.worker = ActedWorker(self.network, "w0")
        self.told: list[str] = []
        self.beats: list[Beat] = []
        self.ups = 0
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self.supervisor = Supervisor(
            [Child("gateway", lambda: Command(("gateway",), talks=True))],
            [Child("worker m 0", lambda: Command(("worker",)), "w0")],
            self.launcher,
            self.network,
            loop,
            gateway_s=GATEWAY_S,
            tell=self.told.append,
            warn=self.told.append,
            heard=lambda child, beat: self.beats.append(beat),
            up=self.up,
        )
        self.running = asyncio.create_task(self.supervisor.run())

    def up(self) -> None:
        self.ups += 1

    async def comes_up(self) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.launcher.last("gateway").say(b"a library prints this\n")
        self.launcher.last("gateway").say(LISTENING)
        await self.worker.is_in(READY, self.launcher.last("worker").pid)
        self.launcher.last("gateway").say(SERVING)
        await asyncio.sleep(0.1)

    async def passes(self, seconds: float) -> None:
        """Time, in which gateway and worker show that they live."""
        for _ in range(int(seconds / 20) + 1):
            await asyncio.sleep(20.0)
            self.launcher.last("gateway").say(SERVING)
            await self.worker.is_in(READY, self.launcher.last("worker").pid)


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


def test_it_is_up_once_when_the_gateway_has_found_ready_workers() -> None:
    async def story(scene: Scene) -> None:
        await asyncio.sleep(1.0)
        await scene.worker.is_in(LOADING, scene.launcher.last("worker").pid)
        scene.launcher.last("gateway").say(LISTENING)
        await scene.worker.is_in(READY, scene.launcher.last("worker").pid)
        await asyncio.sleep(1.0)
        assert scene.ups == 0
        scene.launcher.last("gateway").say(SERVING)
        await asyncio.sleep(1.0)
        scene.launcher.last("gateway").say(SERVING)
        await asyncio.sleep(1.0)
        assert scene.ups == 1 and scene.told == []

    assert [beat.state for beat in staged(story).beats] == [LOADING, READY]


def test_a_dead_worker_comes_back_after_a_wait_that_grows() -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        for wait_s in (0.1, 0.2, 0.4):
            scene.launcher.last("worker").end(-9)
            num_before = len(scene.launcher.started["worker"])
            await asyncio.sleep(wait_s - 0.01)
            assert len(scene.launcher.started["worker"]) == num_before
            await asyncio.sleep(0.02)
            assert len(scene.launcher.started["worker"]) == num_before + 1
        await scene.worker.is_in(READY, scene.launcher.last("worker").pid)
        assert len(scene.launcher.started["gateway"]) == 1 and scene.ups == 1

    assert staged(story).told == [
        "worker m 0 died (SIGKILL); starting it again in 0.1 s",
        "worker m 0 died (SIGKILL), 2 times in a row; starting it again in 0.2 s",
        "worker m 0 died (SIGKILL), 3 times in a row; starting it again in 0.4 s",
        "worker m 0 is back",
    ]


def test_a_healthy_minute_is_forgiven() -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        for _ in range(3):
            await scene.passes(61.0)
            scene.launcher.last("gateway").end(1)
            await asyncio.sleep(1.0)
            scene.launcher.last("gateway").say(LISTENING)
            await asyncio.sleep(1.0)

    assert staged(story).told[0::2] == ["gateway died (exit code 1); starting it again in 0.1 s"] * 3


@pytest.mark.parametrize("silent", ["worker", "gateway"])
def test_a_child_that_falls_silent_is_killed_and_replaced(silent: str) -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        first = {name: scene.launcher.last(name) for name in ("worker", "gateway")}
        await scene.passes(200.0)
        assert all(process.is_alive for process in first.values())
        for _ in range(4):
            await asyncio.sleep(10.0)
            if silent == "worker":
                first["gateway"].say(SERVING)
            else:
                await scene.worker.is_in(READY, first["worker"].pid)
        for name, process in first.items():
            assert process.signals == ([signal.SIGKILL] if name == silent else [])
            assert (scene.launcher.last(name) is not process) == (name == silent)

    name = {"worker": "worker m 0", "gateway": "gateway"}[silent]
    assert staged(story).told == [
        f"{name} has been silent for 30 s and is killed",
        f"{name} died (SIGKILL); starting it again in 0.1 s",
    ]


def test_children_that_hang_before_their_first_word_are_killed() -> None:
    async def story(scene: Scene) -> None:
        await asyncio.sleep(119.0)
        assert all(scene.launcher.last(name).is_alive for name in ("gateway", "worker"))
        await asyncio.sleep(3.0)
        assert [len(processes) for processes in scene.launcher.started.values()] == [2, 2]

    assert "worker m 0 has been silent for 120 s and is killed" in staged(story).told


def test_a_time_in_which_it_stood_still_itself_is_no_silence() -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        scene.loop.jumping.now_s += 1000.0
        await scene.passes(30.0)
        assert [len(processes) for processes in scene.launcher.started.values()] == [1, 1]

    assert staged(story).told == []


def test_beats_of_an_earlier_life_are_not_believed() -> None:
    async def story(scene: Scene) -> None:
        await asyncio.sleep(0.1)
        scene.launcher.last("gateway").say(LISTENING)
        await scene.worker.is_in(READY, pid=1)
        scene.launcher.last("gateway").say(SERVING)
        await asyncio.sleep(1.0)
        assert (scene.ups, scene.beats) == (0, [])

    staged(story)


def test_what_cannot_start_says_why_and_ends_the_start() -> None:
    async def story(scene: Scene) -> None:
        await asyncio.sleep(0.1)
        await scene.worker.is_in(FAILED, scene.launcher.last("worker").pid, note="the weights do not fit")
        scene.launcher.last("worker").end(1)
        with pytest.raises(StartFailed, match="worker m 0 cannot start: the weights do not fit"):
            await scene.running
        assert not scene.launcher.last("gateway").is_alive

    staged(story)


def test_a_worker_that_is_killed_while_it_loads_is_started_again() -> None:
    async def story(scene: Scene) -> None:
        await asyncio.sleep(0.1)
        scene.launcher.last("worker").end(-9)
        await asyncio.sleep(0.6)
        await scene.comes_up()
        assert scene.ups == 1 and len(scene.launcher.started["worker"]) == 2

    staged(story)


def test_a_system_that_cannot_fork_is_asked_again() -> None:
    async def story(scene: Scene) -> None:
        scene.launcher.refuse = OSError(errno.EAGAIN, "Resource temporarily unavailable")
        await asyncio.sleep(1.0)
        scene.launcher.refuse = None
        await asyncio.sleep(3.0)
        await scene.comes_up()
        assert scene.ups == 1

    assert "gateway could not be started (Resource temporarily unavailable)" in staged(story).told[0]


def test_stopping_drains_the_gateway_before_its_workers() -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        gateway, worker = scene.launcher.last("gateway"), scene.launcher.last("worker")
        gateway.resists.add(signal.SIGTERM)
        scene.supervisor.stop()
        await asyncio.sleep(5.0)
        assert (gateway.signals, worker.signals) == ([signal.SIGTERM], [])
        gateway.end(0)
        assert await scene.running == 0
        assert worker.signals == [signal.SIGTERM]

    assert staged(story).told == []


def test_what_was_not_ready_yet_has_nothing_to_finish() -> None:
    async def story(scene: Scene) -> None:
        await asyncio.sleep(0.1)
        await scene.worker.is_in(LOADING, scene.launcher.last("worker").pid)
        scene.launcher.last("worker").resists.add(signal.SIGTERM)
        at_s = scene.loop.time()
        scene.supervisor.stop()
        assert await scene.running == 0
        assert scene.loop.time() == at_s and scene.launcher.last("worker").signals == [signal.SIGKILL]

    assert staged(story).told == []


def test_what_is_being_stopped_does_not_come_up_any_more() -> None:
    async def story(scene: Scene) -> None:
        await asyncio.sleep(0.1)
        gateway = scene.launcher.last("gateway")
        gateway.resists.add(signal.SIGTERM)
        gateway.say(LISTENING)
        await scene.worker.is_in(READY, scene.launcher.last("worker").pid)
        await asyncio.sleep(0.1)
        scene.supervisor.stop()
        gateway.say(SERVING)
        await asyncio.sleep(1.0)
        gateway.end(0)
        assert await scene.running == 0

    assert staged(story).ups == 0


def test_a_child_that_does_not_end_is_killed_and_that_is_said() -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        worker = scene.launcher.last("worker")
        worker.resists.add(signal.SIGTERM)
        scene.supervisor.stop()
        assert await scene.running == 1
        assert worker.signals == [signal.SIGTERM, signal.SIGKILL]

    assert staged(story).told == ["worker m 0 did not end in 5 s and is killed"]


def test_asked_twice_it_ends_as_soon_as_the_gateway_has_told_its_streams() -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        gateway, worker = scene.launcher.last("gateway"), scene.launcher.last("worker")
        gateway.resists |= {signal.SIGTERM, signal.SIGUSR2}
        scene.supervisor.stop()
        await asyncio.sleep(1.0)
        scene.supervisor.stop()
        await asyncio.sleep(LAST_WORDS_S / 2)
        assert (gateway.signals, worker.signals) == ([signal.SIGTERM, signal.SIGUSR2], [])
        at_s = scene.loop.time()
        gateway.end(0)
        assert await scene.running == 130
        assert scene.loop.time() == at_s and worker.signals == [signal.SIGKILL]

    assert staged(story).told == []


def test_a_gateway_that_has_not_told_them_soon_is_killed() -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        gateway = scene.launcher.last("gateway")
        gateway.resists |= {signal.SIGTERM, signal.SIGUSR2}
        at_s = scene.loop.time()
        scene.supervisor.stop()
        scene.supervisor.stop()
        assert await scene.running == 130
        assert scene.loop.time() == pytest.approx(at_s + LAST_WORDS_S)
        assert gateway.signals[-1] == signal.SIGKILL and signal.SIGKILL not in gateway.signals[:-1]

    staged(story)


def test_asked_three_times_it_ends_at_once() -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        scene.launcher.last("gateway").resists |= {signal.SIGTERM, signal.SIGUSR2}
        at_s = scene.loop.time()
        for _ in range(3):
            scene.supervisor.stop()
            await asyncio.sleep(0)
        assert await scene.running == 130
        assert scene.loop.time() == at_s

    staged(story)


def test_asked_twice_when_no_gateway_is_left_it_ends_at_once() -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        worker = scene.launcher.last("worker")
        worker.resists.add(signal.SIGTERM)
        scene.supervisor.stop()
        await asyncio.sleep(1.0)
        at_s = scene.loop.time()
        scene.supervisor.stop()
        assert await scene.running == 130
        assert scene.loop.time() == at_s and worker.signals == [signal.SIGTERM, signal.SIGKILL]

    staged(story)


def test_a_death_during_the_stop_is_no_reason_to_start_again() -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        scene.launcher.last("gateway").resists.add(signal.SIGTERM)
        scene.supervisor.stop()
        scene.launcher.last("worker").end(-9)
        await asyncio.sleep(5.0)
        assert len(scene.launcher.started["worker"]) == 1

    assert staged(story).told == []


def test_only_a_gateway_that_listens_is_told_to_reload() -> None:
    async def story(scene: Scene) -> None:
        await asyncio.sleep(0.1)
        scene.supervisor.reload_gateways(1)  # it would not know the signal yet, and die
        assert scene.launcher.last("gateway").signals == []
        scene.launcher.last("gateway").say(reported(Step.LISTENING, version=1))
        await asyncio.sleep(0.1)
        assert scene.launcher.last("gateway").signals == []
        scene.supervisor.reload_gateways(2)
        assert scene.launcher.last("gateway").signals == [signal.SIGHUP]

    staged(story)


def test_a_gateway_is_told_until_it_follows_the_newest_orders() -> None:
    async def story(scene: Scene) -> None:
        await asyncio.sleep(0.1)
        gateway = scene.launcher.last("gateway")
        scene.supervisor.reload_gateways(2)
        for version, num_signals in ((0, 1), (1, 2), (1, 3), (2, 3), (2, 3)):
            gateway.say(reported(Step.LISTENING, version))
            await asyncio.sleep(1.0)
            assert gateway.signals == [signal.SIGHUP] * num_signals

    staged(story)


def test_a_gateway_that_was_started_again_is_told_what_changed_while_it_started() -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        scene.launcher.last("gateway").end(-9)
        await asyncio.sleep(1.0)
        scene.supervisor.reload_gateways(1)
        scene.launcher.last("gateway").say(LISTENING)
        await asyncio.sleep(0.1)
        assert scene.launcher.last("gateway").signals == [signal.SIGHUP]

    staged(story)


def test_a_gateway_that_leaves_is_told_nothing_more() -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        gateway = scene.launcher.last("gateway")
        gateway.resists.add(signal.SIGTERM)
        scene.supervisor.stop()
        scene.supervisor.reload_gateways(1)
        await asyncio.sleep(0.1)
        assert gateway.signals == [signal.SIGTERM]

    staged(story)


def test_a_gateway_has_the_time_that_it_needs_to_close() -> None:
    async def story(scene: Scene) -> None:
        await scene.comes_up()
        gateway = scene.launcher.last("gateway")
        gateway.resists.add(signal.SIGTERM)
        scene.supervisor.stop()
        await asyncio.sleep(GATEWAY_S + 1.0)
        assert gateway.signals == [signal.SIGTERM]
        await asyncio.sleep(1.5)
        assert gateway.signals == [signal.SIGTERM, signal.SIGKILL]

    assert staged(story).told == ["gateway did not end in 12 s and is killed"]
