"""When a child that died is started again."""

from headrace.control.restarts import Restarts


def test_the_wait_doubles_up_to_half_a_minute_and_never_ends() -> None:
    restarts = Restarts()
    assert [restarts.next_delay_s(0.0) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert Restarts(deaths=10**9).next_delay_s(0.0) == 30


def test_a_healthy_minute_starts_it_over() -> None:
    restarts = Restarts()
    for _ in range(5):
        restarts.next_delay_s(59.9)
    assert (restarts.next_delay_s(60.0), restarts.deaths) == (0.5, 1)
