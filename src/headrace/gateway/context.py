"""What every request of one gateway shares. Owns the way to do what takes long beside the loop; else references only.

A reload replaces `config`.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

from headrace.core.config import GatewayConfig
from headrace.core.ports import Clock
from headrace.core.stages import Stage, StageClock
from headrace.gateway.pulse import Pulse
from headrace.streams.stream import Stream
from headrace.telemetry.metrics import Metrics

P = ParamSpec("P")
T = TypeVar("T")
# Threads that work at once on what is large: they share the interpreter with the loop.
MAX_LARGE = 1


class StreamOwner(Protocol):
    """What a face needs of the service behind it while a stream runs."""

    def cancel(self, stream: Stream, why: str) -> None: ...

    def pause(self, stream: Stream) -> None: ...

    def resume(self, stream: Stream) -> None: ...

    def finished(self, stream: Stream, stages: StageClock) -> None: ...


@dataclass(slots=True)
class Context:
    config: GatewayConfig
    clock: Clock
    service: Any
    metrics: Metrics
    pulse: Pulse
    # Seconds to sleep when a request enters a stage.
    inject: Mapping[str, float] = field(default_factory=dict)
    # The OpenAPI document as it is sent.
    document: bytes = b""
    is_draining: bool = False
    large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_LARGE))

    async def beside(self, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Have something large made in a thread, after what is large already."""
        async with self.large:
            return await asyncio.to_thread(make, *args, **kwargs)

    async def delay(self, stage: Stage) -> None:
        if self.inject:
            seconds = self.inject.get(stage, 0.0)
            if seconds > 0.0:
                await asyncio.sleep(seconds)
