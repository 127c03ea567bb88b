"""A worker as its beats tell it, for whoever keeps it alive. Owns one connection at a time; sends no work."""

import asyncio
import contextlib
from collections.abc import Callable

from headrace.core.errors import HeadraceError
from headrace.core.messages import PROTOCOL, Beat, FromWorker, Hello, Welcome
from headrace.core.ports import Network

_DIAL_EVERY_S = 0.1


class WorkerWatch:
    """Dials until it is cancelled, and again whenever the connection is gone."""

    def __init__(self, address: str, network: Network, name: str, heard: Callable[[Beat], None]) -> None:
        self._address = address
        self._network = network
        self._name = name
        self._heard = heard

    async def run(self) -> None:
        while True:
            # Nobody there yet, or no descriptor left, or whatever: it is tried again, and silence is noticed elsewhere.
            with contextlib.suppress(HeadraceError, OSError):
                await self._listen()
            await asyncio.sleep(_DIAL_EVERY_S)

    async def _listen(self) -> None:
        gone = asyncio.Event()
        link = await self._network.dial(self._address, lambda _: _Ear(self._heard, gone), FromWorker)
        try:
            link.send(Hello(PROTOCOL, self._name))
            await gone.wait()
        finally:
            link.close()


class _Ear:
    def __init__(self, heard: Callable[[Beat], None], gone: asyncio.Event) -> None:
        self._heard = heard
        self._gone = gone

    def received(self, message: FromWorker) -> None:
        if isinstance(message, Beat):
            self._heard(message)
        elif isinstance(message, Welcome) and message.protocol != PROTOCOL:
            self._gone.set()

    def closed(self, why: str) -> None:
        self._gone.set()
