"""Frames of workers that come twice, late, or never: each stream says what it would have said, once."""

import asyncio
import random
from collections.abc import Sequence

import pytest

from headrace.core.messages import Frame
from headrace.core.ports import FrameSink
from headrace.text.limited import LimitedPool
from tests.unit.serving.asks import ASKS, told, undisturbed
from tests.unit.serving.network_rig import network_rig

pytestmark = pytest.mark.unit

KINDS = ("greedy", "seeded", "stop strings", "penalties", "scores", "schema", "four choices")


class Unreliable:
    """A way for frames that loses, repeats and holds back. Answers and ends come at least once: a link without them is
    lost as a whole."""

    def __init__(self, sink: FrameSink, rng: random.Random) -> None:
        self._sink = sink
        self._rng = rng
        self._held: list[tuple[str, Frame]] = []
        self.faults = {"twice": 0, "late": 0, "never": 0}

    def take(self, replica: str, frame: Frame) -> None:
        is_plain = not (frame.ended or frame.accepted or frame.refused)
        deed = self._rng.choices(("once", "twice", "late", "never"), (80, 10, 5 * is_plain, 5 * is_plain))[0]
        if deed != "once":
            self.faults[deed] += 1
        if deed == "late":
            self._held.append((replica, frame))
        elif deed != "never":
            self._sink.take(replica, frame)
        if deed == "twice":
            self._sink.take(replica, frame)
        if self._held and self._rng.random() < 0.3:
            self._sink.take(*self._held.pop())

    def lost(self, replica: str, keys: Sequence[int], *, is_dead: bool = True) -> None:
        self._sink.lost(replica, keys, is_dead=is_dead)


def test_frames_may_be_lost_repeated_and_late(pool: LimitedPool) -> None:
    async def story() -> None:
        truths = [(await undisturbed(pool, ASKS[kind]))[0] for kind in KINDS]
        faults = {"twice": 0, "late": 0, "never": 0}
        for seed in range(15):
            with network_rig(pool, num_workers=2) as rig:
                way = Unreliable(rig.service._lives, random.Random(seed))
                for worker in rig.workers:
                    worker._sink = way
                streams = [await rig.open(ASKS[kind]) for kind in KINDS]
                for _ in range(100):
                    rig.run()
                    # Whoever waits for a worker is looked at now and then.
                    rig.wait(0.1)
                for stream, truth in zip(streams, truths, strict=True):
                    assert stream.ending is not None and stream.ending.failure is None
                    assert told(stream.records) == truth
                    rig.finish(stream)
                rig.assert_nothing_left()
                faults = {name: count + way.faults[name] for name, count in faults.items()}
        assert all(count > 20 for count in faults.values())

    asyncio.run(story())
