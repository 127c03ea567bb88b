"""How full the workers were, worked out by hand."""

import numpy as np
import pytest

from headrace.core.config import CostProfile
from headrace.core.plan import Plan, Work
from headrace.sim.meter import Flight, Meter, Service, jain

pytestmark = pytest.mark.unit


def plan(starts: list[int], counts: list[int], predicted_s: float) -> Plan:
    none = np.zeros(0, np.int32)
    rows = np.arange(len(starts), dtype=np.int32)
    samples = np.ones(len(starts), np.bool_)
    return Plan(
        0,
        rows,
        np.array(starts, np.int32),
        np.array(counts, np.int32),
        samples,
        none,
        (),
        none,
        none,
        none,
        Work(0, 0, 0, 0),
        predicted_s,
        1.0,
    )


def test_occupancy_is_weighted_by_time() -> None:
    meter = Meter(slots=4, blocks=10)
    meter.add(Flight(0, occupied=4, waiting=1, used_blocks=10), 100)
    meter.add(Flight(0, occupied=2, waiting=0, used_blocks=5), 300)
    assert meter.occupancy() == pytest.approx((4 * 100 + 2 * 300) / (4 * 400))
    assert meter.occupancy(contended=True) == 1.0
    assert meter.kv_use() == pytest.approx((10 * 100 + 5 * 300) / (10 * 400))
    assert meter.kv_use(contended=True) == 1.0
    assert (meter.num_steps, meter.busy_ns, meter.max_waiting, meter.max_used_blocks) == (2, 400, 1, 10)


def test_without_steps_there_is_no_occupancy() -> None:
    assert Meter(4, 10).occupancy() is None and Meter(4, 10).kv_use(contended=True) is None


PRICES = CostProfile(c0_s=1.0, c_in_s=1e-2, c_out_s=3e-2, c_kv_s=0.0, c_att_s=0.0)


def test_service_is_the_whole_step_by_the_price_of_rows() -> None:
    service = Service(PRICES, [1.0, 1.0])
    service.add(plan([0, 50], [9, 1], predicted_s=2.4), np.array([20, 0]), np.array([0, 20]))
    assert service.seconds(20) == pytest.approx(2.4 * 9 / 12)
    assert service.seconds(0) == pytest.approx(2.4 * 3 / 12)
    assert service.seconds(1) == service.seconds(99) == 0.0


def test_what_is_due_goes_by_weight_among_the_backlogged() -> None:
    service = Service(PRICES, [3.0, 1.0, 1.0])
    # Tenant 2 has a row but nothing waiting: its part is nobody's due.
    service.add(plan([0, 0, 0, 0], [1, 1, 1, 1], predicted_s=4.0), np.array([0, 0, 1, 2]), np.array([0, 1]))
    assert service.given_over_due(0) == pytest.approx(2.0 / (3.0 * 3 / 4))
    assert service.given_over_due(1) == pytest.approx(1.0 / (3.0 * 1 / 4))
    assert service.given_over_due(2) is None
    # Alone in the queue nobody is owed anything.
    service.add(plan([0], [1], predicted_s=4.0), np.array([2]), np.array([2]))
    assert service.given_over_due(2) is None


def test_jain() -> None:
    assert jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([0.0, 0.0]) is None
