"""The waiting line: who is next. Owns order and ageing; knows neither slots nor memory.

A lane holds one tenant's waiting sequences of one tier and admission class. Lanes are served by tier, within a tier by
least weighted service; an aged lane stands beside the highest tier that waits, so that age overcomes
tier and never fairness. Within a lane: earliest TTFT deadline, then arrival; an aged lane serves its
oldest. Cost does not depend on how many wait: entries are dropped lazily.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf

from headrace.core.request import Tier
from headrace.engine.sequence import Phase, Sequence
from headrace.engine.tenants import TenantTable

_TOP = int(max(Tier))
_DOWNWARDS = tuple(range(_TOP, -1, -1))
# The order of aged lanes stands after those of the tiers.
_AGED = _TOP + 1


@dataclass(slots=True, eq=False)
class Lane:
    key: int
    tier: int
    tenant: int
    count: int = 0
    aged: bool = False
    # Time in which this lane itself was being admitted from (see WaitingLine.clocks).
    served_s: float = 0.0
    # Number of the one valid entry in the order; 0 when out of it.
    entry: int = 0
    # When it is looked at for age: the time of its one valid entry, infinite without.
    looked_at_s: float = inf
    by_deadline: list[tuple[float, float, int, int, Sequence]] = field(default_factory=list)
    by_arrival: deque[tuple[int, Sequence]] = field(default_factory=deque)

    @property
    def order(self) -> int:
        return _AGED if self.aged else self.tier


# Level, slots held, arrival of the head, number of the entry, lane.
Entry = tuple[float, int, float, int, Lane]


class WaitingLine:
    def __init__(self, tenants: TenantTable, ageing_s: float) -> None:
        self._tenants = tenants
        self._ageing_s = ageing_s
        self._lanes: dict[tuple[int, int, bool], Lane] = {}
        self._orders: list[list[Entry]] = [[] for _ in range(_AGED + 1)]
        self._ageing: list[tuple[float, int, Lane]] = []
        self._tickets = 0
        self._entries = 0
        self.count = 0
        # Tenants with anything waiting.
        self.num_tenants = 0
        # Per tier: the highest level that was in service, and whom it served last.
        self._served_level = [0.0] * len(Tier)
        self._last_served = [-1] * len(Tier)
        # Time during which nobody could be admitted, and during which somebody was.
        self._stuck_s = 0.0
        self._moving_s = 0.0
        self._now_s = 0.0

    def add(self, sequence: Sequence, *, front: bool = False, preempted: bool = False) -> None:
        """File a waiting sequence; `front` for one that was running before. Who was preempted was not idle."""
        lane = self.lane(sequence)
        tenants = self._tenants
        if not tenants.num_waiting[sequence.tenant]:
            self.num_tenants += 1
            if not preempted:
                tenants.lift(sequence.tenant, self._level_in_service(lane.tier) if self.count else None)
        self._tickets += 1
        sequence.ticket = self._tickets
        heappush(
            lane.by_deadline,
            (sequence.ttft_at_s, sequence.arrival_s, sequence.number, sequence.ticket, sequence),
        )
        if front:
            lane.by_arrival.appendleft((sequence.ticket, sequence))
        else:
            lane.by_arrival.append((sequence.ticket, sequence))
        lane.count += 1
        self.count += 1
        tenants.num_waiting[sequence.tenant] += 1
        sequence.clocks = self.clocks(lane)
        if lane.count == 1 or front:
            self._look_for_age(lane, sequence)
        if lane.count == 1:
            self._file(lane, sequence.arrival_s)

    def remove(self, sequence: Sequence) -> Lane:
        """Take a waiting sequence out, wherever it stands."""
        lane = self.lane(sequence)
        sequence.ticket = 0
        lane.count -= 1
        self.count -= 1
        self._tenants.num_waiting[sequence.tenant] -= 1
        self.num_tenants -= not self._tenants.num_waiting[sequence.tenant]
        oldest = self._oldest(lane)
        if lane.aged:
            self._unage(lane, oldest)
        elif oldest is not None:
            self._look_for_age(lane, oldest)
        if lane.count == 0:
            lane.by_deadline.clear()
            lane.by_arrival.clear()
        elif 2 * lane.count + 64 < max(len(lane.by_deadline), len(lane.by_arrival)):
            self._compact(lane)
        return lane

    def admitted(self, lane: Lane) -> None:
        """Somebody of the lane got a slot. Levels rise when the step is charged: until then, it holds more."""
        self._served_level[lane.tier] = self._level_in_service(lane.tier)
        self._last_served[lane.tier] = lane.tenant
        head = self.head(lane) if lane.entry else None
        if head is not None:
            self._file(lane, head.arrival_s)

    def _level_in_service(self, tier: int) -> float:
        """Where who returns to a tier starts: at the level of whom it served last, and never lower than before.

        Not at the least level that waits, which a cap may hold down for ever.
        """
        last = self._last_served[tier]
        return max(self._served_level[tier], self._tenants.level.item(last) if last >= 0 else 0.0)

    def age(self, now_s: float) -> None:
        """Raise the lanes whose oldest has waited long enough."""
        self._now_s = now_s
        while self._ageing and self._ageing[0][0] <= now_s:
            at_s, _, lane = heappop(self._ageing)
            if at_s != lane.looked_at_s:
                continue
            lane.looked_at_s = inf
            oldest = self._oldest(lane)
            if oldest is None or lane.aged:
                continue
            if not self._has_aged(oldest):
                self._look_for_age(lane, oldest)
                continue
            lane.aged = True
            self._file(lane, oldest.arrival_s)

    def first(self) -> Lane | None:
        """The lane to serve next; stays in the order until `set_aside`."""
        aged = self._top(_AGED) if self._orders[_AGED] else None
        for tier in _DOWNWARDS:
            found = self._top(tier) if self._orders[tier] else None
            if found is not None:
                return found[4] if aged is None or found < aged else aged[4]
        return aged[4] if aged is not None else None

    def rank(self, lane: Lane) -> int:
        """The tier a lane competes in: its own, or for an aged one the highest that waits."""
        if lane.aged:
            for tier in range(_TOP, lane.tier, -1):
                if self._top(tier) is not None:
                    return tier
        return lane.tier

    def _top(self, number: int) -> Entry | None:
        """The first valid entry of one order, filed anew where its tenant's level has risen."""
        order = self._orders[number]
        level = self._tenants.level
        while order:
            entry = order[0]
            filed, _, arrival_s, _, lane = entry
            if not _is_valid(entry, number):
                heappop(order)
            elif filed != level.item(lane.tenant):
                heappop(order)
                self._file(lane, arrival_s)
            else:
                return entry
        return None

    def set_aside(self, lane: Lane) -> None:
        """Take a lane out of the order until `put_back`: its entry is stale from here."""
        lane.entry = 0

    def put_back(self, lanes: list[Lane]) -> None:
        for lane in lanes:
            if lane.count:
                head = self.head(lane)
                self._file(lane, head.arrival_s if head else 0.0)

    def refunded(self, tenant: int) -> None:
        """A level fell: entries above it are filed anew, since order is mended upwards only."""
        for lane in self.lanes_of(tenant):
            if lane.entry:
                self._file(lane, 0.0)

    def head(self, lane: Lane) -> Sequence | None:
        """Who of the lane is next."""
        if lane.aged:
            return self._oldest(lane)
        heap = lane.by_deadline
        while heap:
            sequence = heap[0][4]
            if sequence.ticket == heap[0][3] and sequence.phase is Phase.WAITING:
                return sequence
            heappop(heap)
        return None

    def lane(self, sequence: Sequence) -> Lane:
        """Where the sequence waits, or would."""
        key = (int(sequence.request.tier), sequence.tenant, sequence.guaranteed)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(len(self._lanes), key[0], key[1])
        return lane

    def lanes_of(self, tenant: int) -> list[Lane]:
        """The tenant's lanes with anything waiting, highest tier first."""
        kinds = product(reversed(Tier), (False, True))
        found = (self._lanes.get((int(tier), tenant, guaranteed)) for tier, guaranteed in kinds)
        return [lane for lane in found if lane is not None and lane.count]

    def heads(self) -> list[Sequence]:
        """Everyone who is next in a lane. For checks: looks at every lane."""
        found = (self.head(lane) for lane in self._lanes.values() if lane.count)
        return [sequence for sequence in found if sequence is not None]

    def clocks(self, lane: Lane) -> tuple[float, float]:
        """Cumulative seconds a waiter of this lane waited for (capacity, fairness)."""
        return self._stuck_s + lane.served_s, self._moving_s - lane.served_s

    def pass_time(self, seconds: float, served: list[Lane]) -> None:
        """`seconds` passed since the last plan; that plan admitted from `served`."""
        if not served:
            self._stuck_s += seconds
            return
        self._moving_s += seconds
        for lane in served:
            lane.served_s += seconds

    def _file(self, lane: Lane, arrival_s: float) -> None:
        """At equal level those who hold less come first, then those who came first."""
        self._entries += 1
        lane.entry = self._entries
        level = self._tenants.level.item(lane.tenant)
        held = self._tenants.used_slots[lane.tenant]
        order = self._orders[lane.order]
        heappush(order, (level, held, arrival_s, lane.entry, lane))
        if 2 * len(self._lanes) + 64 < len(order):
            # In place: whoever looks for the first of it has it in hand.
            order[:] = [entry for entry in order if _is_valid(entry, lane.order)]
            heapify(order)

    def _has_aged(self, sequence: Sequence) -> bool:
        # Rounded as where it is looked at: else a lane could be looked at without end.
        return sequence.arrival_s + self._ageing_s <= self._now_s

    def _look_for_age(self, lane: Lane, oldest: Sequence) -> None:
        """When the oldest will have aged, if nothing makes the lane be looked at before."""
        at_s = oldest.arrival_s + self._ageing_s
        if at_s < lane.looked_at_s:
            lane.looked_at_s = at_s
            heappush(self._ageing, (at_s, lane.key, lane))

    def _unage(self, lane: Lane, oldest: Sequence | None) -> None:
        """Who was the oldest may have left: the next one keeps the lane up only if it has aged too."""
        lane.aged = oldest is not None and self._has_aged(oldest)
        if oldest is not None and not lane.aged:
            self._look_for_age(lane, oldest)
            if lane.entry:
                self._file(lane, oldest.arrival_s)

    def _oldest(self, lane: Lane) -> Sequence | None:
        queue = lane.by_arrival
        while queue:
            ticket, sequence = queue[0]
            if sequence.ticket == ticket:
                return sequence
            queue.popleft()
        return None

    def _compact(self, lane: Lane) -> None:
        """Drop entries of those who left, so that memory follows the number waiting."""
        lane.by_deadline = [entry for entry in lane.by_deadline if entry[4].ticket == entry[3]]
        heapify(lane.by_deadline)
        lane.by_arrival = deque(entry for entry in lane.by_arrival if entry[1].ticket == entry[0])


def _is_valid(entry: Entry, order: int) -> bool:
    """Others go when they are met, or when they are most of an order: while higher tiers take all, nobody meets them."""
    lane = entry[4]
    return lane.count > 0 and lane.order == order and lane.entry == entry[3]
