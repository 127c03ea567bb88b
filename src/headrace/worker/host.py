"""A worker's life: it listens, loads, verifies, warms up, serves, drains and is gone.

The calling thread owns the model and turns the engine; links, heartbeats and the watchdog live on an I/O loop, in a
thread of its own or, embedded, on the caller's. Knows neither what is mounted nor what carries the links.
"""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from msgspec.structs import replace

from headrace.core import proc
from headrace.core.clock import SystemClock
from headrace.core.errors import HeadraceError
from headrace.core.messages import DeviceHealth, Drain, Frame, FromGateway, WorkerCard, WorkerState
from headrace.core.ports import Clock, Listener, Network, Runner
from headrace.engine.loop import Engine
from headrace.worker.delayed import DelayedRunner, is_delayed
from headrace.worker.device_watch import DeviceWatch, FindDevice
from headrace.worker.inbox import Inbox, Order
from headrace.worker.lifecycle import Lifecycle
from headrace.worker.links import Links
from headrace.worker.mounting import Mount, MountedModel
from headrace.worker.nvml import find_device
from headrace.worker.orphans import ORPHAN_S
from headrace.worker.outbox import DEFAULT_BYTES
from headrace.worker.probe import golden_probe
from headrace.worker.promises import fit_targets
from headrace.worker.timed import NotedRunner
from headrace.worker.turns import TurnLoop
from headrace.worker.warmup import measure_profile
from headrace.worker.watchdog import LOOK_S, Watchdog, WatchedRunner

log = logging.getLogger("headrace.worker")

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_HUNG = 70
_LOOKS_PER_BEAT = 2
# For gateways to take the last frames before the links close.
_FAREWELL_S = 1.0
# For what runs on a device that should not be used any more.
_FAULT_GRACE_S = 30.0


class _ToldToLeave(Exception):
    """Asked to stop before it served: there is nothing to finish."""


