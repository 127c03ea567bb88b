"""When a child that died is started again."""

import pytest

from headrace.control.restarts import Restarts


def test_the_wait_doubles_up_to_half_a_minute_and_never_ends() -> None:
    restarts = Restarts()
    waits_s = [restarts.next_delay_s(0.0) for _ in range(11)]
    assert waits_s == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30])
    assert Restarts(deaths=10**9).next_delay_s(0.0) == 30


def test_it_starts_over_when_the_child_had_worked_ten_times_as_long_as_it_was_waited_for() -> None:
    restarts = Restarts()
    for _ in range(8):
        restarts.next_delay_s(4.9)
    assert restarts.delay_s == pytest.approx(12.8)
    assert restarts.next_delay_s(127.0) == pytest.approx(25.6)
    assert (restarts.next_delay_s(257.0), restarts.deaths) == (0.1, 1)


def test_one_that_is_killed_every_few_seconds_is_always_back_soon() -> None:
    restarts = Restarts()
    assert {restarts.next_delay_s(5.0) for _ in range(1000)} == {0.1}
