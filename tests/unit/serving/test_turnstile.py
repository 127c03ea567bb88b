"""Turns of tenants: a flood waits for itself, others walk past it, and who gives up leaves no place empty."""

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from headrace.core.errors import QueueFull
from headrace.core.stages import Stage, StageClock
from headrace.serving.ask import Ask
from headrace.serving.order import Order
from headrace.serving.service import ENCODED_TOGETHER, LARGE_CHARS
from headrace.serving.turnstile import Turnstile
from headrace.text.fitting import Room
from headrace.text.limited import LimitedPool
from headrace.text.tokenizer import Piece
from tests.unit.serving.network_rig import CALLER, CONFIG, PlainDialect, network_rig

pytestmark = pytest.mark.unit


class Crowd:
    """People who stay inside until they are told to leave."""

    def __init__(self, *, most_inside: int = 2, most_waiting: int = 100) -> None:
        self.turnstile = Turnstile(most_inside, most_waiting)
        self.inside: list[str] = []
        self._exits: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str, size: int = 1) -> None:
        """The first letter is the tenant."""
        for name in names:
            self._exits[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._stay(name, size))
        await self.settle()

    async def leave(self, name: str) -> None:
        self._exits[name].set()
        await self.settle()

    async def give_up(self, *names: str) -> None:
        for name in names:
            self._tasks[name].cancel()
        await asyncio.gather(*(self._tasks[name] for name in names), return_exceptions=True)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def _stay(self, name: str, size: int) -> None:
        async with self.turnstile.turn(name[0], size):
            self.inside.append(name)
            try:
                await self._exits[name].wait()
            finally:
                self.inside.remove(name)

    def error_of(self, name: str) -> BaseException | None:
        return self._tasks[name].exception()


def test_a_few_of_a_tenant_are_inside_and_the_others_follow_in_their_order() -> None:
    async def story() -> None:
        crowd = Crowd()
        await crowd.come("a1", "a2", "a3", "a4")
        assert crowd.inside == ["a1", "a2"]
        await crowd.leave("a2")
        assert crowd.inside == ["a1", "a3"]
        await crowd.leave("a1")
        assert crowd.inside == ["a3", "a4"]
        await crowd.leave("a3")
        await crowd.leave("a4")
        assert not crowd.inside and not len(crowd.turnstile)

    asyncio.run(story())


def test_nobody_waits_for_another_tenant() -> None:
    async def story() -> None:
        crowd = Crowd()
        await crowd.come(*(f"a{number}" for number in range(20)), "b")
        assert crowd.inside == ["a0", "a1", "b"]

    asyncio.run(story())


def test_who_gives_up_while_waiting_is_passed_over() -> None:
    async def story() -> None:
        crowd = Crowd(most_inside=1)
        await crowd.come("a1", "a2", "a3")
        await crowd.give_up("a2")
        await crowd.leave("a1")
        assert crowd.inside == ["a3"]
        await crowd.leave("a3")
        assert not len(crowd.turnstile)

    asyncio.run(story())


def test_who_gives_up_when_its_turn_has_come_hands_it_on() -> None:
    async def story() -> None:
        crowd = Crowd(most_inside=1)
        await crowd.come("a1", "a2", "a3")
        crowd._exits["a1"].set()
        while len(crowd.inside):
            await asyncio.sleep(0)
        await crowd.give_up("a2")  # it was woken, and has not run since
        assert crowd.inside == ["a3"]
        await crowd.give_up("a3")
        assert not len(crowd.turnstile)

    asyncio.run(story())


def test_what_waits_is_bounded_for_each_tenant_alone() -> None:
    async def story() -> None:
        crowd = Crowd(most_inside=1, most_waiting=10)
        await crowd.come("a1", "a2", "b1", size=10)
        await crowd.come("a3", "b2", size=1)
        assert isinstance(crowd.error_of("a3"), QueueFull)
        await crowd.leave("a1")
        await crowd.come("a4", size=10)
        assert crowd.inside == ["b1", "a2"], "b2 and a4 wait"
        await crowd.give_up("a4")
        await crowd.come("a5", size=10)
        await crowd.leave("a2")
        assert crowd.inside == ["b1", "a5"]

    asyncio.run(story())


class HeldEncoders:
    """Encode nothing before they are told to."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go_on = asyncio.Event()

    async def encode_batch(self, prompts: Sequence[Sequence[Piece]], rooms: Sequence[Room]) -> list[list[int]]:
        self.begun += [str(prompt[-1])[:1] for prompt in prompts]
        await self.go_on.wait()
        return [[1] * 8 for _ in prompts]

    def close(self) -> None:
        pass


def test_a_flood_of_long_texts_does_not_stand_before_another_tenants(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool, config=replace(CONFIG, context_len=4096)) as rig:
            rig.model.encoders.close()
            rig.model.encoders = encoders = HeldEncoders()  # type: ignore[assignment]

            def ask(text: str, tenant: str) -> asyncio.Task[object]:
                order = Order(f"r{text[0]}{len(tasks)}", "m", (Ask(raw=text, max_tokens=1),), PlainDialect())
                stages = StageClock(Stage.RECEIVE, 0.0)
                return asyncio.create_task(rig.service.open(order, replace(CALLER, tenant=tenant), stages))

            tasks: list[asyncio.Task[object]] = []
            for text, tenant in (*[("f" * 1000, "flood")] * 20, ("q" * 1000, "quiet"), ("L" * LARGE_CHARS, "flood")):
                tasks.append(ask(text, tenant))
            for _ in range(5):
                await asyncio.sleep(0)
            assert encoders.begun == ["f"] * ENCODED_TOGETHER + ["q", "L"]
            encoders.go_on.set()
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0)
                rig.workers[0].answer()
            assert len(encoders.begun) == 22 and all(task.exception() is None for task in tasks)

    asyncio.run(story())
