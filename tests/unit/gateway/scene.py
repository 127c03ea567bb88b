"""A request that waits for its stream, told as a story: what the stream says, what the client does, how time passes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from headrace.gateway.app import Gateway
from headrace.streams.record import Ending, Failure, Part, Usage
from headrace.streams.stream import Stream
from tests.builders import TestClock
from tests.unit.gateway.stub import JSON, Answer, Call, StubService, gateway, turns

LOST = Failure("unreachable", "the worker was lost", 503, retry_after_s=1.5)


class Scene:
    """A stream that is open and has said nothing; the clock stands still unless the story moves it."""

    def __init__(self, path: str = "/say", headers: dict[str, str] | None = None, **settings: Any) -> None:
        self.service = StubService()
        self.clock = TestClock()
        self.app: Gateway = gateway(self.service, clock=self.clock, **settings)
        self.call = Call(self.app, "POST", path, {**JSON, **(headers or {})}, b"{}")

    async def start(self) -> None:
        self.task = asyncio.create_task(self.call.run())
        await turns()

    @property
    def stream(self) -> Stream:
        return self.service.streams[0]

    @property
    def answer(self) -> Answer:
        return self.call.answer

    async def says(self, *words: str) -> None:
        for word in words:
            self.stream.append([Part(0, text=word)])
        await turns()

    async def ends(self, failure: Failure | None = None) -> None:
        self.stream.end(Ending(Usage(1, 0, 2), failure))
        await turns()

    async def passes(self, seconds: float) -> None:
        self.clock.time_s += seconds
        self.app.context.pulse.tick()
        await turns()


def play(story: Callable[[Scene], Awaitable[None]], scene: Scene | None = None) -> Scene:
    async def run() -> Scene:
        found = scene or Scene()
        await found.start()
        await story(found)
        await asyncio.wait_for(found.task, 30)
        assert len(found.app.context.pulse) == 0
        assert found.app.num_open == 0
        assert found.service.calls.count("finished") == 1
        return found

    return asyncio.run(run())
