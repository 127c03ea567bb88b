"""All replicas that a gateway knows, by model: dials each, dials again when it is gone, watches for silence.

Owns the connections' lives, the tenants that workers are told of, and what each hears of the others' service. Which replica gets a request is the router's.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence

from headrace.cluster.replica import LOOK_S, NewcomerWork, Replica, ReplicaLink
from headrace.core.config import TenantConfig
from headrace.core.errors import HeadraceError
from headrace.core.messages import FromWorker, Goodbye, Service, Tenants
from headrace.core.ports import Clock, FrameSink, Link, Network

log = logging.getLogger("headrace.cluster")

_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 2.0


class Backoff:
    """How long to wait before the next try: doubling, from the first again after a success."""

    def __init__(self) -> None:
        self._next_s = _FIRST_DELAY_S

    def fail(self) -> float:
        delay_s = self._next_s
        self._next_s = min(2.0 * delay_s, _LONGEST_DELAY_S)
        return delay_s

    def succeed(self) -> None:
        self._next_s = _FIRST_DELAY_S


class Replicas:
    """Frames of all go to `sink`; `on_change` hears of every change of a replica's state or connection."""

    def __init__(
        self,
        network: Network,
        addresses: Mapping[str, Sequence[str]],
        sink: FrameSink,
        clock: Clock,
        tenants: tuple[TenantConfig, ...] = (),
        on_change: Callable[[Replica], None] | None = None,
    ) -> None:
        self._network = network
        self._clock = clock
        self._tenants = Tenants(tenants)
        self._gateway = secrets.token_hex(8)
        self._by_model = {model: _replicas_of(model, places, sink) for model, places in addresses.items()}
        self._links: dict[str, ReplicaLink] = {}
        self._tasks: list[asyncio.Task[None]] = []
        for replica in self:
            replica.on_change = on_change or replica.on_change
            replica.on_service = self._share

    def __iter__(self) -> Iterator[Replica]:
        return iter([replica for replicas in self._by_model.values() for replica in replicas])

    def of(self, model: str) -> list[Replica]:
        """In the order of the configuration; empty for a model that is not served."""
        return self._by_model.get(model, [])

    def find(self, name: str) -> Replica | None:
        return next((replica for replica in self if replica.name == name), None)

    async def start(self) -> None:
        """Returns at once: replicas connect when their workers are there."""
        self._tasks = [asyncio.create_task(self._keep(replica)) for replica in self]
        self._tasks.append(asyncio.create_task(self._watch()))

    async def close(self, *, goodbye: bool = True) -> None:
        """Workers abort what this gateway had there; without a goodbye they keep it for another gateway, a while."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        links = list(self._links.values())
        for connection in links:
            if goodbye:
                connection.link.send(Goodbye())
            connection.link.close()
        await asyncio.gather(*(connection.over.wait() for connection in links))
        self._links.clear()

    def set_tenants(self, tenants: tuple[TenantConfig, ...]) -> None:
        self._tenants = Tenants(tenants)
        for replica in self:
            replica.send(self._tenants)

    def look(self, now_s: float) -> None:
        for connection in list(self._links.values()):
            connection.look(now_s)

    def _share(self, giver: Replica, seconds: dict[str, float]) -> None:
        """What a tenant is given by one replica counts at all others of the model."""
        for replica in self.of(giver.model):
            if replica is not giver:
                replica.send(Service(seconds))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(self._clock.now_s())

    async def _keep(self, replica: Replica) -> None:
        backoff = Backoff()
        while True:
            try:
                connection = await self._dial(replica)
                await connection.over.wait()
                if connection.is_welcome:
                    backoff.succeed()
            except (HeadraceError, OSError) as error:
                log.debug("%s: %s", replica.name, error)
            await asyncio.sleep(backoff.fail())

    async def _dial(self, replica: Replica) -> ReplicaLink:
        connections: list[ReplicaLink] = []

        def receive(link: Link) -> ReplicaLink:
            connections.append(ReplicaLink(replica, link))
            return connections[0]

        await self._network.dial(replica.address, receive, FromWorker)
        connection = connections[0]
        self._links[replica.name] = connection
        connection.greet(self._gateway, self._tenants)
        return connection


def _replicas_of(model: str, places: Sequence[str], sink: FrameSink) -> list[Replica]:
    newcomer = NewcomerWork()
    return [Replica(f"{model}/{index}", model, address, sink, newcomer) for index, address in enumerate(places)]
