"""The book of a run: everything that is kept of it, written as it happens.

Owns the trace hash, the records, the meters and, in detail, the streams. The world tells it what
happened; it decides nothing, and the world never reads it back to decide.
"""

from headrace.core.config import CostProfile, EngineConfig
from headrace.core.event import Counters, Ended, Outcome, Waits
from headrace.sim.clients import Client, Stream
from headrace.sim.clock import to_ns
from headrace.sim.meter import Flight, Meter, Service
from headrace.sim.record import Fate, Gaps, Mark, Records, RequestEnd, TraceHash
from headrace.sim.replica import Replica
from headrace.sim.spans import SlotRecorder

_FATES = {Outcome.FINISHED: Fate.FINISHED, Outcome.ABORTED: Fate.CANCELLED, Outcome.FAILED: Fate.FAILED}


class Book:
    def __init__(
        self,
        config: EngineConfig,
        profile: CostProfile,
        *,
        detail: bool = False,
        recorder: SlotRecorder | None = None,
    ) -> None:
        self._config = config
        self._recorder = recorder
        self.detail = detail
        self.records = Records()
        self.trace_hash = TraceHash()
        self.gaps = Gaps()
        self.meter = Meter(config.slots, config.blocks)
        self.service = Service(profile, [tenant.weight for tenant in config.tenants])
        self.streams: dict[int, Stream] = {}
        self.num_arrived = 0
        self.num_refusals = 0
        self.num_tokens = 0
        self.tenants: list[str] = []
        self._tenant_index: dict[str, int] = {}
        for tenant in config.tenants:
            self.tenant(tenant.name)

    def tenant(self, name: str) -> int:
        """The tenant's index, given on first sight."""
        index = self._tenant_index.get(name)
        if index is None:
            index = self._tenant_index[name] = len(self.tenants)
            self.tenants.append(name)
        return index

    def arrived(self) -> int:
        """Returns the ordinal of the new request."""
        self.num_arrived += 1
        return self.num_arrived - 1

    def refused(self, client: Client, worker: int, now_ns: int, retry_ns: int) -> None:
        self.num_refusals += 1
        self.trace_hash.mark(Mark.REFUSE, now_ns, worker, client.ordinal, retry_ns)

    def launched(self, replica: Replica, now_ns: int) -> None:
        """What the step looks like now; its time is known when it ends."""
        engine = replica.engine
        plan = engine.last_plan
        assert plan is not None, "a step was launched without a plan"
        waiting = engine.num_waiting
        occupied = max(len(plan.slots), engine.num_running)
        replica.flights.append(Flight(now_ns, occupied, waiting, engine.num_used_blocks))
        for start in plan.begun:
            replica.start(start.number, start.slot)
        if waiting and len(self.tenants) > 1:
            self.service.add(plan, replica.slot_tenants.take(plan.slots), replica.backlogged(now_ns))
        recorder = self._recorder
        if recorder is not None and recorder.worker == replica.index:
            recorder.launched(plan, replica.slot_ordinals, waiting)

    def stepped(self, replica: Replica, now_ns: int) -> None:
        flight = replica.flights.popleft()
        started_ns = max(flight.launch_ns, replica.ended_ns)
        self.meter.add(flight, now_ns - started_ns)
        replica.ended_ns = now_ns
        if self._recorder is not None and self._recorder.worker == replica.index:
            self._recorder.ended(started_ns, now_ns)

    def first(self, clients: list[Client], worker: int, now_ns: int) -> None:
        for client in clients:
            client.first_ns = now_ns
            self.trace_hash.mark(Mark.FIRST, now_ns, worker, client.ordinal)

    def ended(self, client: Client, replica: Replica, ended: Ended, now_ns: int) -> None:
        """The client's sequence has ended and is still known to its replica."""
        num_delivered = replica.num_delivered(client)
        if num_delivered != len(client.delivered) + ended.counters.emitted:
            raise AssertionError(f"request {client.ordinal}: {num_delivered} tokens delivered, not as counted")
        finished = ended.outcome is Outcome.FINISHED
        if self.detail:
            tokens, times_ns = replica.received(client)
            scripted = client.row.output_tokens if client.row.ends == "stop" else None
            self.streams[client.ordinal] = Stream(client.request, tokens, times_ns, finished, scripted)
        good = finished and self._kept_targets(client, num_delivered, now_ns)
        self._record(client, _FATES[ended.outcome], client.cause or ended.reason, now_ns, good=good, ended=ended)

    def ended_unplaced(self, client: Client, fate: Fate, reason: str, now_ns: int) -> None:
        """The end of a client that no engine holds."""
        self._record(client, fate, reason, now_ns)

    def _record(
        self,
        client: Client,
        fate: Fate,
        reason: str,
        now_ns: int,
        *,
        good: bool = False,
        ended: Ended | None = None,
    ) -> None:
        counters = Counters() if ended is None else ended.counters
        preemptions = 0 if ended is None else ended.preemptions
        end = RequestEnd(
            ordinal=client.ordinal,
            tenant=client.tenant,
            worker=client.worker,
            fate=fate,
            reason=reason,
            arrival_ns=client.arrival_ns,
            first_ns=client.first_ns,
            end_ns=now_ns,
            prompt_tokens=client.row.prompt_tokens,
            counters=counters,
            waits=Waits() if ended is None else ended.waits,
            preemptions=preemptions,
            replays=client.replays,
            tries=client.tries,
            good=good,
        )
        code = self.records.add(end)
        detail = (counters.emitted << 32) | (preemptions << 16) | (fate << 12) | code
        self.trace_hash.mark(Mark.END, now_ns, client.worker, client.ordinal, detail)

    def _kept_targets(self, client: Client, num_delivered: int, now_ns: int) -> bool:
        """First token in time, and gaps within the target on average."""
        request = client.request
        targets = self._config.targets[request.tier.name.lower()]
        ttft_s = targets.ttft_s if request.ttft_target_s is None else request.ttft_target_s
        itl_s = targets.itl_s if request.itl_target_s is None else request.itl_target_s
        if client.first_ns - client.arrival_ns > to_ns(ttft_s):
            return False
        return now_ns - client.first_ns <= to_ns(itl_s) * (num_delivered - 1)
