"""The scheduler benchmark: the load stays steady, and verdicts say what was measured."""

import pytest

from headrace.cli.step_cost import Bench, Sizes, StepCost, judge, queue_growth

pytestmark = pytest.mark.unit


def cost(slots: int, waiting: int, median_ms: float) -> StepCost:
    plan, apply, both, cpu = [(median_ms, median_ms)] * 4
    return StepCost(slots, waiting, 1, float(slots), 1.0, *plan, *apply, *both, *cpu, 10.0)


@pytest.mark.parametrize("depth", [1, 2])
def test_slots_stay_full_and_the_queue_keeps_its_length(depth: int) -> None:
    bench = Bench(8, 3, Sizes(slots=(8,), waiting=(0, 20), depth=depth))
    empty, queued = bench.measure(0, 30), bench.measure(20, 30)
    assert queued.rows == pytest.approx(8, abs=0.5)
    assert bench.num_waiting == pytest.approx(20, abs=3)
    assert 0.0 < empty.plan_p50_ms <= empty.plan_p99_ms
    assert empty.cpu_p50_ms > 0.0


def test_the_longest_queues_are_measured_at_some_sizes_only() -> None:
    sizes = Sizes(deep=(32,), waiting=(0, 1_000, 100_000))
    assert sizes.queues(32) == [0, 1_000, 100_000]
    assert sizes.queues(64) == [0, 1_000]


def test_verdicts_take_the_worst_point() -> None:
    points = [cost(256, 0, 0.5), cost(256, 1_000, 0.8), cost(256, 10_000, 1.2), cost(1024, 1_000, 2.0)]
    verdicts = {verdict.target: verdict for verdict in judge(points)}
    assert not verdicts["plan + apply <= 1 ms at 256 slots"].met
    assert verdicts["plan + apply <= 3 ms at 1,024 slots"].met
    assert not verdicts["10,000 waiting cost at most 1.25x of 1,000"].met
    assert queue_growth(points) == pytest.approx(1.2 / 0.5)
