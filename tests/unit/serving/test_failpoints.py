"""A gateway that dies between any two of: computed, taken, journaled, sent, acknowledged. No token is missing, none comes
twice, and no client has seen what the next life does not know of."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from headrace.streams.journal import Entry, Then
from headrace.text.limited import LimitedPool
from tests.unit.serving.asks import told
from tests.unit.serving.revival_rig import Client, World, world
from tests.unit.serving.test_revival import KINDS, assert_whole, undisturbed, until_frame

pytestmark = pytest.mark.unit


def computed_and_not_sent_to_the_gateway(there: World) -> None:
    for worker in there.workers:
        for here, *_ in worker.wires:
            here.close()


def taken_and_not_journaled(there: World) -> None:
    there.life.journal.append = lambda entries, then: None  # type: ignore[method-assign]


def journaled_in_part(there: World) -> None:
    """The power of the write ended in the middle of it."""
    append = there.life.journal.append

    def torn(entries: Sequence[Entry], then: Then) -> None:
        append(entries, lambda lost: None)
        last = max(there.folder.glob("*.journal"), key=lambda path: int(path.stem))
        last.write_bytes(last.read_bytes()[:-5])

    there.life.journal.append = torn  # type: ignore[method-assign]


def journaled_and_not_sent(there: World) -> None:
    append = there.life.journal.append
    there.life.journal.append = lambda entries, then: append(entries, lambda lost: None)  # type: ignore[method-assign]


def sent_and_not_acknowledged(there: World) -> None:
    for worker in there.workers:
        for _, wire, *_ in worker.wires:
            wire.close()


def acknowledged(there: World) -> None:
    """And then it dies."""


POINTS: list[Callable[[World], None]] = [
    computed_and_not_sent_to_the_gateway,
    taken_and_not_journaled,
    journaled_in_part,
    journaled_and_not_sent,
    sent_and_not_acknowledged,
    acknowledged,
]


@pytest.mark.parametrize("dies", ["gateway", "both"])
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.__name__)
@pytest.mark.parametrize("kind", ["seeded", "schema", "three choices"])
def test_death_at_every_point(
    pool: LimitedPool, tmp_path: Path, kind: str, point: Callable[[World], None], dies: str
) -> None:
    async def story() -> None:
        asks = KINDS[kind]
        truth, usage, num_frames = await undisturbed(pool, tmp_path / "truth", *asks)
        num_kills = 0
        for frame in range(3, num_frames, 4):
            async with world(pool, tmp_path / f"{frame}", num_workers=2) as there:
                stream = await there.open(*asks, counts=True)
                await until_frame(there, stream, frame)
                client = Client()
                client.read(stream)
                if stream.is_ended or not client.records:
                    continue
                point(there)
                there.turn()
                await asyncio.sleep(0)  # acknowledgements leave
                client.read(stream)
                await there.kill_gateway()
                for worker in there.workers if dies == "both" else ():
                    worker.die()
                stream = (await there.restart_gateway()).get("r") or await there.life.ended()
                assert told(stream.records[: len(client.records)]) == told(client.records), (
                    "it knows less than a client"
                )
                there.run(stream)
                client.read(stream)
                assert_whole(client, stream, truth, usage)
                there.assert_nothing_left(stream)
                num_kills += 1
        assert num_kills > 1

    asyncio.run(story())
