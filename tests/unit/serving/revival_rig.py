"""Gateways that die and come back over workers that live on: real turn loops and links, turned by hand, no socket.

The journal is real and lies in a folder. A gateway that is killed says nothing any more to anybody.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from headrace.cluster.replica import Replica, ReplicaLink
from headrace.core.caller import Caller
from headrace.core.config import EngineConfig
from headrace.core.messages import Frame, Submit, SubmitPart, Tenants, WorkerCard, WorkerState
from headrace.core.ports import FrameSink
from headrace.core.stages import Stage, StageClock
from headrace.engine.loop import Engine
from headrace.serving.ask import Ask
from headrace.serving.model_text import ModelText
from headrace.serving.order import Order
from headrace.serving.service import Service
from headrace.streams.file_journal import FileJournal
from headrace.streams.journal import Kept
from headrace.streams.record import Dialect, Record
from headrace.streams.stream import Stream
from headrace.text.limited import LimitedPool
from headrace.text.matchers import Matchers
from headrace.worker.inbox import Inbox
from headrace.worker.lifecycle import Lifecycle
from headrace.worker.links import GatewayLink, Links
from headrace.worker.turns import TurnLoop
from tests.builders import TestClock
from tests.unit.serving.network_rig import CALLER, CONFIG, EOS, LEXICON, VOCABULARY, PlainDialect
from tests.unit.worker.turning import PacedRunner

SECRET = b"a secret of the tests, long enough"
BEGAN_S = 1e9


class PlainDialects:
    def encode(self, dialect: Dialect) -> bytes:
        return b"plain"

    def decode(self, data: bytes) -> Dialect:
        return PlainDialect()


class WireEnd:
    """One end of a connection in this process: what is sent here is received there at once."""

    peer = "the other end"
    pending_bytes = 0

    def __init__(self) -> None:
        self.is_open = True
        self.other: Any = None
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        if self.is_open:
            self.sent.append(message)
            self.other.received(message)

    post = send

    def close(self) -> None:
        self.is_open = False


class TurnedWorker:
    """A worker's engine, turn loop and links. `frames` counts what it has sent to whichever gateway."""

    def __init__(self, index: int, clock: TestClock, config: EngineConfig = CONFIG) -> None:
        self.name = f"m/{index}"
        self.clock = clock
        self.config = config
        self.matchers = Matchers(LEXICON)
        self.frames = 0
        self.wires: list[tuple[WireEnd, WireEnd, GatewayLink, ReplicaLink]] = []
        self._epoch = 0
        self.start()

    def start(self) -> None:
        """From nothing, as after a death."""
        self._epoch += 1
        config = self.config
        card = WorkerCard(
            self.name, "m", 0, 1, self._epoch, "m@1", "fp", "fp32", config.slots, config.blocks, config.block_size
        )
        self.lifecycle = Lifecycle(replace(card, context_len=config.context_len))
        self.inbox = Inbox()
        self.links = Links(self.lifecycle, self.inbox, self.clock)
        self.engine = Engine(config, PacedRunner(config, self.clock), self.matchers)
        self.loop = TurnLoop(self.engine, self.matchers, self.inbox, self.lifecycle, self.clock, self._send)
        for state in (WorkerState.VERIFYING, WorkerState.WARMING, WorkerState.READY):
            self.lifecycle.enter(state)

    def _send(self, frames: list[tuple[int, Frame]]) -> None:
        self.frames += len(frames)
        self.links.deliver(frames)

    def connect(self, replica: Replica, gateway: str) -> None:
        """Also what a new life of the worker is found by."""
        here, there = WireEnd(), WireEnd()
        link, connection = self.links.accept(here), ReplicaLink(replica, there)
        here.other, there.other = connection, link
        self.wires.append((here, there, link, connection))
        connection.greet(gateway, Tenants(()))

    def die(self) -> None:
        wires, self.wires = self.wires, []
        for here, there, _, connection in wires:
            here.close()
            there.close()
            connection.closed("the worker died")
        self.start()

    def lose_gateways(self) -> None:
        """They are dead: nothing of theirs comes or goes any more."""
        wires, self.wires = self.wires, []
        for here, there, link, _ in wires:
            here.close()
            there.close()
            link.closed("the gateway died")

    def turn(self) -> None:
        if not self.loop.turn() and self.loop._building:
            self.inbox.wait(0.01)
        self.engine.check()


