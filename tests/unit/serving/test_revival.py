"""Gateways that are killed while they tell: their next life goes on with every stream as if nothing had been."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.serving import service as service_module
from headrace.serving.ask import Ask
from headrace.streams.stream import Stream
from headrace.text.limited import LimitedPool
from tests.unit.serving.asks import ASKS, CALLING, CALLING_ONCE, Told, told
from tests.unit.serving.network_rig import CALLER, finishes
from tests.unit.serving.revival_rig import Client, World, world

pytestmark = pytest.mark.unit

KINDS: dict[str, tuple[Ask, ...]] = {
    **{kind: (ask,) for kind, ask in ASKS.items() if kind != "no bound"},
    "tools": (CALLING,),
    "one call": (CALLING_ONCE,),
    "three choices": (Ask(raw="hello", max_tokens=12, n=3, temperature=1.0, seed=4),),
    "two prompts": (Ask(raw="hello", max_tokens=9), Ask(raw="other", max_tokens=14, n=2)),
    "echo and ids": (Ask(raw="hello", max_tokens=12, echo=True, return_token_ids=True),),
    "specials": (Ask(raw="hello", max_tokens=20, skip_special_tokens=False, include_stop=True, stop=["q"]),),
}
# Frames after which the gateway is killed: all of these, else some of them.
THOROUGH = ("seeded", "stop strings", "three choices", "one call")


async def undisturbed(pool: LimitedPool, folder: Path, *asks: Ask) -> tuple[Told, Any, int]:
    async with world(pool, folder) as there:
        stream = await there.open(*asks, counts=True)
        there.run(stream)
        assert stream.ending is not None and stream.ending.failure is None
        return told(stream.records), stream.ending.usage, there.workers[0].frames


async def until_frame(there: World, stream: Stream, frame: int) -> None:
    while there.workers[0].frames < frame and not stream.is_ended:
        there.turn()


def assert_whole(client: Client, stream: Stream, truth: Told, usage: Any) -> None:
    assert told(client.records) == truth
    assert [record.ending is not None for record in client.records].count(True) == 1
    assert stream.ending is not None and stream.ending.failure is None
    assert stream.ending.usage == usage
    counted = [record.usage for record in client.records if record.usage is not None]
    assert [one.completion_tokens for one in counted] == sorted(one.completion_tokens for one in counted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gateway_may_be_killed_after_any_frame(pool: LimitedPool, tmp_path: Path, kind: str) -> None:
    """Its worker goes on meanwhile: not at all, a little, or to the end; its client may have missed the last record."""

    async def story() -> None:
        asks = KINDS[kind]
        truth, usage, num_frames = await undisturbed(pool, tmp_path / "truth", *asks)
        frames = range(1, num_frames) if kind in THOROUGH else range(1, num_frames, 6)
        for frame in frames:
            orphan_turns = (0, 3, 200)[frame % 3]
            async with world(pool, tmp_path / f"{frame}") as there:
                stream = await there.open(*asks, counts=True)
                await until_frame(there, stream, frame)
                client = Client()
                client.read(stream, len(stream.records) - frame % 2)
                if stream.is_ended or not stream.records:
                    continue
                await there.kill_gateway()
                there.turn(orphan_turns)
                stream = (await there.restart_gateway())["r"]
                there.run(stream)
                client.read(stream)
                assert_whole(client, stream, truth, usage)
                # Log-probabilities are told once; what has met its stop string, or made its one call, was aborted, and may have
                # told nobody.
                if not any(
                    ask.logprobs or ask.prompt_logprobs or ask.stop or not ask.parallel_tool_calls for ask in asks
                ):
                    assert not there.life.submits(), "it was computed again, though its worker had it"
                there.assert_nothing_left(stream)

    asyncio.run(story())


@pytest.mark.parametrize("kind", ["greedy", "stop strings", "schema", "tools", "two prompts", "prompt"])
def test_gateway_and_worker_may_die_together(pool: LimitedPool, tmp_path: Path, kind: str) -> None:
    async def story() -> None:
        asks = KINDS[kind]
        truth, usage, num_frames = await undisturbed(pool, tmp_path / "truth", *asks)
        for frame in range(3, num_frames, 7):
            async with world(pool, tmp_path / f"{frame}", num_workers=2) as there:
                stream = await there.open(*asks, counts=True)
                await until_frame(there, stream, frame)
                client = Client()
                client.read(stream)
                if stream.is_ended or not stream.records:
                    continue
                await there.kill_gateway()
                for worker in there.workers:
                    worker.die()
                stream = (await there.restart_gateway())["r"]
                there.run(stream)
                client.read(stream)
                assert_whole(client, stream, truth, usage)
                there.assert_nothing_left(stream)

    asyncio.run(story())


@pytest.mark.parametrize("long", [0, 2000])
def test_a_gateway_is_killed_again_and_again(
    pool: LimitedPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: int
) -> None:
    """Also before its workers have answered it, and before it has connected to any. What is long is recalled beside
    the loop."""
    monkeypatch.setattr(service_module, "LONG", long)

    async def story() -> None:
        ask = Ask(raw="hello", max_tokens=40, temperature=1.0, seed=5)
        truth, usage, _ = await undisturbed(pool, tmp_path / "truth", ask)
        async with world(pool, tmp_path / "j") as there:
            stream = await there.open(ask, counts=True)
            client = Client()
            kills = 0
            while not stream.is_ended:
                there.turn((5, 0, 1)[kills % 3])
                client.read(stream)
                if not stream.is_ended and kills < 12:
                    await there.kill_gateway()
                    stream = (await there.restart_gateway())["r"]
                    kills += 1
            client.read(stream)
            assert kills == 12
            assert_whole(client, stream, truth, usage)
            assert not there.life.submits()
            there.assert_nothing_left(stream)

    asyncio.run(story())


def test_frames_that_were_computed_and_never_arrived_come_by_attaching(pool: LimitedPool, tmp_path: Path) -> None:
    async def story() -> None:
        ask = Ask(raw="hello", max_tokens=40)
        truth, usage, _ = await undisturbed(pool, tmp_path / "truth", ask)
        async with world(pool, tmp_path / "j") as there:
            stream = await there.open(ask, counts=True)
            there.turn(5)
            said = len(stream.records)
            for here, *_ in there.workers[0].wires:
                here.close()  # what it sends from now on is lost
            there.turn(5)
            assert len(stream.records) == said
            client = Client()
            client.read(stream)
            await there.kill_gateway()
            stream = (await there.restart_gateway())["r"]
            there.turn()
            assert len(stream.records[said].parts[0].ids) >= 5, "what it missed comes as one"
            there.run(stream)
            client.read(stream)
            assert_whole(client, stream, truth, usage)
            there.assert_nothing_left(stream)

    asyncio.run(story())


def test_a_stream_that_met_its_stop_string_says_nothing_more(pool: LimitedPool, tmp_path: Path) -> None:
    """Its last token is in the journal, its finish is not, and its worker was not told."""

    async def story() -> None:
        plain = Ask(raw="hello", max_tokens=30, seed=3)
        async with world(pool, tmp_path / "plain") as there:
            stream = await there.open(plain)
            there.run(stream)
            text = "".join(part.text for record in stream.records for part in record.parts)
        ask = replace(plain, stop=[text[8:10]])
        truth, usage, _ = await undisturbed(pool, tmp_path / "truth", ask)
        async with world(pool, tmp_path / "j") as there:
            stream = await there.open(ask, counts=True)
            (voice,) = there.life.service._open[stream].voices
            while not voice.is_stopped:
                there.turn()
            assert not stream.is_ended
            client = Client()
            client.read(stream)
            there.workers[0].inbox.take()  # its abort does not arrive
            await there.kill_gateway()
            there.turn(3)
            stream = (await there.restart_gateway())["r"]
            there.run(stream)
            client.read(stream)
            assert finishes(stream) == {0: "stop"}
            assert_whole(client, stream, truth, usage)

    asyncio.run(story())


def test_a_name_that_was_given_twice_is_attached_to_the_right_sequence(pool: LimitedPool, tmp_path: Path) -> None:
    """A client tries again under its id what was lost before it had said anything; each try has a seed of its own."""

    async def story() -> None:
        ask = Ask(raw="hello", max_tokens=60, temperature=1.0)
        async with world(pool, tmp_path / "j", num_workers=2) as there:
            first = await there.open(ask)
            there.turn(2)
            (holder,) = (index for index, replica in enumerate(there.life.replicas) if replica.num_live)
            await there.kill_gateway()
            for path in (tmp_path / "j").glob("*.journal"):
                path.unlink()  # as if its first record had not been kept
            assert not first.is_ended and await there.restart_gateway(1 - holder) == {}
            second = await there.open(ask)
            there.turn(12)
            client = Client()
            client.read(second)
            await there.kill_gateway()
            there.turn(20)
            stream = (await there.restart_gateway())["r"]
            there.run(stream)
            client.read(stream)
            said = told(client.records)
            async with world(pool, tmp_path / "truth") as calm:
                next(calm.seeds)
                stream = await calm.open(ask)
                calm.run(stream)
                assert said == told(stream.records)

    asyncio.run(story())


def test_only_what_somebody_may_come_for_runs_on_without_its_gateway(pool: LimitedPool, tmp_path: Path) -> None:
    async def story() -> None:
        ask = Ask(raw="hello", max_tokens=500)
        async with world(pool, tmp_path / "j") as there:
            await there.open(ask, id="kept")
            await there.open(ask, id="whole", streamed=False)
            await there.open(ask, id="secret", caller=replace(CALLER, no_log=True))
            there.turn(3)
            await there.kill_gateway()
            there.turn(2)
            assert [entry.name[1] for entry in there.workers[0].loop._keys] == ["kept"]
            assert there.workers[0].engine.load().running == 1
            assert list(await there.restart_gateway()) == ["kept"]

    asyncio.run(story())


def test_usage_is_that_of_the_first_computation(pool: LimitedPool, tmp_path: Path) -> None:
    """Blocks that a replay finds in the cache are not the client's."""

    async def story() -> None:
        ask = Ask(raw="hello there, general", max_tokens=20)
        truth, usage, _ = await undisturbed(pool, tmp_path / "truth", ask)
        assert usage.cached_tokens == 0
        async with world(pool, tmp_path / "j", num_workers=2) as there:
            stream = await there.open(ask, counts=True)
            there.turn(4)
            client = Client()
            client.read(stream)
            (holder,) = (index for index, replica in enumerate(there.life.replicas) if replica.num_live)
            await there.kill_gateway()
            there.workers[holder].die()
            # The other has the prompt in its cache.
            streams = await there.restart_gateway(1 - holder)
            other = await there.open(ask, id="warm")
            there.run(other)
            there.clock.time_s += 4.0
            there.life.service.replica_changed(there.life.replicas[1 - holder])
            there.run(streams["r"])
            client.read(streams["r"])
            assert there.life.submits()[-1].request.replay_ids
            assert_whole(client, streams["r"], truth, usage)

    asyncio.run(story())
