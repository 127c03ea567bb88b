"""What is over is gone at once: nothing of a request waits for the garbage collector, which comes seldom."""

import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from headrace.core.errors import HeadraceError, InvalidInput
from headrace.core.stages import Stage, StageClock
from headrace.serving.ask import Ask
from headrace.serving.order import Order
from headrace.text.limited import LimitedPool
from tests.unit.serving.network_rig import CALLER, CONFIG, NetworkRig, PlainDialect, network_rig

ASK = Ask(raw="hello", max_tokens=8, seed=5, n=2)


def garbage_of(pool: LimitedPool, act: Callable[[NetworkRig], Awaitable[None]], **config: int) -> set[str]:
    """The types of ours that only a collection frees, of a second request."""

    async def story() -> set[str]:
        with network_rig(pool, config=replace(CONFIG, **config)) as rig:
            await act(rig)
            gc.collect()
            gc.freeze()
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                await act(rig)
                await asyncio.sleep(0)
                gc.collect()
                return {type(each).__name__ for each in gc.garbage if _is_ours(each)}
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.unfreeze()
                gc.enable()

    return asyncio.run(story())


def _is_ours(each: object) -> bool:
    return type(each).__module__.startswith("headrace.serving") or isinstance(each, HeadraceError)


async def finished(rig: NetworkRig) -> None:
    await rig.say(ASK)


async def cancelled(rig: NetworkRig) -> None:
    stream = await rig.open(ASK)
    rig.workers[0].turn()
    rig.service.cancel(stream, "disconnected")
    rig.finish(stream)
    rig.run()


async def refused(rig: NetworkRig) -> None:
    # Not by `rig.open`: an error that is raised through a frame which holds its task is a cycle of its own.
    order = Order("r", "m", (ASK,), PlainDialect(), streamed=True)
    opening = asyncio.create_task(rig.service.open(order, CALLER, StageClock(Stage.RECEIVE, rig.clock.now_s())))
    while not opening.done():
        await asyncio.sleep(0)
        rig.workers[0].answer()
    assert isinstance(opening.exception(), InvalidInput)


@pytest.mark.parametrize("act", [finished, cancelled])
def test_a_request_that_is_over_leaves_no_garbage(
    pool: LimitedPool, act: Callable[[NetworkRig], Awaitable[None]]
) -> None:
    assert garbage_of(pool, act) == set()


def test_a_request_that_is_refused_leaves_no_garbage(pool: LimitedPool) -> None:
    assert garbage_of(pool, refused, slots=1, max_waiting=1) == set()
