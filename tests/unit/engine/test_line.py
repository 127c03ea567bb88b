"""The waiting line: tier, then least service, then deadline and arrival; age overcomes tier."""

import gc
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.config import TenantConfig
from headrace.core.request import Tier
from headrace.engine.line import Lane, WaitingLine
from headrace.engine.sequence import Phase, Sequence
from headrace.engine.tenants import TenantTable
from tests.builders import request

AGEING_S = 10.0


class World:
    """A line, its tenants a to d and the sequences that wait, by name."""

    def __init__(self) -> None:
        self.tenants = TenantTable(tuple(TenantConfig(name) for name in "abcd"))
        self.line = WaitingLine(self.tenants, AGEING_S)
        self.sequences: dict[str, Sequence] = {}

    def add(
        self,
        name: str,
        tenant: str = "a",
        tier: Tier = Tier.PLUS,
        *,
        arrival_s: float = 0.0,
        ttft_s: float = 1.0,
        preempted: bool = False,
    ) -> Sequence:
        sequence = Sequence(
            number=len(self.sequences),
            request=request(name, tenant=tenant, tier=tier),
            tenant=self.tenants.index(tenant),
            arrival_s=arrival_s,
            ttft_at_s=arrival_s + ttft_s,
            limit=100,
            expected_output=1.0,
            prompt_s=1.0,
            work_s=1.0,
        )
        self.line.add(sequence, preempted=preempted)
        self.sequences[name] = sequence
        return sequence

    def charge(self, tenant: str, seconds: float) -> None:
        self.tenants.charge_one(self.tenants.index(tenant), seconds)

    def first(self) -> Lane:
        lane = self.line.first()
        assert lane is not None
        return lane

    def head(self) -> str:
        sequence = self.line.head(self.first())
        assert sequence is not None
        return sequence.request.request_id

    def serve(self, charge_s: float = 0.0) -> str:
        """Take out who is next, as admission does."""
        name = self.head()
        self.take(name)
        self.charge(self.sequences[name].request.tenant, charge_s)
        return name

    def take(self, name: str) -> None:
        self.line.remove(self.sequences[name])
        self.sequences[name].phase = Phase.RUNNING

    def serve_all(self) -> list[str]:
        return [self.serve() for _ in range(self.line.count)]


def test_an_empty_line_has_no_first() -> None:
    world = World()
    assert world.line.first() is None
    world.add("x")
    world.serve()
    assert world.line.first() is None and world.line.count == 0


def test_the_higher_tier_goes_first_whatever_its_service() -> None:
    world = World()
    for tenant, tier in zip("abcd", Tier, strict=True):
        world.add(tier.name, tenant, tier)
        world.charge(tenant, 100.0 * tier)
    assert world.serve_all() == ["ENTERPRISE", "PLUS", "FREE", "BATCH"]


def test_within_a_tier_the_least_served_tenant_goes_first() -> None:
    world = World()
    for tenant in "abc":
        world.add(tenant, tenant)
    for tenant, seconds in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        world.charge(tenant, seconds)
    assert world.serve_all() == ["b", "c", "a"]


def test_service_given_while_waiting_counts() -> None:
    world = World()
    world.add("a", "a")
    world.add("b", "b")
    world.charge("a", 1.0)
    assert world.head() == "b"
    world.charge("b", 2.0)
    assert world.head() == "a"


def test_tenants_take_turns_as_they_are_charged() -> None:
    world = World()
    for index in range(6):
        world.add(f"a{index}", "a", arrival_s=index)
        world.add(f"b{index}", "b", arrival_s=index)
    served = [world.serve(charge_s=1.0)[0] for _ in range(12)]
    assert all({first, second} == {"a", "b"} for first, second in zip(served[::2], served[1::2], strict=True))


def test_a_refund_brings_a_tenant_forward() -> None:
    world = World()
    world.add("a", "a")
    world.add("b", "b")
    world.charge("a", 2.0)
    world.charge("b", 1.0)
    assert world.head() == "b"
    world.charge("a", -1.5)
    world.line.refunded(world.tenants.index("a"))
    assert world.serve_all() == ["a", "b"]


def test_within_a_lane_the_earliest_deadline_goes_first_then_arrival() -> None:
    world = World()
    world.add("late", arrival_s=0.0, ttft_s=9.0)
    world.add("second", arrival_s=2.0, ttft_s=3.0)
    world.add("first", arrival_s=1.0, ttft_s=4.0)
    world.add("soon", arrival_s=3.0, ttft_s=1.0)
    assert world.serve_all() == ["soon", "first", "second", "late"]


def test_those_who_leave_are_passed_over() -> None:
    world = World()
    for index in range(5):
        world.add(str(index), arrival_s=index)
    for name in "031":
        world.take(name)
    assert (world.line.count, world.serve_all()) == (2, ["2", "4"])


