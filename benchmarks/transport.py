"""Prints what a link carries one way: messages/s and MB/s by kind of network and size, sender and receiver on one core.

Run from the repository's root: .venv/bin/python benchmarks/transport.py [seconds per row]
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import msgspec
import uvloop

from headrace.core.messages import Ack, Frame, FromGateway, FromWorker
from headrace.core.ports import Link, Network
from headrace.transport.memory import MemoryNetwork
from headrace.transport.unix import UnixNetwork

BURST = 100
# How much may wait before the sender lets the receiver work.
AHEAD_BYTES = 1 << 20


def frame(rows: int) -> Frame:
    return Frame(1, 1, bytes(8 * rows), bytes(4 * rows), bytes(4 * rows), bytes(24 * rows))


MESSAGES: dict[str, tuple[Any, Any]] = {
    "ack": (Ack(12345), FromGateway),
    "frame of 1 row": (frame(1), FromWorker),
    "frame of 32 rows": (frame(32), FromWorker),
    "frame of 256 rows": (frame(256), FromWorker),
    "1 MiB": (Frame(1, 1, bytes(1 << 20)), FromWorker),
}


class Count:
    def __init__(self, link: Link) -> None:
        self.messages = 0

    def received(self, message: Any) -> None:
        self.messages += 1

    def closed(self, why: str) -> None:
        pass


async def measure(network: Network, address: str, message: Any, incoming: Any, seconds: float) -> tuple[float, float]:
    """(messages, CPU-seconds) per second of the clock."""
    counts: list[Count] = []

    def count(link: Link) -> Count:
        counts.append(Count(link))
        return counts[-1]

    listener = await network.listen(address, count, incoming)
    link = await network.dial(address, Count, incoming)
    begin_s, cpu_s, sent = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - begin_s < seconds:
        for _ in range(BURST):
            link.send(message)
            sent += 1
            if link.pending_bytes > AHEAD_BYTES:
                break
        await asyncio.sleep(0)
        while link.pending_bytes > AHEAD_BYTES:
            await asyncio.sleep(0)
    while not counts or counts[0].messages < sent:
        await asyncio.sleep(0)
    spent_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
    link.close()
    await listener.close()
    return sent / spent_s, cpu_s / spent_s


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
        "asyncio": asyncio.new_event_loop,
        "uvloop": uvloop.new_event_loop,
    }
    networks: dict[str, Callable[[], Network]] = {"unix": UnixNetwork, "memory": MemoryNetwork}
    print(f"{'network':8} {'loop':8} {'message':18} {'messages/s':>12} {'MB/s':>8} {'cores':>6}")
    for kind, make in networks.items():
        for loop, factory in loops.items():
            for name, (message, incoming) in MESSAGES.items():
                size_bytes = len(msgspec.msgpack.encode(message)) + 4
                with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=factory) as runner:
                    address = os.path.join(folder, "s")
                    rate, cores = runner.run(measure(make(), address, message, incoming, seconds))
                print(f"{kind:8} {loop:8} {name:18} {rate:12,.0f} {rate * size_bytes / 1e6:8,.1f} {cores:6.2f}")


if __name__ == "__main__":
    main()
