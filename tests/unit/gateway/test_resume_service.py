"""Streams read on over the real service: generated once, explained once, and every second of theirs has its stage."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest

from headrace.accounts.keys import KeyRing
from headrace.core.config import GatewayConfig
from headrace.gateway.app import Gateway, build_app
from headrace.serving.explanation import Explanation
from headrace.telemetry.metrics import Metrics
from headrace.text.limited import LimitedPool
from tests.unit.gateway.stub import AUTH, JSON, TENANTS, Answer, Call, turns
from tests.unit.serving.network_rig import NetworkRig, network_rig

NAMED = {"x-request-id": "mine"}
NUM_TOKENS = 30
BODY = {"model": "m", "prompt": "hello", "max_tokens": NUM_TOKENS, "stream": True, "seed": 3}


@pytest.fixture(scope="module")
def pool() -> Iterator[LimitedPool]:
    with LimitedPool() as pool:
        yield pool


class World:
    """One application over one worker that turns by hand."""

    def __init__(self, rig: NetworkRig, **settings: Any) -> None:
        self.rig = rig
        config = msgspec.structs.replace(GatewayConfig(), **settings)
        self.app: Gateway = build_app(rig.service, KeyRing(TENANTS), config, Metrics(["m"], ["first"]), rig.clock)
        self.first = self.call("POST", "/v1/completions", {**JSON, **NAMED}, msgspec.json.encode(BODY))

    def call(self, method: str, path: str, headers: dict[str, str], body: bytes = b"", **more: str) -> Call:
        return Call(self.app, method, path, headers, body, **more)

    async def start(self) -> None:
        self.task = asyncio.create_task(self.first.run())
        while not self.rig.service.num_open:
            await asyncio.sleep(0.001)
            self.rig.workers[0].answer()
        await turns()

    async def turns(self, count: int) -> None:
        for _ in range(count):
            self.rig.workers[0].turn()
            await turns()

    async def passes(self, seconds: float) -> None:
        self.rig.clock.time_s += seconds
        self.app.context.pulse.tick()
        await turns()

    async def read(self, after: int = 0) -> Answer:
        return await asyncio.wait_for(self.call("GET", "/v1/streams/mine", AUTH, query=f"after={after}").run(), 30)


def play(pool: LimitedPool, story: Callable[[World], Awaitable[None]], **settings: Any) -> Explanation:
    """What is explained of it, which must be once."""

    async def run() -> Explanation:
        with network_rig(pool) as rig:
            world = World(rig, **settings)
            await world.start()
            began_s = world.rig.clock.time_s
            await story(world)
            await asyncio.wait_for(world.task, 30)
            (explained,) = rig.explained
            assert sum(explained.stages.values()) == pytest.approx(explained.wall_s)
            assert explained.wall_s <= rig.clock.time_s - began_s + 1e-6
            rig.assert_nothing_left()
            return explained

    return asyncio.run(run())


def test_a_stream_whose_client_left_is_explained_when_it_ends_and_computed_once(pool: LimitedPool) -> None:
    async def story(world: World) -> None:
        await world.turns(5)
        world.first.leave()
        await turns()
        await world.passes(5.0)
        second = asyncio.create_task(world.read(2))
        await turns()
        await world.turns(10)
        assert world.rig.explained == []
        await world.turns(NUM_TOKENS)
        assert len(world.rig.explained) == 1
        await world.passes(7.0)
        rest = (await second).body
        whole = (await world.read()).body
        head = world.first.answer.body
        assert whole.startswith(head) and whole.endswith(rest)
        assert (await world.read(head.count(b"id: "))).body == whole[len(head) :]
        assert len(world.rig.workers[0].submitted) == 1

    explained = play(pool, story)
    assert explained.usage.completion_tokens == NUM_TOKENS and explained.error is None
    assert 5.0 <= explained.wall_s < 7.0, "the five seconds are its own, the seven came after its end"


def test_a_stream_that_nobody_resumes_is_cancelled_after_the_grace_and_the_grace_is_its_time(pool: LimitedPool) -> None:
    async def story(world: World) -> None:
        await world.turns(5)
        world.first.leave()
        await turns()
        await world.passes(9.0)
        assert world.rig.explained == []
        await world.passes(1.5)
        again = await world.read()
        assert again.body.count(b"data: [DONE]\n\n") == 1 and b"disconnected" in again.body

    explained = play(pool, story)
    assert explained.error == "disconnected" and explained.wall_s >= 10.5


def test_a_first_client_that_is_cut_off_while_another_reads_leaves_the_sums_whole(pool: LimitedPool) -> None:
    async def story(world: World) -> None:
        await world.turns(3)
        other = asyncio.create_task(world.read())
        await turns()
        world.first.hold()
        await world.turns(2)
        await world.passes(61.0)
        world.first.release()
        await turns()
        assert b"client_too_slow" in world.first.answer.body and world.rig.explained == []
        await world.turns(NUM_TOKENS)
        assert (await other).body.endswith(b"data: [DONE]\n\n")

    explained = play(pool, story)
    assert explained.error is None and explained.usage.completion_tokens == NUM_TOKENS
    assert explained.wall_s >= 61.0


def test_stopped_by_its_owner_it_frees_the_worker_at_once(pool: LimitedPool) -> None:
    async def story(world: World) -> None:
        await world.turns(3)
        assert (await asyncio.wait_for(world.call("DELETE", "/v1/streams/mine", AUTH).run(), 30)).status == 204
        await turns()
        assert world.first.answer.is_complete and world.rig.service.num_sequences == 0

    assert play(pool, story).error == "cancelled"
