"""Stands between a gateway and its workers, and mistreats what workers say: frames come twice, late, again, or never.

A stream socket would do none of this by itself. Owns the sockets in the run folder that the gateway is told to dial instead of
the workers'; everything but a worker's frames is passed on as it is, and in order.
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from serve_rig import Server, child

from headrace.transport.wire import PREAMBLE, Limits, Parser

CHUNK_BYTES = 1 << 16
# How a message of a worker begins that is a frame: a map of any small size whose first entry says so.
FRAME = b"\xa4type\xa5frame"


@dataclass(frozen=True, slots=True)
class Mischief:
    """Chances for each frame. One that is dropped costs its gateway the connection: what comes behind it is of no use."""

    twice: float = 0.05
    again: float = 0.03
    late: float = 0.002
    dropped: float = 0.001
    late_s: tuple[float, float] = (0.01, 0.3)


@dataclass(slots=True)
class FrameProxy:
    """One worker's door. `done` counts what was done to frames."""

    worker: str
    mischief: Mischief
    rng: random.Random
    done: Counter[str]
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def meet(self, gateway_in: asyncio.StreamReader, gateway_out: asyncio.StreamWriter) -> None:
        """One connection of a gateway, until either end leaves."""
        try:
            worker_in, worker_out = await asyncio.open_unix_connection(self.worker)
        except OSError:
            gateway_out.close()  # it dials again
            return
        both = [
            asyncio.create_task(pass_on(gateway_in, worker_out)),
            asyncio.create_task(self._disturb(worker_in, gateway_out)),
        ]
        self._tasks.update(both)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            self._tasks.difference_update(both)
            worker_out.close()
            gateway_out.close()

    async def _disturb(self, worker: asyncio.StreamReader, gateway: asyncio.StreamWriter) -> None:
        gateway.write(await worker.readexactly(len(PREAMBLE)))
        parser = Parser(Limits().max_message_bytes)
        earlier: deque[bytes] = deque(maxlen=50)
        while data := await worker.read(CHUNK_BYTES):
            if gateway.is_closing():
                return
            for view in parser.feed(data):
                message = len(view).to_bytes(4, "big") + bytes(view)
                if FRAME not in message[:32]:
                    gateway.write(message)
                    continue
                for said in await self._mistreated(message, earlier):
                    gateway.write(said)
                earlier.append(message)
            await gateway.drain()

    async def _mistreated(self, frame: bytes, earlier: deque[bytes]) -> list[bytes]:
        chances, rng = self.mischief, self.rng
        self.done["frames"] += 1
        if rng.random() < chances.dropped:
            self.done["dropped"] += 1
            return []
        if rng.random() < chances.late:
            self.done["late"] += 1
            await asyncio.sleep(rng.uniform(*chances.late_s))
        told = [frame]
        if rng.random() < chances.twice:
            self.done["twice"] += 1
            told.append(frame)
        if earlier and rng.random() < chances.again:
            self.done["again"] += 1
            told.append(rng.choice(earlier))
        return told

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(CHUNK_BYTES):
        sink.write(data)
        await sink.drain()


@contextlib.asynccontextmanager
async def between(one: Server, gateways: list[str], mischief: Mischief, seed: int) -> AsyncIterator[Counter[str]]:
    """Every gateway of the server speaks with its workers through here, from its next life on, which begins now.
    What was done to frames is counted."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it tells of every write to who has died
    folder = run_folder(one)
    orders = json.loads((folder / "orders.json").read_text())
    done: Counter[str] = Counter()
    proxies, servers = [], []
    for model, addresses in orders["addresses"].items():
        places = []
        for address in addresses:
            proxy = FrameProxy(address, mischief, random.Random(f"{seed} {address[-8:]}"), done)
            place = address.replace("worker-", "proxy-")
            proxies.append(proxy)
            servers.append(await asyncio.start_unix_server(proxy.meet, place))
            places.append(place)
        orders["addresses"][model] = places
    written = folder / "orders.new"
    written.write_text(json.dumps(orders))
    os.replace(written, folder / "orders.json")
    for gateway in gateways:
        pid = child(one.pid, f"headrace: {gateway}")
        os.kill(pid, signal.SIGKILL)
        await back(one, gateway, pid)
    try:
        yield done
    finally:
        for server in servers:
            server.close()
        for proxy in proxies:
            await proxy.close()


async def back(one: Server, title: str, pid: int) -> None:
    """Until another process has the title, and the server answers."""
    for _ in range(600):
        await asyncio.sleep(0.1)
        with contextlib.suppress(SystemExit, OSError):
            if child(one.pid, f"headrace: {title}") != pid:
                ready = await asyncio.to_thread(one.gauge, "headrace_replica_ready")
                if ready:
                    return
    raise TimeoutError(f"{title} did not come back")


def run_folder(one: Server) -> Path:
    """Where its workers' sockets lie: told by the kernel."""
    pid = child(one.pid, "headrace: worker")
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and f"socket:[{fields[6]}]" in inodes and "/worker-" in fields[7]:
            return Path(fields[7]).parent
    raise FileNotFoundError("no worker listens")
