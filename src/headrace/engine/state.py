"""Everything the engine knows, and every move of a sequence from one phase to another.

Owns slots, pool, tenants, waiting line and the events not yet emitted. Decides nothing: the scheduler,
memory and intake modules decide and call these moves. Each move keeps all accounts in step.
"""

from collections import deque
from heapq import heapify, heappop, heappush

from headrace.core.config import EngineConfig
from headrace.core.event import Counter, Counters, Ended, Outcome
from headrace.core.hashing import chain_blocks
from headrace.core.plan import SlotStart
from headrace.core.request import Request, Tier
from headrace.engine.blocks import BlockPool
from headrace.engine.cost import CostModel
from headrace.engine.estimate import OutputEstimates
from headrace.engine.line import WaitingLine
from headrace.engine.sequence import Phase, Sequence
from headrace.engine.slots import SlotTable
from headrace.engine.targets import ServedTargets
from headrace.engine.tenants import TenantTable


class State:
    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.blocks)
        self.table = SlotTable(config.slots, config.block_size)
        self.tenants = TenantTable(config.tenants)
        self.line = WaitingLine(self.tenants, config.ageing_s)
        self.model = CostModel(config.profile)
        self.estimates = OutputEstimates()
        self.live: dict[int, Sequence] = {}
        # Sequences in slots that have more than one token to compute, in the order they came.
        self.prefilling: dict[int, Sequence] = {}
        self.ended: list[Ended] = []
        self.ttft_targets = ServedTargets()
        self.queue_s = 0.0
        self.queue_prompt_s = 0.0
        self.running_s = 0.0
        # Raised with every planning, whether or not a plan comes of it.
        self.planning = 0
        self.applied_step = -1
        self.num_masked_live = 0
        self.num_preemptions = 0
        self.num_guaranteed_preemptions = 0
        self._leaving_blocks: deque[tuple[int, list[int]]] = deque()
        # Blocks that nobody needs but a launched plan names: they come back when it is applied.
        self.num_coming_blocks = 0
        self._expiries: list[tuple[float, int, str]] = []
        # By the tier's number.
        self._targets = tuple(config.targets[tier.name.lower()] for tier in sorted(Tier))

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def ttft_s(self, request: Request) -> float:
        asked_s = request.ttft_target_s
        return self._targets[request.tier].ttft_s if asked_s is None else asked_s

    def bound_ttft_s(self, request: Request) -> float:
        """The TTFT target that binds every step: no request may ask more of others than its tier was promised."""
        promised_s = self._targets[request.tier].ttft_s
        return max(request.ttft_target_s or promised_s, promised_s)

    def bound_itl_s(self, request: Request) -> float:
        """Likewise between tokens."""
        promised_s = self._targets[request.tier].itl_s
        return max(request.itl_target_s or promised_s, promised_s)

    def in_flight(self, sequence: Sequence) -> bool:
        """Does a launched plan whose result is not applied name it? Asked of sequences without a slot."""
        return sequence.last_step > self.applied_step

    # Entering and leaving the line

    def accept(self, sequence: Sequence, now_s: float) -> None:
        """A new sequence waits."""
        request = sequence.request
        self.live[sequence.number] = sequence
        self.num_masked_live += request.sampling.masked
        self.tenants.accept(sequence.tenant)
        sequence.target = self.ttft_targets.enter(self.bound_ttft_s(request))
        self._start_timeout(sequence, now_s)
        if request.deadline_s is not None:
            self._push_expiry(now_s + request.deadline_s, sequence, "deadline")
        sequence.since_s = now_s
        self._enqueue(sequence)

    def _push_expiry(self, at_s: float, sequence: Sequence, kind: str) -> None:
        """Entries of those who ended go when they are most of the heap, so that memory follows who is live."""
        if len(self._expiries) > 4 * len(self.live) + 64:
            self._expiries = [entry for entry in self._expiries if entry[1] in self.live]
            heapify(self._expiries)
        heappush(self._expiries, (at_s, sequence.number, kind))

    def _start_timeout(self, sequence: Sequence, now_s: float) -> None:
        """Unless it runs: one that passed while it was paused has come to nothing."""
        if sequence.times_out_s <= now_s:
            sequence.times_out_s = now_s + (sequence.request.queue_timeout_s or self.config.queue_timeout_s)
            self._push_expiry(sequence.times_out_s, sequence, "queue")

    def _enqueue(self, sequence: Sequence, *, front: bool = False, preempted: bool = False) -> None:
        sequence.phase = Phase.WAITING
        self.line.add(sequence, front=front, preempted=preempted)
        self._add_waiting(sequence, 1.0)

    def _dequeue(self, sequence: Sequence, now_s: float) -> None:
        lane = self.line.remove(sequence)
        self._add_waiting(sequence, -1.0)
        waited_s = now_s - sequence.since_s
        if sequence.started:
            sequence.preempted_s += waited_s
        else:
            fairness_s = self.line.clocks(lane)[1] - sequence.clocks[1]
            fairness_s = min(max(fairness_s, 0.0), waited_s)
            sequence.wait_fairness_s += fairness_s
            sequence.wait_capacity_s += waited_s - fairness_s
        sequence.since_s = now_s

    def _add_waiting(self, sequence: Sequence, sign: float) -> None:
        """Sums over who waits; exactly zero when nobody does, so that rounding cannot pile up."""
        tenants = self.tenants
        tenant = sequence.tenant
        work_s, prompt_s = sign * sequence.work_s, sign * sequence.prompt_s
        if self.line.count:
            self.queue_s += work_s
            self.queue_prompt_s += prompt_s
        else:
            self.queue_s = self.queue_prompt_s = 0.0
        if tenants.num_waiting[tenant]:
            tenants.waiting_s[tenant] += work_s
            tenants.waiting_prompt_s[tenant] += prompt_s
        else:
            tenants.waiting_s[tenant] = tenants.waiting_prompt_s[tenant] = 0.0

    # Slots

    def start(self, sequence: Sequence, hits: list[int], now_s: float) -> SlotStart:
        """Waiting to running: takes a slot and blocks for every known token; `hits` are shared."""
        if not sequence.started:
            self.tenants.learn_wait(sequence.tenant, sequence.expected_wait_s, now_s - sequence.since_s)
            sequence.counters[Counter.REPLAYED] = len(sequence.outputs)
        self._dequeue(sequence, now_s)
        num_computed = len(hits) * self.config.block_size
        if hits:
            self._share(sequence, hits, num_computed)
        sequence.blocks = hits + self.pool.allocate(self.blocks_for(sequence.num_tokens) - len(hits))
        sequence.started = True
        sequence.begun_in = self.planning
        sequence.steady_rows = 0
        sequence.phase = Phase.RUNNING
        sequence.catching_up = True
        sequence.num_applied = num_computed
        sequence.num_published = len(hits)
        request = sequence.request
        eos = () if request.sampling.ignore_eos else self.config.eos_ids
        slot = self.table.occupy(sequence, num_computed, self.bound_itl_s(request), eos + request.sampling.stop_ids)
        self.prefilling[sequence.number] = sequence
        self.tenants.hold_slot(sequence.tenant, 1, guaranteed=sequence.guaranteed)
        self.tenants.used_blocks[sequence.tenant] += len(sequence.blocks)
        self.running_s += sequence.work_s
        if sequence.guaranteed:
            self._reserve(sequence, self.expected_blocks(sequence))
        return SlotStart(
            slot,
            sequence.number,
            request.request_id,
            sequence.ids,
            sequence.num_prompt,
            num_computed,
            tuple(sequence.blocks),
            request.sampling,
            request.choice,
        )

    def _share(self, sequence: Sequence, hits: list[int], num_computed: int) -> None:
        """It begins with blocks that were computed before, for itself or for others."""
        self.pool.share(hits)
        cached = min(num_computed, sequence.num_prompt) - sequence.num_charged
        sequence.counters[Counter.PROMPT_CACHED] += max(0, cached)
        sequence.num_charged = max(sequence.num_charged, num_computed)

    def guarantee_limit(self, tenant: int) -> int:
        """Most blocks that guaranteed reservations of this tenant could ever come to."""
        config = self.config
        return min(
            int(config.guaranteed_share * config.blocks), config.blocks - self.tenants.reserved_by_others(tenant)[1]
        )

    def expected_blocks(self, sequence: Sequence) -> int:
        """Blocks a guaranteed sequence reserves: prompt and expected output, at least what it holds and one ahead."""
        wanted = max(sequence.num_prompt + int(sequence.expected_output), sequence.num_tokens + self.config.block_size)
        return self.blocks_for(min(wanted, sequence.limit))

    def _reserve(self, sequence: Sequence, blocks: int) -> None:
        self.tenants.guarantee_blocks(sequence.tenant, blocks - sequence.reserved_blocks)
        sequence.reserved_blocks = blocks

    def grow(self, sequences: list[Sequence]) -> list[int]:
        """One more block for each running sequence; the caller has checked the pool."""
        blocks = self.pool.allocate(len(sequences))
        used_blocks = self.tenants.used_blocks
        for sequence, block in zip(sequences, blocks, strict=True):
            sequence.blocks.append(block)
            used_blocks[sequence.tenant] += 1
            self.table.set_capacity(sequence)
            if sequence.reserved_blocks and len(sequence.blocks) > sequence.reserved_blocks:
                self._reserve(sequence, len(sequence.blocks))
        return blocks

    def _leave_slot(self, sequence: Sequence, now_s: float) -> None:
        """Out of the table; blocks stay with the sequence."""
        self.table.release(sequence)
        self.prefilling.pop(sequence.number, None)
        self.tenants.hold_slot(sequence.tenant, -1, guaranteed=sequence.guaranteed)
        self.running_s = self.running_s - sequence.work_s if self.table.num_running else 0.0
        spent_s = now_s - sequence.since_s
        if sequence.catching_up:
            sequence.prefill_s += spent_s
        else:
            sequence.decode_s += spent_s
        sequence.since_s = now_s

    def _drop_blocks(self, sequence: Sequence, *, sound: bool = True) -> None:
        """Blocks leave the sequence once no launched plan names them; sound ones stay findable."""
        if sound:
            self._publish_generated(sequence)
        blocks, sequence.blocks = sequence.blocks, []
        self.tenants.used_blocks[sequence.tenant] -= len(blocks)
        if sequence.guaranteed:
            self._reserve(sequence, 0)
        if self.in_flight(sequence):
            self._leaving_blocks.append((sequence.last_step, blocks))
            self.num_coming_blocks += len(blocks)
        else:
            self.pool.release(blocks)

    def step_applied(self, step: int) -> None:
        """No launched plan up to `step` is outstanding: blocks that waited for it go back."""
        self.applied_step = step
        waiting = self._leaving_blocks
        for _ in range(len(waiting)):
            last_step, blocks = waiting.popleft()
            if last_step <= step:
                self.pool.release(blocks)
                self.num_coming_blocks -= len(blocks)
            else:
                waiting.append((last_step, blocks))

    def caught_up(self, sequence: Sequence, now_s: float) -> None:
        """Its last chunk was applied: it decodes from here."""
        sequence.catching_up = False
        sequence.prefill_s += now_s - sequence.since_s
        sequence.since_s = now_s

    def finish_planned(self, sequence: Sequence, now_s: float) -> None:
        """Its last token is being computed: the slot is free for the next plan."""
        self._leave_slot(sequence, now_s)
        sequence.phase = Phase.LEAVING
        self.num_coming_blocks += len(sequence.blocks)

    def preempt(self, sequence: Sequence, now_s: float) -> None:
        """Running to waiting: everything it computed is given up, or left to the prefix cache."""
        self._suspend(sequence, now_s)
        sequence.num_forgiven = sequence.num_charged
        sequence.preempted_in = self.planning
        sequence.preemptions += 1
        self.num_preemptions += 1
        self.num_guaranteed_preemptions += sequence.guaranteed
        self._enqueue(sequence, front=True, preempted=True)

    def pause(self, sequence: Sequence, now_s: float) -> None:
        """Not runnable until `resume`: slot given up, blocks evictable."""
        if sequence.phase is Phase.RUNNING:
            self._suspend(sequence, now_s)
            # The client's doing: what is computed again is charged again.
            sequence.num_forgiven = 0
        else:
            self._dequeue(sequence, now_s)
        sequence.phase = Phase.PAUSED
        self.tenants.leave(sequence.tenant)

    def resume(self, sequence: Sequence, now_s: float) -> None:
        sequence.paused_s += now_s - sequence.since_s
        sequence.since_s = now_s
        self.tenants.enter(sequence.tenant)
        if not sequence.started:
            self._start_timeout(sequence, now_s)
        self._enqueue(sequence, front=sequence.started)

    def _suspend(self, sequence: Sequence, now_s: float) -> None:
        computed = int(self.table.computed[sequence.slot])
        sequence.num_charged = max(sequence.num_charged, computed)
        self._leave_slot(sequence, now_s)
        sequence.safe_below = sequence.num_tokens + 1
        self._drop_blocks(sequence)

    # The end

    def end(self, sequence: Sequence, outcome: Outcome, reason: str, now_s: float, message: str = "") -> None:
        """From any phase to the one terminal event."""
        if sequence.phase is Phase.WAITING:
            self._dequeue(sequence, now_s)
        elif sequence.phase is Phase.RUNNING:
            self._leave_slot(sequence, now_s)
        elif sequence.phase is Phase.LEAVING:
            sequence.decode_s += now_s - sequence.since_s
            self.num_coming_blocks -= len(sequence.blocks)
        else:
            assert sequence.phase is Phase.PAUSED, "a sequence ends once"
            sequence.paused_s += now_s - sequence.since_s
            self.tenants.enter(sequence.tenant)
        sequence.phase = Phase.ENDED
        self._drop_blocks(sequence, sound=outcome is not Outcome.FAILED)
        sequence.finished = outcome is Outcome.FINISHED
        if sequence.finished:
            self.estimates.learn(sequence.request.tenant, sequence.num_prompt, len(sequence.outputs))
        del self.live[sequence.number]
        self.num_masked_live -= sequence.request.sampling.masked
        self.tenants.end(sequence.tenant)
        self.ttft_targets.leave(sequence.target, now_s)
        self.ended.append(self._ended_event(sequence, outcome, reason, message))

    def _ended_event(self, sequence: Sequence, outcome: Outcome, reason: str, message: str) -> Ended:
        request = sequence.request
        return Ended(
            sequence.number,
            request.request_id,
            request.choice,
            outcome,
            reason,
            Counters(*sequence.counters),
            sequence.waits(),
            sequence.preemptions,
            message,
        )

    def expire(self, now_s: float) -> None:
        """End what waited or ran past its limit."""
        while self._expiries and self._expiries[0][0] <= now_s:
            _, number, kind = heappop(self._expiries)
            sequence = self.live.get(number)
            if sequence is None:
                continue
            if kind == "deadline":
                self.end(sequence, Outcome.FAILED, "deadline_exceeded", now_s, "the deadline has passed")
            elif not sequence.started and sequence.phase is Phase.WAITING:
                self.end(sequence, Outcome.FAILED, "timed_out", now_s, "waited too long for a slot")

    @property
    def next_expiry_s(self) -> float:
        expiries = self._expiries
        while expiries and expiries[0][1] not in self.live:
            heappop(expiries)
        return expiries[0][0] if expiries else float("inf")

    # The prefix cache

    def _uses_cache(self, sequence: Sequence) -> bool:
        request = sequence.request
        return self.config.prefix_cache and bool(request.prefix_root) and request.sampling.prompt_logprobs is None

    def publish_prompt(self, sequence: Sequence) -> None:
        """Make the prompt blocks that applied steps filled findable."""
        hashes = sequence.request.block_hashes
        full = min(sequence.num_applied // self.config.block_size, len(hashes))
        if full <= sequence.num_published or not self._uses_cache(sequence):
            return
        for index in range(sequence.num_published, full):
            self.pool.publish(sequence.blocks[index], hashes[index])
        sequence.num_published = full

    def _publish_generated(self, sequence: Sequence) -> None:
        """Chain the blocks that hold generated tokens; the prompt's were hashed where it was tokenised."""
        applied = sequence.num_applied if sequence.catching_up else sequence.num_tokens - 1
        size = self.config.block_size
        full = min(applied // size, len(sequence.blocks))
        if full <= sequence.num_published or not self._uses_cache(sequence):
            return
        request = sequence.request
        hashes = list(request.block_hashes[:full])
        if len(hashes) < full:
            parent = hashes[-1] if hashes else request.prefix_root
            hashes += chain_blocks(parent, sequence.ids[len(hashes) * size : full * size], size)
        for index in range(sequence.num_published, full):
            self.pool.publish(sequence.blocks[index], hashes[index])
        sequence.num_published = full
        sequence.hashes = hashes

    def find_hits(self, sequence: Sequence) -> list[int]:
        """Cached blocks that begin its ids; at least one token is left to compute."""
        if not self._uses_cache(sequence):
            return []
        hashes = sequence.hashes or sequence.request.block_hashes
        return self.pool.find(hashes[: (sequence.num_tokens - 1) // self.config.block_size])

    def held_blocks(self) -> list[int]:
        """Every block reference, for the proof of the pool's accounts."""
        held = [block for sequence in self.live.values() for block in sequence.blocks]
        for _, blocks in self._leaving_blocks:
            held.extend(blocks)
        return held
