"""What every request of one gateway shares. Owns the way to do what takes long beside the loop; else references only.

A reload replaces `config`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from headrace.core.config import GatewayConfig
from headrace.core.errors import HeadraceError
from headrace.core.ports import Clock
from headrace.core.stages import Stage, StageClock
from headrace.gateway.finding import Finding
from headrace.gateway.pulse import Pulse
from headrace.serving.explanation import Explanation
from headrace.streams.audience import Owner
from headrace.streams.shelf import Bounds, Shelf
from headrace.streams.stream import Stream
from headrace.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from headrace.gateway.exchange import Exchange

P = ParamSpec("P")
T = TypeVar("T")
# Threads that work at once on what is large: they share the interpreter with the loop.
MAX_LARGE = 1


class StreamOwner(Owner, Protocol):
    """What a face needs of the service behind it while a stream runs."""

    def parting(self, stream: Stream) -> Awaitable[None] | None: ...

    def finished(self, stream: Stream, stages: StageClock) -> Explanation | None: ...


class Answer(Protocol):
    """Answers a request, whatever face it came by. `error`: refuses it with that."""

    async def __call__(self, exchange: "Exchange", error: HeadraceError | None = None) -> None: ...


async def _unanswered(exchange: "Exchange", error: HeadraceError | None = None) -> None:
    raise AssertionError("no gateway")


@dataclass(slots=True)
class Context:
    config: GatewayConfig
    clock: Clock
    service: Any
    metrics: Metrics
    pulse: Pulse
    shelf: Shelf
    finding: Finding
    # Seconds to sleep when a request enters a stage.
    inject: Mapping[str, float] = field(default_factory=dict)
    # The OpenAPI document as it is sent.
    document: bytes = b""
    # New requests are refused.
    is_draining: bool = False
    # They are answered, and told to come on another connection: this gateway is being replaced.
    is_retiring: bool = False
    # The gateway's own.
    answer: Answer = field(default=_unanswered)
    large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_LARGE))

    async def beside(self, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Have something large made in a thread, after what is large already."""
        async with self.large:
            return await asyncio.to_thread(make, *args, **kwargs)

    async def delay(self, stage: Stage) -> None:
        """To be asked for where there is something to `inject`."""
        seconds = self.inject.get(stage, 0.0)
        if seconds > 0.0:
            await asyncio.sleep(seconds)


def bounds_of(config: GatewayConfig) -> Bounds:
    return Bounds(config.resume_s, config.resume_bytes, config.max_unread_bytes)
