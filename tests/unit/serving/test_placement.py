"""Where requests go: to a worker that can begin with them at once, whatever each believes of its work."""

import asyncio

import pytest
from msgspec.structs import replace

from headrace.core.messages import WorkerState
from headrace.serving.ask import Ask
from headrace.text.limited import LimitedPool
from tests.unit.serving.network_rig import CONFIG, NetworkRig, network_rig

pytestmark = pytest.mark.unit

FOUR_SLOTS = replace(CONFIG, slots=4)
LONG = Ask(raw="hello", max_tokens=400)


async def taught_short_replies(rig: NetworkRig) -> None:
    """The first worker alone, so that it takes what comes next for little work."""
    for _ in range(20):
        await rig.say(Ask(raw="hello", max_tokens=1))
    assert [len(worker.submitted) for worker in rig.workers] == [20, 0]


async def given_long_ones(rig: NetworkRig, count: int) -> None:
    """The second worker alone."""
    rig.workers[0].state = WorkerState.LOADING
    for _ in range(count):
        await rig.open(LONG)
    rig.workers[0].state = WorkerState.READY


def given(rig: NetworkRig) -> list[int]:
    return [len(worker.keys) for worker in rig.workers]


def test_nobody_queues_at_one_worker_while_another_has_a_slot(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool, num_workers=2, config=FOUR_SLOTS) as rig:
            await taught_short_replies(rig)
            for _ in range(8):
                await rig.open(LONG, turns=True)
            assert given(rig) == [4, 4]
            assert [worker.load.waiting for worker in rig.workers] == [0, 0]

    asyncio.run(story())


def test_what_is_on_its_way_to_a_worker_takes_its_slots(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool, num_workers=2, config=FOUR_SLOTS) as rig:
            await taught_short_replies(rig)
            await asyncio.gather(*[rig.open(LONG) for _ in range(8)])
            assert given(rig) == [4, 4]

    asyncio.run(story())


def test_choices_go_where_all_of_them_find_a_slot(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool, num_workers=2, config=FOUR_SLOTS) as rig:
            await taught_short_replies(rig)
            await given_long_ones(rig, 1)
            for _ in range(2):
                await rig.open(replace(LONG, n=3))
            assert given(rig) == [3, 4]

    asyncio.run(story())


def test_a_long_prompt_goes_where_it_finds_blocks(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool, num_workers=2, config=replace(FOUR_SLOTS, blocks=128)) as rig:
            await taught_short_replies(rig)
            await given_long_ones(rig, 2)
            for letter in "xy":
                await rig.open(Ask(raw=letter * 300, max_tokens=200), turns=True)
            assert given(rig) == [1, 3]

    asyncio.run(story())


def test_where_no_slot_is_free_the_least_work_decides(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool, num_workers=2, config=FOUR_SLOTS) as rig:
            await taught_short_replies(rig)
            for _ in range(9):
                await rig.open(LONG, turns=True)
            assert given(rig) == [5, 4]

    asyncio.run(story())