class WorkerHost:
    def __init__(
        self,
        card: WorkerCard,
        mount: Mount,
        network: Network,
        address: str,
        *,
        clock: Clock | None = None,
        max_outbox_bytes: int = DEFAULT_BYTES,
        orphan_s: float = ORPHAN_S,
        inject: Mapping[str, float] | None = None,
        die: Callable[[int], None] = os._exit,
        find: FindDevice = find_device,
        sweep: Callable[[bool], object] | None = None,
    ) -> None:
        """`orphan_s`: how long what a lost gateway had waits for another. `die` ends the process at once, whatever its
        threads do: a hung step cannot be broken off. `find` opens what can be asked of a device by its id. `sweep` is told
        with every beat whether nobody waits for anything."""
        self._mount = mount
        self._network = network
        self._address = address
        self._clock = clock or SystemClock()
        self._orphan_s = orphan_s
        self._inject = dict(inject or {})
        self._die = die
        self._find = find
        self._sweep = sweep or (lambda is_idle: None)
        # Of the device, once it was heard of: why the worker leaves.
        self._fault = ""
        self.lifecycle = Lifecycle(card)
        self._inbox = Inbox()
        self._links = Links(self.lifecycle, self._inbox, self._clock, max_outbox_bytes)
        self._watched: WatchedRunner | None = None
        self._engine_id = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: Listener | None = None
        self._ticking: asyncio.Task[None] | None = None
        self.lifecycle.listen(self._announce)

    def drain(self, grace_s: float) -> None:
        """From any thread, or a signal handler: finish what there is within the grace, then leave."""
        self.lifecycle.is_leaving = True
        self._inbox.put(Order(0, self._clock.now_s(), Drain(grace_s)))

    def run(self, loop: asyncio.AbstractEventLoop | None = None) -> int:
        """The whole life; returns the exit code. `loop` is run in a thread of its own, and closed."""
        loop = loop or asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="links", daemon=True)
        thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._open(), loop).result()
            code = self._work()
            asyncio.run_coroutine_threadsafe(self._close(), loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
        return code

    @asynccontextmanager
    async def embedded(self) -> AsyncIterator[None]:
        """Beside others in one process: links on the caller's loop, the engine in a thread; drained at the end."""
        await self._open()
        living = asyncio.create_task(self._live())
        try:
            yield
        finally:
            self.drain(0.0)
            await living

    # The I/O loop

    async def _open(self) -> None:
        """Links come before the model: a gateway may watch it load."""
        self._loop = asyncio.get_running_loop()
        self._listener = await self._network.listen(self._address, self._links.accept, FromGateway)
        self._ticking = asyncio.create_task(self._tick())

    async def _live(self) -> None:
        await asyncio.to_thread(self._work)
        await self._close()

    async def _close(self) -> None:
        give_up_s = self._clock.now_s() + _FAREWELL_S
        while not self._links.is_settled and self._clock.now_s() < give_up_s:
            await asyncio.sleep(0.01)
        if self._ticking is not None:
            self._ticking.cancel()
        self._beat()
        if self._listener is not None:
            await self._listener.close()
        self._loop = None

    async def _tick(self) -> None:
        watchdog = Watchdog(LOOK_S, self._waited_s)
        looks = 0
        while True:
            await asyncio.sleep(LOOK_S)
            self._look(watchdog)
            looks += 1
            if looks % _LOOKS_PER_BEAT == 0:
                self._beat()
                self._sweep(self._is_idle)

    @property
    def _is_idle(self) -> bool:
        """Nothing runs and nothing waits. What came a moment ago may not be counted yet."""
        load, watched = self.lifecycle.load, self._watched
        return watched is not None and watched.oldest is None and not (load.waiting or load.running)

    def _waited_s(self) -> float:
        """Of the engine's thread and of those that libraries compute with: what other threads here wait for holds up no step."""
        others = {thread.native_id for thread in threading.enumerate() if thread.native_id is not None}
        return proc.waited_s(others - {self._engine_id})

    def _look(self, watchdog: Watchdog) -> None:
        """Only what serves is watched: a first step may take its time."""
        if self._watched is None or self.lifecycle.state not in (WorkerState.READY, WorkerState.DRAINING):
            return
        why = watchdog.look(self._watched.oldest, self._clock.now_s())
        if why:
            log.critical("%s: %s; leaving with %d", self.lifecycle.card.name, why, EXIT_HUNG)
            self._die(EXIT_HUNG)

    def _beat(self) -> None:
        """With nobody there the service stays for who comes next."""
        if self._links.count:
            age_s = 0.0 if self._watched is None else self._watched.age_s(self._clock.now_s())
            self._links.send(self.lifecycle.beat(age_s, self.lifecycle.take_service()))

    def _post(self, call: Callable[[], None]) -> None:
        """Run on the I/O loop, from whatever thread; after the end nobody hears it."""
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(call)

    def _announce(self) -> None:
        """The state as it is now: the next may come before the loop gets to this."""
        beat = self.lifecycle.beat(0.0, {})
        self._post(lambda: self._links.send(beat))

    def _send(self, frames: list[tuple[int, Frame]]) -> None:
        self._links.deliver(frames)

    # The engine's thread

    def _work(self) -> int:
        self._engine_id = threading.get_native_id()
        mounted = device = None
        try:
            mounted = self._load()
            device = self._watch_device(mounted.device_id)
            self._prepare(mounted).run()
            if self._fault:
                return self._fail(self._fault)
        except _ToldToLeave:
            if self._fault:
                return self._fail(self._fault)
            log.info("%s: told to leave before it was ready", self.lifecycle.card.name)
        except HeadraceError as error:
            return self._fail(error.message)
        except Exception as error:  # the top loop: whatever it is, gateways must hear of it
            log.exception("%s failed", self.lifecycle.card.name)
            return self._fail(f"{type(error).__name__}: {error}")
        finally:
            if device is not None:
                device.stop()
            if mounted is not None:
                mounted.close()
        self.lifecycle.enter(WorkerState.GONE, "done")
        return EXIT_DONE

    def _load(self) -> MountedModel:
        self.lifecycle.report(0.0, "opening the model")
        mounted = self._mount(self._report)
        config = mounted.config
        self.lifecycle.card = replace(
            self.lifecycle.card,
            version=mounted.version,
            fingerprint=mounted.fingerprint,
            dtype=mounted.dtype,
            slots=config.slots,
            blocks=config.blocks,
            block_size=config.block_size,
            context_len=config.context_len,
            vocab_size=config.vocab_size,
            eos_ids=config.eos_ids,
        )
        return mounted

    def _watch_device(self, device_id: str) -> DeviceWatch | None:
        if not device_id:
            return None
        try:
            device = self._find(device_id)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the worker can do without
            log.warning("%s: its device is not watched: %s", self.lifecycle.card.name, error)
            return None
        watch = DeviceWatch(device, self._hear_device)
        watch.start()
        return watch

    def _hear_device(self, health: DeviceHealth) -> None:
        """In the watch's thread. One that is faulty is left: what it has is finished, or moves."""
        self.lifecycle.device = health
        if health.fault and not self.lifecycle.is_leaving:
            self._fault = health.fault
            log.error("%s: %s; leaving", self.lifecycle.card.name, health.fault)
            self.drain(_FAULT_GRACE_S)

    def _prepare(self, mounted: MountedModel) -> TurnLoop:
        runner, config = mounted.runner, mounted.config
        self.lifecycle.enter(WorkerState.VERIFYING, "golden probe")
        noted = NotedRunner(runner, self._clock)
        probe = golden_probe(noted, config, self._clock)
        self._check_leaving()
        self.lifecycle.enter(WorkerState.WARMING, "timing steps")
        if not mounted.is_measured:
            # Steps that overlap say little of how long each takes.
            seen = noted.seen if runner.depth == 1 else ()
            profile = measure_profile(runner, config, mounted.scenes, seen)
            config = replace(config, profile=profile, targets=fit_targets(config.targets, profile, config.slots))
        self._check_leaving()
        self._watched = WatchedRunner(self._delayed(runner), self._clock)
        engine = Engine(config, self._watched, mounted.matchers)
        self.lifecycle.load = engine.load()
        self.lifecycle.enter(WorkerState.READY, f"golden probe {probe}")
        return TurnLoop(engine, mounted.matchers, self._inbox, self.lifecycle, self._clock, self._send, self._orphan_s)

    def _delayed(self, runner: Runner) -> Runner:
        return DelayedRunner(runner, self._inject) if is_delayed(self._inject) else runner

    def _report(self, progress: float, note: str) -> None:
        self._check_leaving()
        self.lifecycle.report(progress, note)

    def _check_leaving(self) -> None:
        if self.lifecycle.is_leaving:
            raise _ToldToLeave

    def _fail(self, why: str) -> int:
        why = " ".join(why.split())[:500]
        log.error("%s failed: %s", self.lifecycle.card.name, why)
        self.lifecycle.enter(WorkerState.FAILED, why)
        return EXIT_FAILED