def test_one_that_comes_back_waits_once() -> None:
    world = World()
    sequence = world.add("x", arrival_s=0.0)
    world.add("y", arrival_s=1.0)
    for _ in range(5):
        world.take("x")
        sequence.phase = Phase.WAITING
        world.line.add(sequence, front=True)
    assert (world.line.count, world.serve_all()) == (2, ["x", "y"])


def test_memory_follows_the_number_waiting() -> None:
    world = World()
    for index in range(1000):
        world.add(str(index), arrival_s=index)
    for index in range(999):
        world.take(str(index))
    lane = world.first()
    assert len(lane.by_deadline) < 100 and len(lane.by_arrival) < 100
    assert world.serve_all() == ["999"]


def test_memory_does_not_follow_how_many_have_passed_a_line_that_is_never_empty() -> None:
    def num_alive() -> int:
        return sum(type(each) is Sequence for each in gc.get_objects())

    world = World()
    before = num_alive()
    for index in range(1000):
        world.add(str(index), arrival_s=index, ttft_s=index % 7)
        if index >= 10:
            del world.sequences[world.serve()]
    assert world.line.count == 10
    assert 10 <= num_alive() - before < 100


def test_memory_does_not_follow_how_often_a_lane_was_empty() -> None:
    world = World()
    world.add("0", arrival_s=0.0)
    sizes = []
    for index in range(1, 4001):
        at_s = 0.05 * index
        world.take(str(index - 1))
        del world.sequences[str(index - 1)]
        world.add(str(index), arrival_s=at_s)
        world.line.age(at_s)
        assert world.head() == str(index)
        if index % 1000 == 0:
            sizes.append(len(pickle.dumps(world.line)))
    assert max(sizes) - min(sizes) < 1000, sizes


def test_memory_does_not_follow_what_age_has_served_below_a_tier_that_always_waits() -> None:
    world = World()
    world.charge("b", 1.0)
    world.add("high -1", "b", Tier.ENTERPRISE)
    sizes = []
    for index in range(4000):
        at_s = 20.0 * index
        for name, tenant, tier, later_s in (
            ("old", "a", Tier.BATCH, 0.0),
            ("new", "a", Tier.BATCH, 15.0),
            (f"high {index}", "b", Tier.ENTERPRISE, 15.0),
        ):
            world.add(name, tenant, tier, arrival_s=at_s + later_s)
        world.take(f"high {index - 1}")
        world.line.age(at_s + 15.0)
        assert [world.serve(), world.head()] == ["old", f"high {index}"]
        world.take("new")
        if index % 1000 == 999:
            sizes.append(len(pickle.dumps(world.line)))
    assert max(sizes) - min(sizes) < 10_000, sizes


def test_age_raises_a_lane_beside_the_highest_tier() -> None:
    world = World()
    world.charge("b", 1.0)
    world.add("old", "a", Tier.BATCH, arrival_s=0.0)
    world.add("new", "b", Tier.ENTERPRISE, arrival_s=9.0)
    world.line.age(AGEING_S - 0.01)
    assert world.head() == "new"
    world.line.age(AGEING_S)
    assert world.serve_all() == ["old", "new"]


def test_who_was_older_than_those_before_it_raises_its_lane_in_time() -> None:
    world = World()
    world.add("first", "a", Tier.FREE, arrival_s=0.0)
    for name, arrival_s in (("second", 2.0), ("third", 4.0)):  # both were running, and come back
        world.add(name, "a", Tier.FREE, arrival_s=arrival_s)
        world.take(name)
        world.sequences[name].phase = Phase.WAITING
        world.line.add(world.sequences[name], front=True, preempted=True)
    world.add("plus", "b", Tier.PLUS, arrival_s=9.0)
    world.charge("b", 1.0)
    world.line.age(AGEING_S)
    assert world.head() == "plus"
    world.take("third")
    world.line.age(AGEING_S + 2.0)
    assert world.head() == "second"


@pytest.mark.parametrize("arrival_s", [0.1, 0.25, 2.1])
def test_age_is_told_as_it_is_looked_for_whatever_the_rounding(arrival_s: float) -> None:
    world = World()
    world.add("x", arrival_s=arrival_s)
    world.line.age(arrival_s + AGEING_S)
    assert world.first().aged


def test_age_does_not_overcome_fairness() -> None:
    world = World()
    world.add("flood", "a", Tier.ENTERPRISE, arrival_s=0.0)
    world.add("fair", "b", Tier.ENTERPRISE, arrival_s=15.0)
    world.charge("a", 100.0)
    world.line.age(20.0)
    assert world.head() == "fair"


def test_an_aged_lane_serves_its_oldest_and_falls_back_after_it() -> None:
    world = World()
    world.add("oldest", "a", Tier.FREE, arrival_s=0.0, ttft_s=99.0)
    world.add("urgent", "a", Tier.FREE, arrival_s=5.0, ttft_s=0.1)
    world.add("plus", "b", Tier.PLUS, arrival_s=9.0)
    world.charge("b", 1.0)
    world.line.age(10.0)
    assert world.serve_all() == ["oldest", "plus", "urgent"]


