"""The event loop of the virtual world: many engines, one clock, one heap of what happens next.

Owns time, order and the placing of clients on workers. What a frame means is in `replica`, what is
kept of it in `book`. No decision here depends on anything but the scenario: equal scenarios give
equal trace hashes.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import numpy as np

from headrace.core.errors import DeadlineUnmeetable, InvalidInput, Refused
from headrace.core.event import StepFrame
from headrace.engine.loop import Engine
from headrace.router.pick import DOWN, pick, score
from headrace.runner.fake import FakeRunner
from headrace.sim.book import Book
from headrace.sim.clients import Client, Requests
from headrace.sim.clock import VirtualClock, to_ns
from headrace.sim.record import Fate, Mark
from headrace.sim.replica import Replica
from headrace.sim.scenario import Drift, Scenario, SlowWorker, WorkerDeath
from headrace.sim.spans import SlotRecorder
from headrace.sim.traces import TraceRow
from headrace.sim.verify import verify_streams
from headrace.sim.workload import draw_rows, generator

# What happens in the same instant happens in this order.
TROUBLE, CLIENT, ARRIVAL, STEP, DRIVE = range(5)
_RANK = 2**60
_REPORT_EVERY_STEPS = 16
_PROGRESS_EVERY_EVENTS = 4096
_MILLISECOND_NS = 1_000_000

Handler = Callable[[Any], None]


class World:
    """`run` once; then `book` says what came of it."""

    def __init__(self, scenario: Scenario, *, detail: bool = False, recorder: SlotRecorder | None = None) -> None:
        self.scenario = scenario
        self.clock = VirtualClock()
        self._config = scenario.engine_config()
        self.book = Book(self._config, scenario.profile(), detail=detail, recorder=recorder)
        self._recorder = recorder
        # The score of each worker, as it last reported.
        self._scores = np.full(scenario.workers, DOWN)
        self._heap: list[tuple[int, int, Handler, Any]] = []
        self._num_pushed = 0
        self._depth = scenario.depth
        self._host_ns = to_ns(scenario.host_s)
        deaths = any(isinstance(happening, WorkerDeath) for happening in scenario.happenings)
        self._keep_tokens = detail or deaths
        self._rows = draw_rows(scenario)
        self._requests = Requests(scenario.seed, self._config, cells=scenario.cells)
        self._retry_luck = generator(scenario.seed, "retries")
        self._drift = 1.0
        self._restarts_due = 0
        # Clients that wait for any worker to come back.
        self._stranded: deque[Client] = deque()
        self.replicas = [self._new_replica(index) for index in range(scenario.workers)]

    def run(self, progress: Callable[["World"], None] | None = None) -> None:
        """Until nothing happens any more: every request has ended."""
        for replica in self.replicas:
            self._report(replica)
        self._schedule_happenings()
        self._next_arrival()
        heap, clock = self._heap, self.clock
        num_events = 0
        while heap:
            time_ns, _, handle, argument = heappop(heap)
            clock.move_to(time_ns)
            handle(argument)
            num_events += 1
            if progress is not None and num_events % _PROGRESS_EVERY_EVENTS == 0:
                progress(self)
        self._close()

    def verify(self) -> int:
        """In detail and with cells: hold every stream against the truth; returns how many were held."""
        assert self.book.detail and self.scenario.cells, "streams are verified in detail and with cells"
        return verify_streams(self.book, self._config)

    def _at(self, time_ns: int, rank: int, handle: Handler, argument: Any) -> None:
        """Let `handle(argument)` happen then; in the same instant by rank, then in the order of asking."""
        self._num_pushed += 1
        heappush(self._heap, (time_ns, rank * _RANK + self._num_pushed, handle, argument))

    def _close(self) -> None:
        """Nothing can happen any more: nobody may be waiting and nothing may be held."""
        left = sum(len(replica.clients) for replica in self.replicas) + len(self._stranded)
        if left:
            raise AssertionError(f"{left} requests never ended, though nothing more can happen")
        for replica in self.replicas:
            if not replica.dead:
                replica.engine.check()
                used = replica.engine.load().used_blocks
                if used:
                    raise AssertionError(f"worker {replica.index} holds {used} blocks for nobody")

    def _next_arrival(self) -> None:
        row = next(self._rows, None)
        if row is not None:
            self._at(to_ns(row.arrival_s), ARRIVAL, self._on_arrival, row)

    def _on_arrival(self, row: TraceRow) -> None:
        now_ns = self.clock.now_ns
        ordinal = self.book.arrived()
        client = Client(ordinal, self.book.tenant(row.tenant), row, self._requests.build(ordinal, row), now_ns)
        if row.cancel_after_s is not None:
            self._at(now_ns + to_ns(row.cancel_after_s), CLIENT, self._on_cancel, client)
        self._place(client)
        self._next_arrival()

    def _place(self, client: Client) -> None:
        """Give the client to the worker with the least work, refuse it, or let it wait for a worker."""
        if client.ended:
            return
        worker = pick(self._scores)
        if worker is None:
            if self._restarts_due:
                self._stranded.append(client)
            else:
                self._end_unplaced(client, Fate.FAILED, "no_worker")
            return
        replica = self.replicas[worker]
        client.tries += 1
        try:
            replica.submit(client, self.clock.now_ns)
        except Refused as refusal:
            self._refuse(client, replica, refusal)
        except InvalidInput as error:
            self._end_unplaced(client, Fate.INVALID, error.code)
        else:
            self.book.trace_hash.mark(Mark.SUBMIT, self.clock.now_ns, worker, client.ordinal, client.number)
            self._report(replica)
            self._kick(replica)

    def _refuse(self, client: Client, replica: Replica, refusal: Refused) -> None:
        """Told when to come back. An open stream does while it can; of new clients, a share."""
        now_ns = self.clock.now_ns
        retry_ns = max(1, to_ns(refusal.retry_after_s))
        self.book.refused(client, replica.index, now_ns, retry_ns)
        self._report(replica)
        retries = self.scenario.retries
        again = client.replays > 0 and not isinstance(refusal, DeadlineUnmeetable)
        if not client.replays and client.tries <= retries.tries and retries.share > 0.0:
            again = self._retry_luck.random() < retries.share
        if again:
            self._at(now_ns + retry_ns, CLIENT, self._place, client)
        else:
            self._end_unplaced(client, Fate.REFUSED, refusal.code)

    def _end_unplaced(self, client: Client, fate: Fate, reason: str) -> None:
        client.ended = True
        self.book.ended_unplaced(client, fate, reason, self.clock.now_ns)

    def _on_cancel(self, client: Client) -> None:
        self._cancel(client, "cancelled")

    def _cancel(self, client: Client, cause: str) -> None:
        """The client goes away, or is sent away."""
        if client.ended:
            return
        self.book.trace_hash.mark(Mark.CANCEL, self.clock.now_ns, client.worker, client.ordinal)
        client.cause = cause
        if client.number < 0:
            if client in self._stranded:
                self._stranded.remove(client)
            self._end_unplaced(client, Fate.CANCELLED, cause)
            return
        replica = self.replicas[client.worker]
        replica.engine.abort(client.number, self.clock.now_s())
        self._take_events(replica)
        self._kick(replica)

    def _read(self, client: Client) -> None:
        """A slow reader was sent a token: past the bound its sequence is paused until it has caught up."""
        readers = self.scenario.readers
        now_ns = self.clock.now_ns
        unread = client.read_until(now_ns) + 1.0
        client.unread = unread
        if unread <= readers.bound_tokens or client.paused or client.ended:
            return
        if self.replicas[client.worker].engine.pause(client.number, self.clock.now_s()):
            client.paused = True
            self.book.trace_hash.mark(Mark.PAUSE, now_ns, client.worker, client.ordinal)
            self._at(now_ns + to_ns(readers.limit_s), CLIENT, self._on_reader_limit, (client, client.num_pauses))
            self._wait_for_reader(client)
            self._kick(self.replicas[client.worker])

    def _wait_for_reader(self, client: Client) -> None:
        pace = client.row.reader_tokens_per_s
        if pace:
            excess = client.unread - self.scenario.readers.bound_tokens / 2
            due_ns = self.clock.now_ns + max(_MILLISECOND_NS, to_ns(excess / pace))
            self._at(due_ns, CLIENT, self._on_reader_due, (client, client.num_pauses))

    def _on_reader_due(self, due: tuple[Client, int]) -> None:
        client, pause = due
        if not client.paused or client.ended or client.num_pauses != pause:
            return
        if client.read_until(self.clock.now_ns) > self.scenario.readers.bound_tokens / 2:
            self._wait_for_reader(client)
            return
        replica = self.replicas[client.worker]
        client.paused = False
        client.num_pauses += 1
        if replica.engine.resume(client.number, self.clock.now_s()):
            replica.forget_gap(client, self.clock.now_ns)
            self.book.trace_hash.mark(Mark.RESUME, self.clock.now_ns, client.worker, client.ordinal)
            self._kick(replica)

    def _on_reader_limit(self, due: tuple[Client, int]) -> None:
        client, pause = due
        if client.paused and client.num_pauses == pause:
            self._cancel(client, "slow_reader")

    def _kick(self, replica: Replica) -> None:
        """Work has come: plan once everything else of this instant has happened."""
        if not replica.kicked and replica.engine.in_flight < self._depth:
            replica.kicked = True
            self._at(self.clock.now_ns, DRIVE, self._on_drive, replica)

    def _on_drive(self, replica: Replica) -> None:
        replica.kicked = False
        if not replica.dead:
            self._drive(replica)

    def _on_wake(self, due: tuple[Replica, int]) -> None:
        replica, wake_ns = due
        if replica.wake_ns == wake_ns and not replica.dead:
            replica.wake_ns = -1
            self._drive(replica)

    def _drive(self, replica: Replica) -> None:
        """Launch what may be launched; then wait for the oldest step, or for the next expiry."""
        engine = replica.engine
        now_s = self.clock.now_s()
        while engine.in_flight < self._depth and engine.begin(now_s):
            self.book.launched(replica, self.clock.now_ns)
        if not engine.in_flight:
            self._take_events(replica)
            self._sleep(replica)
        elif not replica.stepping:
            replica.stepping = True
            self._at(to_ns(replica.runner.next_ready_s), STEP, self._on_step, replica)

    def _sleep(self, replica: Replica) -> None:
        expiry_s = replica.engine.next_expiry_s
        if expiry_s != float("inf"):
            wake_ns = max(to_ns(expiry_s), self.clock.now_ns + _MILLISECOND_NS)
            if wake_ns != replica.wake_ns:
                replica.wake_ns = wake_ns
                self._at(wake_ns, DRIVE, self._on_wake, (replica, wake_ns))

    def _on_step(self, replica: Replica) -> None:
        if replica.dead:
            return
        replica.stepping = False
        now_ns = self.clock.now_ns
        frame = replica.engine.end(self.clock.now_s())
        self.book.stepped(replica, now_ns)
        self._absorb(replica, frame)
        replica.num_steps += 1
        if frame.ended or replica.num_steps % _REPORT_EVERY_STEPS == 0:
            self._report(replica)
        if not self._host_ns:
            self._drive(replica)
        elif not replica.kicked:
            replica.kicked = True
            self._at(now_ns + self._host_ns, DRIVE, self._on_drive, replica)

    def _report(self, replica: Replica) -> None:
        """A worker's heartbeat: how much work it has."""
        load = replica.engine.load()
        meter = self.book.meter
        if load.queue_s > meter.max_queue_s:
            meter.max_queue_s = load.queue_s
        self._scores[replica.index] = score(load.queue_s + load.running_s, load.waiting + load.running)

    def _take_events(self, replica: Replica) -> None:
        frame = replica.engine.take_events(self.clock.now_s())
        if frame.ended:
            self._absorb(replica, frame)

    def _absorb(self, replica: Replica, frame: StepFrame) -> None:
        now_ns = self.clock.now_ns
        delivery = None
        if len(frame.numbers):
            self.book.num_tokens += len(frame.numbers)
            delivery = replica.absorb(frame, now_ns, self.book.gaps)
            if delivery is not None:
                self.book.first(delivery.first, replica.index, now_ns)
        for ended in frame.ended:
            client = replica.clients[ended.number]
            client.ended = True
            self.book.ended(client, replica, ended, now_ns)
            replica.release(client)
        if delivery is not None:
            for client in delivery.reached:
                self._cancel(client, "cancelled")
            for client in delivery.slow:
                self._read(client)

    def _schedule_happenings(self) -> None:
        for happening in self.scenario.happenings:
            at_ns = to_ns(happening.at_s)
            if isinstance(happening, WorkerDeath):
                self._at(at_ns, TROUBLE, self._on_death, happening)
            elif isinstance(happening, SlowWorker):
                self._at(at_ns, TROUBLE, self._on_slow, (happening.worker, happening.factor))
                if happening.until_s is not None:
                    self._at(to_ns(happening.until_s), TROUBLE, self._on_slow, (happening.worker, 1.0))
            else:
                self._at(at_ns, TROUBLE, self._on_drift, happening)

    def _on_death(self, death: WorkerDeath) -> None:
        """The worker's memory is gone; its streams go on elsewhere from what was delivered."""
        replica = self.replicas[death.worker]
        if replica.dead:
            return
        now_ns = self.clock.now_ns
        self.book.trace_hash.mark(Mark.DEATH, now_ns, death.worker, -1)
        replica.dead = True
        self._scores[death.worker] = DOWN
        if self._recorder is not None and self._recorder.worker == death.worker:
            self._recorder.worker_died()
        if death.restart_s is not None:
            self._restarts_due += 1
            self._at(now_ns + to_ns(death.restart_s), TROUBLE, self._on_restart, death.worker)
        for client in list(replica.clients.values()):
            replica.hand_over(client, now_ns)
            self.book.trace_hash.mark(Mark.REPLAY, now_ns, death.worker, client.ordinal, len(client.delivered))
            self._place(client)

    def _on_restart(self, worker: int) -> None:
        self._restarts_due -= 1
        self.book.trace_hash.mark(Mark.RESTART, self.clock.now_ns, worker, -1)
        self.replicas[worker] = self._new_replica(worker)
        self._report(self.replicas[worker])
        waiting, self._stranded = self._stranded, deque()
        for client in waiting:
            self._place(client)

    def _on_slow(self, change: tuple[int, float]) -> None:
        worker, factor = change
        self.replicas[worker].slowness = factor
        self.replicas[worker].runner.speed = factor * self._drift
        self.book.trace_hash.mark(Mark.CHANGE, self.clock.now_ns, worker, -1)

    def _on_drift(self, drift: Drift) -> None:
        self._drift *= drift.factor
        for replica in self.replicas:
            replica.runner.speed = replica.slowness * self._drift
        self.book.trace_hash.mark(Mark.CHANGE, self.clock.now_ns, -1, -1)

    def _new_replica(self, index: int) -> Replica:
        scenario = self.scenario
        runner = FakeRunner(
            self._config,
            profile=scenario.profile(),
            depth=scenario.depth,
            clock=self.clock,
            cells=scenario.cells,
            speed=self._drift,
        )
        engine = Engine(self._config, runner)
        return Replica(index, engine, runner, keep_tokens=self._keep_tokens, keep_times=self.book.detail)
