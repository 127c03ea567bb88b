"""Who is held: a reader whose stream says more than it takes, until it has caught up."""

from headrace.gateway.pace import HELD_S, MOST_BEHIND, Pace

BEAT_S = 0.25
PER_S = int(1 / BEAT_S)


class Ride:
    """A stream that says so many a beat while its reader is not held, and a reader that takes so many of them."""

    def __init__(self, said: int = 0, taken: int = 0) -> None:
        self.pace = Pace()
        self.said = said
        self.taken = taken
        self.time_s = 0.0
        # Beats that it was held for, and how often that began.
        self.num_held = 0
        self.num_pauses = 0

    def goes(self, seconds: float, *, said: int, taken: int) -> "Ride":
        for _ in range(round(seconds / BEAT_S)):
            was_held = self.pace.is_held
            self.time_s += BEAT_S
            self.said += 0 if was_held else said
            self.taken = min(self.said, self.taken + taken)
            self.pace.look(self.time_s, self.taken, self.said)
            self.num_held += self.pace.is_held
            self.num_pauses += self.pace.is_held and not was_held
        return self

    @property
    def unread(self) -> int:
        return self.said - self.taken


def test_who_takes_all_is_never_held() -> None:
    assert not Ride().goes(60.0, said=20, taken=20).num_held


def test_who_takes_nothing_is_held_once_it_was_looked_at_for_a_while() -> None:
    ride = Ride().goes(HELD_S, said=20, taken=0)
    assert not ride.pace.is_held
    assert ride.goes(BEAT_S, said=20, taken=0).pace.is_held


def test_who_takes_little_of_much_is_held_as_soon_and_not_by_what_piles_up() -> None:
    ride = Ride().goes(HELD_S + BEAT_S, said=20, taken=1)
    assert ride.pace.is_held
    assert ride.goes(600.0, said=20, taken=1).unread <= 20 * (PER_S + 1)


def test_it_is_held_until_it_has_nearly_caught_up() -> None:
    ride = Ride().goes(HELD_S + BEAT_S, said=20, taken=4)
    assert ride.pace.is_held
    behind = ride.unread
    ride.goes(behind / 4 * BEAT_S - 2 * HELD_S, said=20, taken=4)
    assert ride.pace.is_held
    assert 0 < ride.unread < behind
    assert not ride.goes(2 * HELD_S, said=0, taken=4).pace.is_held


def test_who_is_a_little_too_slow_is_held_now_and_then_and_not_each_second() -> None:
    ride = Ride().goes(100.0, said=25, taken=20)
    assert 1 <= ride.num_pauses <= 12
    # It is never far behind, and never without something to take.
    assert 0 < ride.unread <= (MOST_BEHIND + 1) * 20 * PER_S


def test_who_comes_late_and_catches_up_is_not_held() -> None:
    ride = Ride(said=10_000).goes(10.0, said=10, taken=100)
    assert (ride.num_held, ride.unread > 1000) == (0, True)


def test_who_comes_late_and_falls_behind_further_is_held() -> None:
    assert Ride(said=10_000).goes(2.0, said=10, taken=1).pace.is_held


def test_how_long_nothing_was_taken_is_counted_from_the_last_that_was() -> None:
    ride = Ride().goes(5.0, said=20, taken=1)
    assert ride.pace.stuck_s(ride.time_s) == 0.0
    ride.goes(3.0, said=20, taken=0)
    assert ride.pace.stuck_s(ride.time_s) == 3.0
    ride.goes(0.25, said=0, taken=ride.unread)
    assert ride.pace.stuck_s(ride.time_s) == 0.0


def test_who_has_all_waits_for_the_stream_and_is_not_stuck() -> None:
    ride = Ride(said=5, taken=5).goes(600.0, said=0, taken=1)
    assert (ride.pace.is_held, ride.pace.stuck_s(ride.time_s)) == (False, 0.0)
    # What comes then is looked at from then on.
    assert not ride.goes(HELD_S, said=20, taken=0).pace.is_held
