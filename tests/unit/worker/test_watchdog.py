"""The watchdog tells a hung step from one that only we did not see."""

import pytest

from headrace.engine.loop import Engine
from headrace.runner.fake import FakeRunner
from headrace.runner.faults import Faults
from headrace.worker.vigil import Vigil
from headrace.worker.watchdog import Watchdog, WatchedRunner
from tests.builders import TestClock, engine_config, request


def idle_dog() -> Watchdog:
    """Of a process that never waits for a core."""
    return Watchdog(0.25, lambda: 0.0)


def watch(dog: Watchdog, oldest: tuple[int, float, float] | None, since_s: float, seconds: float) -> list[str]:
    looks = [since_s + 0.25 * look for look in range(int(4 * seconds) + 1)]
    return [why for now_s in looks if (why := dog.look(oldest, now_s))]


@pytest.mark.parametrize(("predicted_s", "bound_s"), [(0.01, 2.0), (1.0, 4.0)])
def test_a_step_is_hung_after_two_seconds_or_four_times_its_prediction(predicted_s: float, bound_s: float) -> None:
    step = (7, predicted_s, 0.0)
    assert not watch(idle_dog(), step, 0.0, bound_s)
    assert "step 7" in watch(idle_dog(), step, 0.0, bound_s + 0.5)[0]


def test_many_steps_are_not_one_that_hangs() -> None:
    dog = idle_dog()
    assert not any(dog.look((step, 0.01, 0.0), 0.25 * step) for step in range(100))


def test_time_in_which_nobody_looked_does_not_count() -> None:
    dog = idle_dog()
    step = (7, 0.01, 0.0)
    dog.look(step, 0.0)
    assert not dog.look(step, 30.0)
    assert watch(dog, step, 30.0, 2.0)


def crowded(share: float, step: tuple[int, float, float], seconds: float) -> float | None:
    """When a step counts as hung whose process waits for cores in such a share of the time, if it does."""
    now_s = [0.0]
    dog = Watchdog(0.25, lambda: 100.0 + share * now_s[0])
    for look in range(int(4 * seconds)):
        now_s[0] = 0.25 * look
        if dog.look(step, now_s[0]):
            return now_s[0]
    return None


def test_time_in_which_others_had_the_cores_does_not_count() -> None:
    """But for the first look at a step, which has nothing to compare with, and not for ever."""
    step = (7, 0.01, 0.0)
    assert crowded(0.0, step, 60.0) == 2.25
    # Of a quarter of a second, 0.2 are the others'.
    assert crowded(0.8, step, 60.0) == pytest.approx((2.0 - 0.25) / 0.2 + 0.25, abs=0.3)
    # Two threads that wait are not twice as late as one.
    assert crowded(2.0, step, 60.0) == crowded(1.0, step, 60.0) == pytest.approx(32.25, abs=0.3)


def test_what_one_step_waited_for_cores_is_no_excuse_for_the_next() -> None:
    now_s, waited_s = 0.0, 50.0
    dog = Watchdog(0.25, lambda: waited_s)
    first, second = (7, 0.01, 0.0), (8, 0.01, 0.0)
    for _ in range(40):
        now_s, waited_s = now_s + 0.25, waited_s + 0.25
        assert not dog.look(first, now_s)
    # What was waited between them is neither's.
    waited_s += 100.0
    assert watch(dog, second, now_s + 0.25, 2.0) == []
    assert watch(dog, second, now_s + 2.5, 0.25)


def test_only_a_step_that_is_seen_again_is_asked_about() -> None:
    """It costs the reading of a file for every thread."""
    asked: list[int] = []

    def waited_s() -> float:
        asked.append(1)
        return 0.0

    dog = Watchdog(0.25, waited_s)
    assert not any(
        dog.look(oldest, 0.25 * look) for look, oldest in enumerate([None, None, (1, 0.1, 0.0), (2, 0.1, 0.0)])
    )
    assert not asked
    step = (3, 0.1, 0.0)
    assert not dog.look(step, 1.0) and not asked
    assert not dog.look(step, 1.25) and asked


def test_threads_that_end_are_no_time_given_back() -> None:
    told = iter([90.0, 91.0, 3.0, 3.1, *[3.1] * 20])
    dog, step = Watchdog(0.25, lambda: next(told)), (7, 0.01, 0.0)
    hung = [look for look in range(20) if dog.look(step, 0.25 * look)]
    # One look and a part of one were excused.
    assert hung[0] == 10


def test_idleness_is_no_hang() -> None:
    assert not watch(idle_dog(), None, 0.0, 60.0)


def test_the_oldest_step_in_flight_is_known_with_its_age() -> None:
    config, clock = engine_config(), TestClock()
    watched = WatchedRunner(FakeRunner(config, depth=2, clock=clock), clock)
    engine = Engine(config, watched)
    engine.submit(request("a", 8, 8), 0.0)
    seen = [watched.oldest]
    for now_s in (1.0, 2.0):
        clock.time_s = now_s
        assert engine.begin(now_s)
        seen.append(watched.oldest)
    clock.time_s = 3.0
    engine.end(3.0)
    seen.append(watched.oldest)
    assert [oldest and (oldest[0], oldest[2]) for oldest in seen] == [None, (0, 1.0), (0, 1.0), (1, 3.0)]
    assert watched.age_s(3.5) == 0.5
    engine.end(4.0)
    assert watched.oldest is None and watched.age_s(9.0) == 0.0


def test_a_vigil_counts_only_what_it_saw() -> None:
    vigil = Vigil(0.25)
    assert [vigil.look(now_s) for now_s in (0.0, 0.25, 10.0, 10.1, 9.0)] == pytest.approx([0.0, 0.25, 0.75, 0.85, 0.85])
    vigil.restart()
    assert vigil.look(9.25) == 0.25


def test_a_step_without_room_is_not_watched_and_the_one_before_it_is() -> None:
    config, clock, faults = engine_config(), TestClock(), Faults()
    watched = WatchedRunner(FakeRunner(config, depth=2, clock=clock, faults=faults), clock)
    engine = Engine(config, watched)
    engine.submit(request("a", 8, 8), 0.0)
    faults.run_out(lambda step: step == 1, 0)
    begun = [engine.begin(0.0), engine.begin(0.0)]
    assert begun == [True, False] and watched.age_s(0.5) == 0.5
    clock.time_s = 1.0
    engine.end(1.0)
    assert not engine.begin(1.0) and watched.oldest is None
    assert engine.take_events(1.0).ended[0].reason == "out_of_room"
