"""What goes wrong while a gateway takes up the streams of its last life: it concerns one stream, and leaves nothing."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.core.errors import InvalidInput
from headrace.serving.ask import Ask
from headrace.serving.revival import PATIENCE_S
from headrace.streams.journal import Birth, Entry, Kept
from headrace.streams.record import Part, Record
from headrace.streams.stream import Stream
from headrace.text.limited import LimitedPool
from tests.unit.serving.network_rig import CALLER, finishes
from tests.unit.serving.revival_rig import PlainDialects, World, world
from tests.unit.serving.test_lives import failure_code

pytestmark = pytest.mark.unit

ASK = Ask(raw="hello", max_tokens=60)


async def killed(there: World, *ids: str, ask: Ask = ASK) -> None:
    """After some tokens of each."""
    for id in ids or ("r",):
        await there.open(ask, id=id)
    there.turn(6)
    await there.kill_gateway()


def sought(there: World) -> int:
    assert there.life.service._revival is not None
    return there.life.service._revival.num_sought


def test_a_stream_is_cancelled_before_its_worker_has_answered(pool: LimitedPool, tmp_path: Path) -> None:
    async def story() -> None:
        async with world(pool, tmp_path) as there:
            await killed(there)
            stream = (await there.restart_gateway())["r"]
            assert sought(there) == 1
            there.life.service.cancel(stream, "disconnected")
            assert failure_code(stream) == "disconnected"
            there.turn(3)
            there.assert_nothing_left(stream)
            await there.kill_gateway()
            assert await there.restart_gateway() == {}
            assert failure_code(await there.life.ended()) == "disconnected", "its ending was kept"

    asyncio.run(story())


def test_a_worker_dies_before_it_has_answered(pool: LimitedPool, tmp_path: Path) -> None:
    async def story() -> None:
        async with world(pool, tmp_path) as there:
            await killed(there)
            stream = (await there.restart_gateway())["r"]
            there.workers[0].die()
            assert sought(there) == 0
            there.life.connect(0)
            there.run(stream)
            assert finishes(stream) == {0: "length"}
            there.assert_nothing_left(stream)

    asyncio.run(story())


def test_a_worker_has_no_room_when_it_is_asked(pool: LimitedPool, tmp_path: Path) -> None:
    async def story() -> None:
        async with world(pool, tmp_path, num_workers=2) as there:
            await killed(there, "a", "b")
            streams = await there.restart_gateway(0)
            there.life.connect(1)
            full = there.workers[1].wires[-1][1]
            full.pending_bytes = 1 << 30
            # In the middle of a frame that tells of both: one not being here.
            there.turn(3)
            full.pending_bytes = 0
            there.life.service.replica_changed(there.life.replicas[1])
            there.run(*streams.values())
            assert all(finishes(stream) == {0: "length"} for stream in streams.values())
            assert not there.life.submits(), "it waited for the one that had it"
            there.assert_nothing_left(*streams.values())

    asyncio.run(story())


def test_who_is_not_there_in_time_is_not_waited_for(pool: LimitedPool, tmp_path: Path) -> None:
    async def story() -> None:
        async with world(pool, tmp_path, num_workers=2) as there:
            await killed(there, ask=replace(ASK, n=2))
            holder = next(index for index, worker in enumerate(there.workers) if worker.loop._keys.count)
            stream = (await there.restart_gateway(1 - holder))["r"]
            there.turn(3)
            said = len(stream.records)
            assert sought(there) == 2 and not there.life.submits()
            there.clock.time_s += PATIENCE_S
            assert there.life.service._revival is not None
            there.life.service._revival.look()
            there.run(stream)
            assert sought(there) == 0 and len(stream.records) > said
            assert [len(part.request.replay_ids) > 3 for part in there.life.submits()] == [True, True]

    asyncio.run(story())


class WrongBirths:
    """A journal of an older version, or one in whose files somebody has been."""

    def __init__(self, kept: Kept) -> None:
        self.truth = kept

    def all(self) -> list[Kept]:
        birth, records = self.truth.birth, self.truth.records
        wrong = replace(records[-1].parts[0], choice=7)
        other = replace(records[-1].parts[0], text="something else")
        alien = replace(records[-1].parts[0], ids=(10**6,))
        return [
            Kept(named(birth, "no order", order=b"\xc1"), list(records), 0),
            Kept(named(birth, "empty order", order=b""), list(records), 0),
            Kept(named(birth, "no model", model="gone"), list(records), 0),
            Kept(named(birth, "no such choice"), with_last(records, wrong), 0),
            Kept(named(birth, "other text"), with_last(records, other), 0),
            Kept(named(birth, "no such id"), with_last(records, alien), 0),
        ]


def named(birth: Birth, name: str, **others: object) -> Birth:
    return replace(birth, stream=name, **others)


def with_last(records: list[Record], part: Part) -> list[Record]:
    return [*records[:-1], replace(records[-1], parts=(part,))]


def test_what_cannot_go_on_ends_and_keeps_nobody_else_from_it(pool: LimitedPool, tmp_path: Path) -> None:
    async def story() -> None:
        async with world(pool, tmp_path) as there:
            await killed(there)
            there.life = there._begin()
            there.life.connect()
            (kept,) = await there.life.journal.recover()
            service, found = there.life.service, dict[str, Stream]()
            for wrong in WrongBirths(kept).all():
                put_back(there, wrong)
                stream = service.revive(wrong)
                assert stream is not None and failure_code(stream) == "stream_lost", wrong.birth.stream
                assert stream.records[:-1] == wrong.records
                found[stream.id] = stream
            stream = service.revive(kept)
            assert stream is not None
            there.run(stream)
            assert finishes(stream) == {0: "length"}
            there.assert_nothing_left(stream)
            await there.kill_gateway()
            assert await there.restart_gateway() == {}
            assert all([(await there.life.ended(id)).is_ended for id in (*found, "r")]), "their endings were kept"

    asyncio.run(story())


def put_back(there: World, kept: Kept) -> None:
    entries = [Entry(kept.birth.tenant, kept.birth.stream, record) for record in kept.records]
    entries[0] = replace(entries[0], birth=kept.birth)
    there.life.journal.append(entries, lambda _: None)


def test_a_stream_that_nobody_can_word_is_buried(
    pool: LimitedPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: PlainDialects, data: bytes) -> PlainDialects:
        raise InvalidInput("not known here")

    async def story() -> None:
        async with world(pool, tmp_path) as there:
            await killed(there)
            with monkeypatch.context() as patch:
                patch.setattr(PlainDialects, "decode", refuse)
                assert await there.restart_gateway() == {}
            assert there.life.service.num_open == 0
            await there.kill_gateway()
            assert await there.restart_gateway() == {}
            assert failure_code(await there.life.ended()) == "stream_lost"

    asyncio.run(story())


def test_a_request_that_is_given_up_as_it_is_accepted_leaves_no_stream_to_revive(
    pool: LimitedPool, tmp_path: Path
) -> None:
    async def story() -> None:
        async with world(pool, tmp_path) as there:
            opening = asyncio.create_task(there.open(ASK))
            while not any(worker.frames > 1 for worker in there.workers):
                await asyncio.sleep(0)
                if there.life.service.num_sequences:
                    there.turn(3)  # accepted, and speaking, before whoever opens it has looked
                    break
            opened = [task for task in asyncio.all_tasks() if "Service.open" in repr(task.get_coro())]
            for task in opened:
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            there.turn(3)
            await there.kill_gateway()
            assert await there.restart_gateway() == {}
            assert failure_code(await there.life.ended()) == "disconnected"
            there.assert_nothing_left()

    asyncio.run(story())


def test_time_goes_on_from_the_first_byte_and_is_counted_once(pool: LimitedPool, tmp_path: Path) -> None:
    async def story() -> None:
        async with world(pool, tmp_path) as there:
            (worker,) = there.workers
            turn = worker.turn

            def turn_late() -> None:
                there.clock.time_s += 5.0  # its first token takes its time
                worker.turn = turn  # type: ignore[method-assign]
                turn()

            worker.turn = turn_late  # type: ignore[method-assign]
            stream = await there.open(replace(ASK, deadline_s=30.0))
            there.turn(6)
            last_s = stream.records[-1].age_s
            await there.kill_gateway()
            there.clock.time_s += 2.0
            stream = (await there.restart_gateway())["r"]
            there.turn()
            there.turn()
            assert 5.0 < last_s < last_s + 2.0 <= stream.records[-1].age_s < last_s + 2.1
            there.run(stream)
            there.life.service.finished(stream)
            explained = there.life.service.explain("r", CALLER)
            assert explained.ttft_s == pytest.approx(stream.records[0].age_s)

    asyncio.run(story())
