"""A worker's turns and its links on one loop: who runs it, what wakes it, how it ends."""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from headrace.worker.link_loop import Driver, LinkLoop

PATIENCE_S = 60.0


class Jobs:
    """Turns that do what is put; each job may put more. Drained when told to be."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []
        self.done: list[str] = []
        self.threads: set[int] = set()
        self.rest_s = math.inf
        self.is_drained = False

    def compute(self) -> bool:
        self.threads.add(threading.get_ident())
        self.done.append("turn")
        if self.jobs:
            self.jobs.pop(0)()
        return bool(self.jobs)

    def patience_s(self) -> float:
        return self.rest_s

    def send(self) -> None:
        self.done.append("send")

    def drain(self) -> None:
        self.is_drained = True


@pytest.fixture
def links() -> Iterator[LinkLoop]:
    made = LinkLoop(asyncio.new_event_loop())
    yield made
    made.close()


async def thread_of(seen: list[int]) -> None:
    seen.append(threading.get_ident())


def test_the_loop_moves_into_the_thread_that_drives(links: LinkLoop) -> None:
    jobs, seen = Jobs(), list[int]()
    links.start()
    links.do(thread_of(seen))
    jobs.jobs.append(jobs.drain)
    links.drive(Driver(jobs))
    links.do(thread_of(seen))
    assert seen[0] != threading.get_ident() and seen[1] == threading.get_ident()
    assert jobs.threads == {threading.get_ident()} and jobs.done == ["turn", "send"]


def test_turns_follow_each_other_while_there_is_work_and_the_loop_lives_between_them(links: LinkLoop) -> None:
    jobs, between = Jobs(), list[int]()

    def look() -> None:
        asyncio.get_running_loop().call_soon(lambda: between.append(len(jobs.done)))

    jobs.jobs += [look, look, look, jobs.drain]
    links.drive(Driver(jobs))
    assert jobs.done == ["turn", "send"] * 4
    assert len(between) == 3 and len(set(between)) == 3, "each turn is followed by what else is due"


def test_who_has_nothing_to_do_is_woken_from_any_thread(links: LinkLoop) -> None:
    jobs = Jobs()
    driver = Driver(jobs)

    def tell() -> None:
        while len(jobs.done) < 2:
            time.sleep(0.001)
        jobs.jobs.append(jobs.drain)
        driver.wake()

    telling = threading.Thread(target=tell)
    telling.start()
    links.drive(driver)
    telling.join(PATIENCE_S)
    assert jobs.is_drained


def test_what_comes_before_it_begins_needs_no_wake_and_what_comes_after_the_end_harms_nobody(links: LinkLoop) -> None:
    jobs = Jobs()
    driver = Driver(jobs)
    driver.wake()
    jobs.jobs.append(jobs.drain)
    links.drive(driver)
    driver.wake()
    links.do(asyncio.sleep(0.01))
    links.close()
    late = threading.Thread(target=driver.wake)
    late.start()
    late.join(PATIENCE_S)
    assert jobs.done == ["turn", "send"]


def test_its_patience_ends_without_anybody_and_a_shorter_one_is_not_held_up_by_a_longer(links: LinkLoop) -> None:
    jobs = Jobs()
    driver = Driver(jobs)
    jobs.rest_s = 3600.0

    def wake_once() -> None:
        jobs.rest_s = 0.02
        driver.wake()
        asyncio.get_running_loop().call_later(0.005, lambda: jobs.jobs.append(jobs.drain))

    def ask_for_a_wake() -> None:
        asyncio.get_running_loop().call_later(0.01, wake_once)

    jobs.jobs.append(ask_for_a_wake)
    links.drive(driver)
    assert jobs.done == ["turn", "send"] * 3, "the first, the one woken, and the one that patience brought"


def test_what_a_turn_raises_is_raised_to_who_drives(links: LinkLoop) -> None:
    jobs = Jobs()

    def fail() -> None:
        raise ValueError("no device")

    jobs.jobs.append(fail)
    with pytest.raises(ValueError, match="no device"):
        links.drive(Driver(jobs))
    assert jobs.done == ["turn"]
