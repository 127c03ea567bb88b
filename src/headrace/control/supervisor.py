"""Keeps gateways and workers alive, ends them in order, and restarts them one by one. Owns the children; knows no HTTP
and no model.

When to start again is decided in `restarts`, what a reload changes in `reload`; here are the effects.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence

import msgspec

from headrace.control.child import Child, Launcher, Process
from headrace.control.orders import Report, Step
from headrace.control.silence import Silence
from headrace.control.watch import WorkerWatch
from headrace.core.errors import HeadraceError
from headrace.core.messages import Beat, WorkerState
from headrace.core.ports import Clock, Network

# For a gateway that has closed its last connection to be gone, and for workers that have nothing left to do.
GATEWAY_END_S = 2.0
WORKER_GRACE_S = 5.0
# For gateways to tell every open stream that it ends, where all is to end at once.
LAST_WORDS_S = 1.5
# For one that is replaced to hear out who was accepted, and to hand over.
GATEWAY_REPLACED_S = 6.0
_LOOK_S = 0.1
# Codes of a command that said why it cannot run: starting it again would not help.
_SAID_WHY = (1, 2)


class StartFailed(HeadraceError):
    """A child that cannot run, before the server was ever up."""

    code = "start_failed"


class Supervisor:
    """`tell` gets lines for a person, `warn` those that say what went wrong, `heard` every beat of a worker; `up` is called
    once, when all serve. Told to stop, a gateway may take `gateway_s` until its last connection is closed."""

    def __init__(
        self,
        gateways: Sequence[Child],
        workers: Sequence[Child],
        launcher: Launcher,
        network: Network,
        clock: Clock,
        *,
        gateway_s: float,
        tell: Callable[[str], None],
        warn: Callable[[str], None],
        heard: Callable[[Child, Beat], None],
        up: Callable[[], None],
    ) -> None:
        self._gateways = tuple(gateways)
        self._workers = tuple(workers)
        self._launcher = launcher
        self._network = network
        self._clock = clock
        self._gateway_s = gateway_s
        self._tell = tell
        self._warn = warn
        self._heard = heard
        self._up = up
        self._stop = asyncio.Event()
        self._version = 0
        self._was_up = False
        self._killed = False
        self._rolling: asyncio.Task[None] | None = None

    @property
    def _children(self) -> tuple[Child, ...]:
        return (*self._gateways, *self._workers)

    async def run(self) -> int:
        """Until told to stop: the exit code. Raises StartFailed. No child is left in any case."""
        keepers = [asyncio.create_task(self._keep(child)) for child in self._children]
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([*keepers, stopped], return_when=asyncio.FIRST_COMPLETED)
            for keeper in keepers:
                if keeper.done():
                    keeper.result()
            is_clean = await self._drain()
            return 130 if self._killed else 0 if is_clean else 1
        finally:
            self._stop.set()
            self.kill_all()
            tasks = [*keepers, stopped, *([] if self._rolling is None else [self._rolling])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._wait_all()

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Drain and end; asked a second time, end as soon as open streams were told so; a third time, at once."""
        if self._killed:
            self.kill_all()
        elif self._stop.is_set():
            self._killed = True
            self._hurry()
        if self._rolling is not None:
            self._rolling.cancel()
        self._stop.set()

    def _hurry(self) -> None:
        """By a signal of its own: others may send SIGTERM to a whole group, and two that come at once are one."""
        processes = [each.process for each in self._gateways if each.healthy_since_s is not None]
        speaking = [process for process in processes if process is not None and process.is_alive]
        for process in speaking:
            process.signal(signal.SIGUSR2)
        if speaking:
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self.kill_all)
        else:
            self.kill_all()

    def kill_all(self) -> None:
        for child in self._children:
            if child.process is not None:
                child.process.signal(signal.SIGKILL)

    def roll(self) -> None:
        """Restart all, one after the other, while the others serve. Asked again meanwhile, it is done once."""
        if self._rolling is None or self._rolling.done():
            self._rolling = asyncio.create_task(self._roll())

    async def _roll(self) -> None:
        if not self._was_up:
            return self._tell("not restarted: the server is not up yet")
        for worker in self._workers:
            await self._replace(worker, signal.SIGTERM, WORKER_GRACE_S)
        if len(self._gateways) == 1:
            return self._tell("the workers were restarted; the only gateway was not, since none would answer meanwhile")
        for gateway in self._gateways:
            await self._replace(gateway, signal.SIGUSR1, self._gateway_s + GATEWAY_REPLACED_S)
        self._tell("all gateways and workers were restarted")

    async def _replace(self, child: Child, how: int, within_s: float) -> None:
        """From when all serve, until they do again: every gateway lives, and finds every worker ready."""
        if not self._is_whole:
            self._tell(f"{child.name} is restarted when all serve")
        while not self._is_whole:
            await asyncio.sleep(_LOOK_S)
        process = child.process
        if process is not None and child.is_alive:
            self._tell(f"{child.name} is restarted")
            child.is_leaving = True
            process.signal(signal.SIGKILL if child.healthy_since_s is None else how)
            _, late = await asyncio.wait([asyncio.ensure_future(process.wait())], timeout=within_s)
            if late:
                self._warn(f"{child.name} did not end in {within_s:g} s and is killed")
                child.is_missed = True
                process.signal(signal.SIGKILL)
                await asyncio.wait(late)
        while child.process is process or not self._is_whole:
            await asyncio.sleep(_LOOK_S)

    @property
    def _is_whole(self) -> bool:
        return all(child.is_serving for child in self._children) and all(each.is_whole for each in self._gateways)

    def reload_gateways(self, version: int) -> None:
        """The orders have changed."""
        self._version = version
        for gateway in self._gateways:
            self._renew(gateway)

    def _renew(self, gateway: Child) -> None:
        """Until it says that it follows the newest orders: a signal may come when it is not looking."""
        is_reachable = gateway.healthy_since_s is not None and not self._stop.is_set()
        if gateway.process is not None and is_reachable and gateway.version < self._version:
            gateway.process.signal(signal.SIGHUP)

    async def _keep(self, child: Child) -> None:
        while not self._stop.is_set():
            why, code = await self._live(child)
            if self._stop.is_set():
                return
            if child.is_leaving:
                continue
            if not child.was_healthy and not self._was_up and code in _SAID_WHY:
                raise StartFailed(f"{child.name} cannot start: {child.last_words or why}")
            now_s, since_s = self._clock.now_s(), child.healthy_since_s
            delay_s = child.restarts.next_delay_s(now_s - since_s if since_s is not None else 0.0)
            in_a_row = f", {child.restarts.deaths} times in a row" if child.restarts.deaths > 1 else ""
            self._warn(f"{child.name} {why}{in_a_row}; starting it again in {delay_s:g} s")
            child.is_missed = True
            await asyncio.sleep(delay_s)

    async def _live(self, child: Child) -> tuple[str, int]:
        """One life of a child: how it ended, in words and as an exit code."""
        child.healthy_since_s = child.beat = None
        child.is_leaving = False
        try:
            process = await self._launcher.start(child.command())
        except OSError as error:
            return f"could not be started ({error.strerror or error})", -1
        child.process = process
        if self._stop.is_set():
            process.signal(signal.SIGKILL)
        watch = asyncio.create_task(self._watch(child, process))
        try:
            code = await process.wait()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            child.is_serving = child.is_whole = False
        words = child.last_words
        return f"died ({_ending(code)}{': ' if words else ''}{words})", code

    async def _watch(self, child: Child, process: Process) -> None:
        """Until it is silent: a process that is there and says nothing is ended, so that another can take its place."""
        silence = Silence()
        hearing = asyncio.create_task(self._hear(child, process, silence))
        try:
            await silence.last()
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
        self._warn(f"{child.name} has been silent for {silence.limit_s} s and is killed")
        child.is_missed = True
        process.signal(signal.SIGKILL)

    async def _hear(self, child: Child, process: Process, silence: Silence) -> None:
        def take(beat: Beat) -> None:
            if beat.card.pid == process.pid:  # else of an earlier life
                silence.heard()
                self._take(child, beat)

        if child.address is not None:
            await WorkerWatch(child.address, self._network, "supervisor", take).run()
        async for line in process.lines():
            try:
                report = msgspec.json.decode(line, type=Report)
            except msgspec.MsgspecError:
                continue  # a library that prints is no reason to stop
            silence.heard()
            self._take_report(child, report)

    def _take_report(self, child: Child, report: Report) -> None:
        if report.note:
            self._tell(f"{child.name}: {report.note}")
        child.version = report.version
        child.is_whole = report.is_whole
        self._healthy(child)
        self._renew(child)
        if report.step is Step.SERVING and not child.is_serving:
            self._serves(child)

    def _take(self, child: Child, beat: Beat) -> None:
        child.beat = beat
        self._heard(child, beat)
        if beat.state is WorkerState.READY:
            self._healthy(child)
            self._serves(child)

    def _healthy(self, child: Child) -> None:
        if child.healthy_since_s is None:
            child.healthy_since_s = self._clock.now_s()
            if child.was_healthy:
                (self._warn if child.is_missed else self._tell)(f"{child.name} is back")
            child.was_healthy, child.is_missed = True, False

    def _serves(self, child: Child) -> None:
        child.is_serving = True
        if not self._was_up and not self.is_stopping and all(each.is_serving for each in self._children):
            self._was_up = True
            self._up()

    async def _drain(self) -> bool:
        """The gateways first: workers must finish what they still stream."""
        in_time = await self._end(self._gateways, self._gateway_s + GATEWAY_END_S)
        if self._killed:
            self.kill_all()
        return await self._end(self._workers, WORKER_GRACE_S) and in_time

    async def _end(self, children: Sequence[Child], within_s: float) -> bool:
        """False if any had to be killed. One that was not ready yet has nothing to finish."""
        processes = []
        for child in children:
            if child.process is not None and child.is_alive:
                child.process.signal(signal.SIGKILL if child.healthy_since_s is None else signal.SIGTERM)
                processes.append(child.process)
        waits = [asyncio.create_task(process.wait()) for process in processes]
        late: set[asyncio.Task[int]] = set()
        if waits:
            _, late = await asyncio.wait(waits, timeout=within_s)
        if late:
            names = ", ".join(child.name for child in children if child.is_alive)
            self._warn(f"{names} did not end in {within_s:g} s and is killed")
            for process in processes:
                process.signal(signal.SIGKILL)
            await asyncio.wait(late)
        return not late

    async def _wait_all(self) -> None:
        await asyncio.gather(*(child.process.wait() for child in self._children if child.process is not None))


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