class GatewayLife:
    """One gateway process, from its start to its kill."""

    def __init__(self, world: "World", number: int) -> None:
        self.world = world
        self.name = f"g{number}"
        self.journal = FileJournal(world.folder, SECRET, wall_s=world.wall_s)
        self.replicas: list[Replica] = []

        def table(sink: FrameSink) -> "GatewayLife":
            self.replicas = [Replica(worker.name, "m", "", sink) for worker in world.workers]
            return self

        self.service = Service(
            [world.model],
            table,
            clock=world.clock,
            wall_s=world.wall_s,
            seeds=lambda: next(world.seeds),
            journal=self.journal,
            dialects=PlainDialects(),
        )
        for replica in self.replicas:
            replica.on_change = self.service.replica_changed

    def of(self, model: str) -> Sequence[Replica]:
        return self.replicas

    def connect(self, *indices: int) -> None:
        for index in indices or range(len(self.replicas)):
            self.world.workers[index].connect(self.replicas[index], self.name)

    async def recover(self) -> dict[str, Stream]:
        revived = [await self.service.revive_beside(kept) for kept in await self.journal.recover()]
        return {stream.id: stream for stream in revived if stream is not None}

    async def ended(self, id: str = "r") -> Stream:
        """One that is over, from the journal."""
        kept = await self.journal.find(CALLER.tenant, id)
        assert isinstance(kept, Kept) and kept.ended_s is not None, kept
        return self.service.restored(kept)

    def submits(self) -> list[SubmitPart]:
        """Everything that was computed, or computed again, for this gateway."""
        sent = [message for worker in self.world.workers for _, there, *_ in worker.wires for message in there.sent]
        return [part for message in sent if isinstance(message, Submit) for part in message.parts]


class World:
    def __init__(self, pool: LimitedPool, folder: Path, num_workers: int) -> None:
        self.folder = folder
        self.clock = TestClock()
        self.seeds = iter(range(7, 1000))
        self.model = ModelText.build("m", VOCABULARY, pool, context_len=1024, vocab_size=512, eos_ids=(EOS,))
        self.workers = [TurnedWorker(index, self.clock) for index in range(num_workers)]
        self.num_lives = 0
        self.life = self._begin()
        self.life.connect()

    def wall_s(self) -> float:
        return BEGAN_S + self.clock.time_s

    def _begin(self) -> GatewayLife:
        self.num_lives += 1
        return GatewayLife(self, self.num_lives)

    async def kill_gateway(self) -> None:
        """Its lock is free then, as the kernel would see to."""
        for worker in self.workers:
            worker.lose_gateways()
        await self.life.journal.close()

    async def restart_gateway(self, *connected: int) -> dict[str, Stream]:
        """The streams that it goes on with."""
        self.life = self._begin()
        self.life.connect(*connected)
        return await self.life.recover()

    async def open(
        self, *asks: Ask, id: str = "r", caller: Caller = CALLER, counts: bool = False, streamed: bool = True
    ) -> Stream:
        order = Order(id, "m", asks, PlainDialect(), streamed=streamed, counts=counts)
        stages = StageClock(Stage.RECEIVE, self.clock.now_s())
        task = asyncio.create_task(self.life.service.open(order, caller, stages))
        while not task.done():
            await asyncio.sleep(0)
            for worker in self.workers:
                if not task.done() and not self.life.service.num_sequences:
                    break
                worker.turn()
        return await task

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            for worker in self.workers:
                worker.turn()

    def run(self, *streams: Stream, most_turns: int = 3000) -> None:
        """Until they have ended."""
        for _ in range(most_turns):
            if all(stream.is_ended for stream in streams):
                return
            self.turn()
            self.clock.time_s += 0.001
            self.life.service._recovery.look()
        raise AssertionError("a stream does not come to an end")

    def assert_nothing_left(self, *streams: Stream) -> None:
        service = self.life.service
        for stream in streams:
            service.finished(stream)
        assert (service.num_open, service.num_sequences) == (0, 0)
        assert service._revival is not None and service._revival.num_sought == 0
        assert service._scribe is not None and not service._scribe._births
        self.turn(3)
        for worker in self.workers:
            assert worker.engine.load().used_blocks == 0
            assert (worker.loop._keys.count, len(worker.loop._orphans)) == (0, 0)

    async def close(self) -> None:
        await self.life.journal.close()
        self.model.close()
        for worker in self.workers:
            worker.matchers.close()


@asynccontextmanager
async def world(pool: LimitedPool, folder: Path, *, num_workers: int = 1) -> AsyncIterator[World]:
    made = World(pool, folder, num_workers)
    try:
        yield made
    finally:
        await made.close()


class Client:
    """What one client has of a stream, over however many connections: records by number, once each."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def read(self, stream: Stream, most: int | None = None) -> None:
        """On, from where it is; all there is, or up to record `most`."""
        for record in stream.records[len(self.records) : most]:
            assert record.number == len(self.records) + 1
            self.records.append(record)
