"""A worker asked at its own socket, as a gateway asks it: what one request takes before any gateway adds to it.

Prints p50 and p99 in seconds as JSON. `serve_gateway.py` runs it: python benchmarks/serve_worker.py SOCKET --rate 300
"""

import argparse
import asyncio
import gc
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import uvloop

from headrace.core.messages import PROTOCOL, Ack, Frame, FromWorker, Hello, Submit, SubmitPart, Welcome
from headrace.core.ports import Link
from headrace.core.request import Request, SamplingParams
from headrace.transport.unix import UnixNetwork

ACK_S = 0.01
PROMPT = 20


class Asker:
    """Meets the contract of `core.ports.Receiver`: acknowledges as gateways do, and knows when each key was answered."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._last_frame = 0
        self._is_ack_due = False
        self.welcome = asyncio.Event()
        self.ended_s: dict[int, float] = {}

    def received(self, message: Any) -> None:
        if isinstance(message, Welcome):
            self.welcome.set()
        elif isinstance(message, Frame):
            now_s = time.perf_counter()
            self.ended_s |= {end.key: now_s for end in message.ended}
            self._last_frame = message.number
            if not self._is_ack_due:
                self._is_ack_due = True
                asyncio.get_running_loop().call_later(ACK_S, self._acknowledge)

    def closed(self, why: str) -> None:
        pass

    def _acknowledge(self) -> None:
        self._is_ack_due = False
        self._link.send(Ack(self._last_frame))


async def ask(socket: Path, rate: float, seconds: float, warmup_s: float) -> dict[str, float]:
    """Requests at even distances, whatever becomes of those before; those of the warm-up do not count."""
    chance, askers = random.Random(1), []

    def receive(link: Link) -> Asker:
        askers.append(Asker(link))
        return askers[-1]

    link = await UnixNetwork().dial(str(socket), receive, FromWorker)
    link.send(Hello(PROTOCOL, "asker"))
    asker = askers[0]
    await asker.welcome.wait()
    sent_s: dict[int, float] = {}
    # As the load tool does, whose figures these are held against.
    gc.collect()
    gc.freeze()
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    begin_s = time.perf_counter()
    for key in range(1, 1 + int(rate * (warmup_s + seconds))):
        prompt = tuple(chance.choices(range(256, 500), k=PROMPT))
        request = Request(f"asked {key}", "asker", prompt, max_tokens=1, sampling=greedy)
        await asyncio.sleep(max(0.0, begin_s + key / rate - time.perf_counter()))
        sent_s[key] = time.perf_counter()
        link.send(Submit((SubmitPart((key,), request),)))
    await asyncio.sleep(1.0)
    lasted = [asker.ended_s[key] - at_s for key, at_s in sent_s.items() if at_s >= begin_s + warmup_s]
    link.close()
    cuts = statistics.quantiles(lasted, n=100)
    return {"count": len(lasted), "p50_s": cuts[49], "p99_s": cuts[98]}


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("socket", type=Path)
    flags.add_argument("--rate", type=float, default=300.0)
    flags.add_argument("--seconds", type=float, default=10.0)
    flags.add_argument("--warmup", type=float, default=2.0)
    given = flags.parse_args()
    print(json.dumps(uvloop.run(ask(given.socket, given.rate, given.seconds, given.warmup))))
