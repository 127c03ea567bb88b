"""Tenants: weighted service without credit for idleness, caps and reservations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.config import TenantConfig
from headrace.engine.tenants import TenantTable


def table(*configs: TenantConfig) -> TenantTable:
    return TenantTable(configs)


def test_a_tenant_has_one_row_made_on_first_sight() -> None:
    tenants = table(TenantConfig("a"))
    assert [tenants.index(name) for name in ("b", "a", "b")] == [1, 0, 1]


def test_there_is_room_for_any_number_of_tenants() -> None:
    tenants = table()
    rows = [tenants.index(f"t{index}") for index in range(100)]
    tenants.charge(np.array(rows), np.arange(100.0))
    assert tenants.level[rows].tolist() == list(range(100))


def test_a_level_is_service_divided_by_weight() -> None:
    tenants = table(TenantConfig("a"), TenantConfig("b", weight=3.0))
    tenants.charge(np.array([0, 1, 1]), np.array([1.0, 1.0, 2.0]))
    assert tenants.level[:2].tolist() == [1.0, 1.0]
    tenants.charge_one(1, -3.0)
    assert tenants.level[1] == 0.0


def test_a_tenant_that_returns_is_lifted_to_what_is_being_served() -> None:
    tenants = table(TenantConfig("a"), TenantConfig("b"), TenantConfig("c"))
    tenants.charge(np.array([0, 1]), np.array([5.0, 7.0]))
    tenants.lift(2, 5.0)
    assert tenants.level[:3].tolist() == [5.0, 7.0, 5.0]


def test_nobody_is_lowered_and_only_a_return_lifts() -> None:
    tenants = table(TenantConfig("a"), TenantConfig("b"))
    tenants.charge_one(1, 9.0)
    tenants.lift(1, 4.0)
    assert tenants.level[1] == 9.0
    tenants.charge_one(0, 20.0)
    tenants.enter(1)
    assert tenants.level[1] == 9.0


def test_there_is_no_credit_for_having_been_idle_when_everybody_was() -> None:
    """Else whoever comes back first is served alone until it has caught up with the one that worked."""
    tenants = table(TenantConfig("a"), TenantConfig("b"))
    tenants.charge_one(0, 100.0)
    tenants.lift(1, None)
    assert tenants.level[1] == tenants.level[0]


def test_the_row_of_a_paused_tenant_is_not_used_again() -> None:
    tenants = table()
    paused = tenants.index("paused")
    tenants.accept(paused)
    tenants.leave(paused)
    for index in range(5000):
        row = tenants.index(f"t{index}")
        tenants.accept(row)
        tenants.end(row)
    assert tenants.names[paused] == "paused" and tenants.index("paused") == paused


def test_rows_of_idle_tenants_are_used_again() -> None:
    tenants = table(TenantConfig("kept"))
    for index in range(10_000):
        row = tenants.index(f"t{index}")
        tenants.accept(row)
        tenants.end(row)
    assert len(tenants.names) <= 4096
    assert tenants.names[tenants.index("kept")] == "kept"


def test_shares_follow_weights_among_those_who_are_active() -> None:
    tenants = table(TenantConfig("a", weight=3.0), TenantConfig("b"), TenantConfig("c", weight=4.0))
    for tenant in (0, 0, 1):
        tenants.enter(tenant)
    assert (tenants.share(0), tenants.share(1)) == (0.75, 0.25)
    tenants.enter(2)
    assert (tenants.share(0), tenants.share(2)) == (0.375, 0.5)
    for tenant in (2, 0, 1):
        tenants.leave(tenant)
    assert tenants.share(0) == 1.0 and tenants.num_active == 1


def test_a_tenant_alone_or_in_an_idle_engine_has_everything() -> None:
    assert table(TenantConfig("a")).share(0) == 1.0


@given(st.lists(st.integers(0, 4), max_size=60))
def test_the_shares_of_active_tenants_sum_to_one(visits: list[int]) -> None:
    tenants = table(*(TenantConfig(str(index), weight=0.1 * (index + 1)) for index in range(5)))
    inside: dict[int, int] = {}
    for tenant in visits:
        if inside.get(tenant, 0) == 2:
            tenants.leave(tenant)
            inside[tenant] = 1
        elif inside.pop(tenant, 0):
            tenants.leave(tenant)
        else:
            tenants.enter(tenant)
            inside[tenant] = 1
    assert tenants.num_active == len(inside)
    assert sum(tenants.share(tenant) for tenant in inside) == pytest.approx(1.0 if inside else 0.0)


def test_caps_are_soft_and_counted_in_slots_and_blocks() -> None:
    tenants = table(TenantConfig("a", max_slots=2, max_blocks=10), TenantConfig("b"))
    assert tenants.within_cap(0, 2, 10)
    assert not tenants.within_cap(0, 3, 0) and not tenants.within_cap(0, 1, 11)
    tenants.used_slots[0] = 3
    assert tenants.over_cap(0) and tenants.any_over_cap(but=1) and not tenants.any_over_cap(but=0)
    tenants.used_slots[0], tenants.used_blocks[0] = 2, 11
    assert tenants.over_cap(0)
    tenants.used_blocks[0] = 10
    assert not tenants.over_cap(0)


def test_a_tenant_without_caps_may_have_everything() -> None:
    tenants = table(TenantConfig("a"))
    tenants.used_slots[0] = tenants.used_blocks[0] = 10**6
    assert tenants.within_cap(0, 10**6, 10**6) and not tenants.over_cap(0)


def test_reservations_count_for_the_others() -> None:
    tenants = table(
        TenantConfig("a", reserved_slots=3, reserved_blocks=30), TenantConfig("b"), TenantConfig("c", reserved_blocks=5)
    )
    tenants.hold_slot(0, 1, guaranteed=True)
    tenants.guarantee_blocks(0, 50)
    assert [tenants.may_guarantee_slot(tenant, 3) for tenant in range(3)] == [True, False, False]
    assert tenants.may_guarantee_slot(1, 4)
    assert [tenants.may_guarantee_blocks(tenant, 1, 55) for tenant in range(3)] == [False, False, True]
    assert [tenants.reserved_by_others(tenant) for tenant in range(3)] == [(0, 5), (3, 35), (3, 30)]


def test_service_given_here_is_told_once_and_service_elsewhere_never() -> None:
    tenants = table(TenantConfig("a", weight=2.0), TenantConfig("b"))
    tenants.charge(np.array([0, 1]), np.array([3.0, 1.0]))
    tenants.charge_one(1, -1.5)
    tenants.observe(0, 10.0)
    assert tenants.take_given() == {"a": 3.0}
    tenants.charge_one(1, 1.0)
    assert tenants.take_given() == {"b": 0.5} and tenants.take_given() == {}


def test_other_weights_caps_and_reservations_replace_the_old() -> None:
    tenants = table(TenantConfig("a", weight=2.0, reserved_slots=1), TenantConfig("b", max_slots=1))
    for name in ("a", "b", "c"):
        tenants.accept(tenants.index(name))
    tenants.replace((TenantConfig("b", weight=3.0), TenantConfig("d", reserved_blocks=4, max_slots=2)))
    assert [tenants.share(tenants.index(name)) for name in ("a", "b", "c")] == pytest.approx([0.2, 0.6, 0.2])
    assert tenants.reserved_by_others(tenants.index("a")) == (0, 4)
    assert tenants.within_cap(tenants.index("b"), 5, 5)
    tenants.hold_slot(tenants.index("d"), 3, guaranteed=False)
    assert tenants.any_over_cap(tenants.index("a"))


def test_a_tenant_that_is_configured_no_more_may_be_forgotten_and_a_new_one_not() -> None:
    tenants = table(TenantConfig("old"))
    tenants.index("new")
    tenants.replace((TenantConfig("new", weight=5.0),))
    for number in range(5000):
        tenants.index(f"t{number}")
    assert tenants.weight[tenants.index("new")] == 5.0
    assert tenants.names.count("new") == 1 and "old" not in tenants.names
