"""Runs a load plan against a server. Owns the clock of the load and who is in flight; judges nothing.

Open loads are paced by a thread that sleeps to each intended time: an event loop's timers are a millisecond coarse.
Whatever delays the sending, latencies count from the intention.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.cli.load.exchange import Exchange
from headrace.cli.load.http import Pool
from headrace.cli.load.outcome import Outcome, State
from headrace.cli.load.plan import Draw, LoadPlan, Shot, open_shots
from headrace.cli.load.process import Usage, usage_of
from headrace.cli.load.wording import Wording
from headrace.cli.sweep import settled

# Our own garbage collection must not show in other people's latencies.
_GC_THRESHOLD = 200_000
_SETTLE_S = 0.5
_BAD = (State.REFUSED, State.FAILED, State.BROKEN, State.HUNG)


@dataclass(slots=True)
class Count:
    """What has happened up to some moment of the run, everything included."""

    at_s: float
    ended: int = 0
    frames: int = 0
    pieces: int = 0
    client_cpu_s: float = 0.0
    usages: dict[int, Usage] = field(default_factory=dict)


@dataclass(slots=True)
class RunRecord:
    """A run as it was. `began` is when the counting began, `ended` when the last request was over."""

    started_s: float
    outcomes: list[Outcome]
    began: Count
    ended: Count
    before: dict[int, Usage]
    after: dict[int, Usage]
    # The most memory each process was seen to hold.
    peak_rss_bytes: dict[int, int]
    received_bytes: int
    dialled: int


class Driver:
    """One run. Everything happens in callbacks on one loop; a request costs no task."""

    def __init__(
        self,
        pool: Pool,
        plan: LoadPlan,
        wording: Wording,
        *,
        streamed: bool,
        choices: int = 1,
        patience_s: float = 600.0,
        pids: tuple[int, ...] = (),
    ) -> None:
        self._pool = pool
        self._plan = plan
        self._wording = wording
        self._streamed = streamed
        self._choices = choices
        self._patience_s = patience_s
        self._pids = pids
        self._loop = asyncio.get_running_loop()
        self._all_over = asyncio.Event()
        self._stop = threading.Event()
        self._left_to_fire = 0
        self._started_s = 0.0
        self._frames = self._pieces = 0
        self._draws = {tenant: Draw(plan, tenant) for tenant, load in enumerate(plan.tenants) if load.is_closed}
        # Requests that a closed load may still begin, by tenant; None: as many as there is time for.
        self._may_begin = {tenant: plan.tenants[tenant].requests for tenant in self._draws}
        self._thinking = 0
        self._open: dict[int, Exchange] = {}
        self._peaks: dict[int, int] = {}
        self.outcomes: list[Outcome] = []
        self.ended = 0
        self.bad = 0

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started_s

    @property
    def is_warming(self) -> bool:
        """What is sent now is not counted."""
        return self.elapsed_s < self._plan.warmup_s

    @property
    def in_flight(self) -> int:
        return len(self._open)

    @property
    def pieces(self) -> int:
        """Pieces of replies that have come so far."""
        return self._pieces + sum(len(exchange.outcome.pieces_s) for exchange in self._open.values())

    async def run(self) -> RunRecord:
        shots = open_shots(self._plan)
        with settled(_GC_THRESHOLD):
            return await self._run(shots)

    async def _run(self, shots: list[Shot]) -> RunRecord:
        before = self._usages()
        received = self._pool.received_bytes
        self._started_s = time.perf_counter()
        began = self._count()
        pacer = threading.Thread(target=self._pace, args=(shots,), name="pacer", daemon=True)
        try:
            if self._plan.warmup_s > 0:
                self._loop.call_later(self._plan.warmup_s, self._begin_counting, began)
            self._left_to_fire = len(shots)
            pacer.start()
            for tenant in self._draws:
                for _ in range(self._plan.tenants[tenant].users):
                    self._ask_again(tenant)
            self._check_over()
            await self._all_over.wait()
            ended = self._count()
        finally:
            self._stop.set()
            await asyncio.to_thread(pacer.join)
        received = self._pool.received_bytes - received
        after = await self._usages_afterwards()
        return RunRecord(
            self._started_s, self.outcomes, began, ended, before, after, self._peaks, received, self._pool.dialled
        )

    def watch(self) -> None:
        """Look at the processes; called now and then while the load runs."""
        for pid, usage in self._usages().items():
            self._peaks[pid] = max(self._peaks.get(pid, 0), usage.rss_bytes)

    def _pace(self, shots: list[Shot]) -> None:
        """In its own thread. Shots that are due together are fired together."""
        index = 0
        while index < len(shots):
            delay_s = self._started_s + shots[index].at_s - time.perf_counter()
            if delay_s > 0 and self._stop.wait(delay_s):
                return
            now_s = time.perf_counter() - self._started_s
            last = index
            while last < len(shots) and shots[last].at_s <= now_s:
                last += 1
            if last > index:
                try:
                    self._loop.call_soon_threadsafe(self._fire_all, shots[index:last])
                except RuntimeError:
                    return
                index = last

    def _fire_all(self, shots: list[Shot]) -> None:
        self._left_to_fire -= len(shots)
        for shot in shots:
            self._fire(shot, self._over)
        self._check_over()

    def _fire(self, shot: Shot, over: Callable[[Exchange], None]) -> None:
        intended_s = self._started_s + shot.at_s
        outcome = Outcome(shot, intended_s, counted=shot.at_s >= self._plan.warmup_s)
        self.outcomes.append(outcome)
        exchange = Exchange(outcome, over, self._loop, choices=self._choices, patience_s=self._patience_s)
        self._open[id(exchange)] = exchange
        exchange.start(streamed=self._streamed, late_s=time.perf_counter() - intended_s)
        self._pool.send(self._wording.request(shot), exchange)

    def _over(self, exchange: Exchange) -> None:
        self._note(exchange)
        self._check_over()

    def _note(self, exchange: Exchange) -> None:
        del self._open[id(exchange)]
        self.ended += 1
        self.bad += exchange.outcome.state in _BAD
        self._frames += exchange.outcome.frames
        self._pieces += len(exchange.outcome.pieces_s)

    def _ask_again(self, tenant: int) -> None:
        """A user of a closed load asks, unless the load is over for it."""
        at_s = self.elapsed_s
        left = self._may_begin[tenant]
        if at_s >= self._plan.until_s or left == 0:
            self._check_over()
            return
        if left is not None and at_s >= self._plan.warmup_s:
            self._may_begin[tenant] = left - 1
        self._fire(self._draws[tenant].next(at_s), self._answered)

    def _answered(self, exchange: Exchange) -> None:
        self._note(exchange)
        tenant = exchange.outcome.shot.tenant
        self._thinking += 1
        # Through the loop even without a thought: a refusal that comes at once must not recurse.
        self._loop.call_later(self._plan.tenants[tenant].think_s, self._thought, tenant)

    def _thought(self, tenant: int) -> None:
        self._thinking -= 1
        self._ask_again(tenant)

    def _check_over(self) -> None:
        if not (self._open or self._left_to_fire or self._thinking):
            self._all_over.set()

    def _begin_counting(self, began: Count) -> None:
        now = self._count()
        began.at_s, began.ended, began.frames, began.pieces = now.at_s, now.ended, now.frames, now.pieces
        began.client_cpu_s, began.usages = now.client_cpu_s, now.usages

    def _count(self) -> Count:
        at_s, cpu_s = time.perf_counter(), time.process_time()
        frames = self._frames + sum(exchange.outcome.frames for exchange in self._open.values())
        return Count(at_s, self.ended, frames, self.pieces, cpu_s, self._usages())

    def _usages(self) -> dict[int, Usage]:
        return {pid: usage for pid in self._pids if (usage := usage_of(pid)) is not None}

    async def _usages_afterwards(self) -> dict[int, Usage]:
        """Processes after the load, when the server had time to see that its clients are gone."""
        await self._pool.close()
        if self._pids:
            await asyncio.sleep(_SETTLE_S)
        return self._usages()
