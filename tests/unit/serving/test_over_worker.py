"""The whole way through a real worker host: submitted over a link, computed by its engine, told as text."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from headrace.cluster.replicas import Replicas
from headrace.core.clock import SystemClock
from headrace.core.errors import ContextLengthExceeded
from headrace.core.ports import FrameSink
from headrace.core.stages import Stage, StageClock
from headrace.runner.fake import FakeRunner
from headrace.serving.ask import Ask
from headrace.serving.model_text import ModelText
from headrace.serving.order import Order
from headrace.serving.service import Service
from headrace.streams.reader import Reader
from headrace.streams.stream import Stream
from headrace.text.limited import LimitedPool
from headrace.text.matchers import Matchers
from headrace.transport.memory import MemoryNetwork
from tests.unit.serving.network_rig import (
    CALLER,
    CONFIG,
    EOS,
    LEXICON,
    TOKENIZER,
    VOCABULARY,
    PlainDialect,
    finishes,
    ids_of,
    text_of,
)
from tests.unit.worker.rig import fake_host, fake_model

pytestmark = pytest.mark.unit


class World:
    def __init__(self, service: Service, clock: SystemClock) -> None:
        self.service = service
        self.clock = clock

    async def open(self, *asks: Ask) -> tuple[Stream, StageClock]:
        stages = StageClock(Stage.RECEIVE, self.clock.now_s())
        order = Order("r", "m", asks, PlainDialect(), streamed=True)
        return await self.service.open(order, CALLER, stages), stages

    async def say(self, *asks: Ask) -> Stream:
        stream, stages = await self.open(*asks)
        reader = Reader(stream)
        async with asyncio.timeout(30):
            while not reader.is_done:
                await reader.next()
        stages.close(self.clock.now_s())
        self.service.finished(stream, stages)
        return stream


@asynccontextmanager
async def world(pool: LimitedPool, **inject: float) -> AsyncIterator[World]:
    network, clock, matchers = MemoryNetwork(), SystemClock(), Matchers(LEXICON)
    model = ModelText.build("m", VOCABULARY, pool, context_len=1024, vocab_size=512, eos_ids=(EOS,))
    mount = fake_model(replace(CONFIG, prefix_cache=True), matchers=matchers)
    ready = asyncio.Event()

    def table(sink: FrameSink) -> Replicas:
        return Replicas(
            network,
            {"m": ["worker"]},
            sink,
            clock,
            on_change=lambda replica: ready.set() if replica.is_ready else None,
        )

    service = Service([model], table, clock=clock, inject=inject)
    replicas = service.replicas
    assert isinstance(replicas, Replicas)
    async with fake_host(network, mount=mount).embedded():
        await replicas.start()
        try:
            async with asyncio.timeout(30):
                await ready.wait()
            yield World(service, clock)
        finally:
            await replicas.close()
            model.close()
            matchers.close()


def test_many_streams_at_once_are_their_truths(pool: LimitedPool) -> None:
    async def story() -> None:
        async with world(pool) as there:
            asks = [Ask(raw=f"prompt {number}", max_tokens=5 + number, seed=number) for number in range(20)]
            streams = await asyncio.gather(*(there.say(ask) for ask in asks))
            runner = FakeRunner(CONFIG)
            for ask, stream in zip(asks, streams, strict=True):
                truth = runner.truth(TOKENIZER.encode_text(ask.raw or ""), ask.max_tokens or 0, seed=ask.seed or 0)
                assert ids_of(stream) == truth and finishes(stream) == {0: "length"}
            assert (there.service.num_open, there.service.num_sequences) == (0, 0)

    asyncio.run(story())


def test_refusals_grammars_and_cancels_go_the_whole_way(pool: LimitedPool) -> None:
    async def story() -> None:
        async with world(pool) as there:
            with pytest.raises(ContextLengthExceeded):
                await there.open(Ask(raw="a", max_tokens=9999))
            schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
            shaped = await there.say(Ask(raw="a", json_schema={**schema, "additionalProperties": False}))
            assert json.loads(text_of(shaped))["a"] in (1, 2)
            endless, stages = await there.open(Ask(raw="a", max_tokens=900))
            there.service.cancel(endless, "disconnected")
            there.service.finished(endless, stages)
            await there.say(Ask(raw="b", max_tokens=3))
            (replica,) = there.service.replicas.of("m")
            assert (replica.load.used_blocks, there.service.num_sequences) == (0, 0)

    asyncio.run(story())


@pytest.mark.parametrize("stage", ["tokenise", "route", "transfer", "detokenise"])
def test_time_put_into_a_stage_is_found_there(pool: LimitedPool, stage: str) -> None:
    async def story() -> None:
        async with world(pool, **{stage: 0.05}) as there:
            began_s = there.clock.now_s()
            await there.say(Ask(raw="hello", max_tokens=4))
            found = there.service.explain("r", CALLER)
            assert found.wall_s <= there.clock.now_s() - began_s
            others = {name: spent for name, spent in found.stages.items() if name != stage}
            assert found.stages[stage] > max(others.values())
            assert found.stages[stage] >= 0.05

    asyncio.run(story())