def test_every_lane_is_raised_in_the_end() -> None:
    world = World()
    for index, tier in enumerate(Tier):
        world.add(tier.name, "abcd"[index], tier, arrival_s=index)
    world.line.age(AGEING_S + 3.0)
    for index in range(4):
        world.charge("abcd"[index], float(index))
    assert world.serve_all() == ["BATCH", "FREE", "PLUS", "ENTERPRISE"]


def test_a_lane_set_aside_is_passed_until_it_is_put_back() -> None:
    world = World()
    world.add("a", "a")
    world.add("b", "b")
    world.charge("b", 1.0)
    aside = world.first()
    world.line.set_aside(aside)
    assert world.head() == "b"
    world.line.set_aside(world.first())
    assert world.line.first() is None
    world.line.put_back([aside])
    assert world.head() == "a"


def test_setting_a_lane_aside_takes_no_other_with_it() -> None:
    """Between `first` and `set_aside` a preemption may file a lane that goes before."""
    world = World()
    world.add("a", "a")
    world.charge("a", 5.0)
    asked = world.first()
    world.add("victim", "b", preempted=True)
    world.line.set_aside(asked)
    assert world.head() == "victim"
    world.line.put_back([asked])
    assert world.serve_all() == ["victim", "a"]


def test_an_emptied_lane_is_not_put_back() -> None:
    world = World()
    world.add("a", "a")
    lane = world.first()
    world.line.set_aside(lane)
    world.take("a")
    world.line.put_back([lane])
    assert world.line.first() is None


def test_a_tenants_lanes_come_highest_tier_first() -> None:
    world = World()
    for tier in (Tier.FREE, Tier.ENTERPRISE, Tier.BATCH):
        world.add(tier.name, "a", tier)
    world.add("other", "b")
    world.take("ENTERPRISE")
    assert [lane.tier for lane in world.line.lanes_of(0)] == [Tier.FREE, Tier.BATCH]
    assert world.line.lanes_of(2) == []


def test_time_is_capacity_when_nobody_is_admitted_and_fairness_when_others_are() -> None:
    world = World()
    world.add("a", "a")
    mine = world.first()
    world.add("b", "b")
    world.line.set_aside(mine)
    other = world.first()
    world.line.pass_time(1.0, [])
    world.line.pass_time(2.0, [other])
    world.line.pass_time(4.0, [mine])
    world.line.pass_time(8.0, [mine, other])
    assert world.line.clocks(mine) == (1.0 + 4.0 + 8.0, 2.0)
    assert world.line.clocks(other) == (1.0 + 2.0 + 8.0, 4.0)


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.sets(st.sampled_from("abcd"))), max_size=30))
def test_every_clock_sums_to_the_time_that_passed(passes: list[tuple[float, set[str]]]) -> None:
    world = World()
    lanes = {}
    for tenant in "abcd":
        lanes[tenant] = world.line.lanes_of(world.add(tenant, tenant).tenant)[0]
    for seconds, served in passes:
        world.line.pass_time(seconds, [lanes[tenant] for tenant in served])
    passed_s = sum(seconds for seconds, _ in passes)
    for lane in lanes.values():
        assert sum(world.line.clocks(lane)) == pytest.approx(passed_s)


MOVES = st.lists(
    st.tuples(st.sampled_from(["add", "serve", "leave", "charge"]), st.sampled_from("abcd"), st.sampled_from(Tier)),
    max_size=60,
)


@given(MOVES)
def test_the_first_is_always_the_first_of_a_plain_sort(moves: list[tuple[str, str, Tier]]) -> None:
    world, waiting = World(), set[str]()
    for place, (move, tenant, tier) in enumerate(moves):
        if move == "add":
            waiting.add(world.add(str(place), tenant, tier, arrival_s=place % 7, ttft_s=place % 5).request.request_id)
        elif move == "charge":
            world.charge(tenant, 1.0)
        elif waiting:
            waiting.remove(name := world.head() if move == "serve" else min(waiting))
            world.take(name)
        found = [world.sequences[name] for name in waiting]
        level = world.tenants.level
        keys = [(-one.request.tier, level[one.tenant], one.ttft_at_s, one.arrival_s) for one in found]
        assert world.line.count == len(waiting)
        if found:
            head = world.sequences[world.head()]
            first = min(keys)
            assert (-head.request.tier, level[head.tenant]) == first[:2]
            lane = [
                key[2:]
                for one, key in zip(found, keys, strict=True)
                if one.tenant == head.tenant and key[:2] == first[:2]
            ]
            assert (head.ttft_at_s, head.arrival_s) == min(lane)


def test_who_was_just_admitted_holds_more_and_stands_behind_its_equals() -> None:
    world = World()
    for name in ("a1", "a2", "a3"):
        world.add(name, "a")
    world.add("b1", "b")
    lane = world.first()
    assert world.serve() == "a1"
    world.tenants.hold_slot(lane.tenant, 1, guaranteed=False)
    world.line.admitted(lane)
    assert world.serve_all() == ["b1", "a2", "a3"]
