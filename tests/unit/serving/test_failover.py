"""Workers that die while they speak: every stream goes on as if nothing had been, wherever the death falls."""

import asyncio
import json
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from headrace.core.errors import InvalidInput, QueueFull
from headrace.core.messages import Frame, WorkerState
from headrace.core.stages import StageClock
from headrace.serving.ask import Ask
from headrace.serving.recovery import FAILOVER_S
from headrace.streams.stream import Stream
from headrace.text.limited import LimitedPool
from tests.unit.serving.asks import ASKS, CALLING, told, undisturbed
from tests.unit.serving.network_rig import HandWorker, NetworkRig, finishes, ids_of, network_rig
from tests.unit.serving.test_lives import failure_code

pytestmark = pytest.mark.unit


def holder_of(rig: NetworkRig) -> HandWorker:
    (worker,) = (worker for worker in rig.workers if worker.keys)
    return worker


@pytest.mark.parametrize("kind", ASKS)
def test_a_worker_may_die_after_any_frame(pool: LimitedPool, kind: str) -> None:
    async def story() -> None:
        ask = ASKS[kind]
        truth, usage, num_frames = await undisturbed(pool, ask)
        assert num_frames > 1
        for frame in range(1, num_frames):
            with network_rig(pool, num_workers=2) as rig:
                stream = await rig.open(ask)
                first = holder_of(rig)
                while len(first.frames) < frame:
                    first.turn()
                first.die()
                rig.run()
                assert told(stream.records) == truth, f"{kind}, after frame {frame}"
                assert stream.ending is not None and stream.ending.failure is None
                assert stream.ending.usage == usage
                rig.finish(stream)
                # Who has met its stop string needs no other worker.
                assert rig.explained[0].attempts == 2 or kind == "stop strings"
                rig.assert_nothing_left()

    asyncio.run(story())


def test_a_stream_outlives_the_death_of_every_worker_it_has(pool: LimitedPool) -> None:
    async def story() -> None:
        ask = Ask(raw="hello", max_tokens=30, n=2, logprobs=1)
        truth, usage, _ = await undisturbed(pool, ask)
        with network_rig(pool, num_workers=2) as rig:
            stream = await rig.open(ask)
            deaths = 0
            while not stream.is_ended:
                worker = holder_of(rig)
                for _ in range(6):
                    if not stream.is_ended:
                        worker.turn()
                if not stream.is_ended:
                    worker.die()
                    rig.change(worker)
                    deaths += 1
            assert deaths >= 4 and told(stream.records) == truth
            assert stream.ending is not None and stream.ending.usage == usage
            rig.finish(stream)
            (explained,) = rig.explained
            assert explained.attempts == deaths + 1 and explained.replayed_tokens > 2 * deaths
            assert explained.wall_s == pytest.approx(rig.clock.now_s())
            rig.assert_nothing_left()

    asyncio.run(story())


def test_tool_calls_go_on_in_mid_argument(pool: LimitedPool) -> None:
    async def story() -> None:
        ask = CALLING
        truth, _, num_frames = await undisturbed(pool, ask)
        assert json.JSONDecoder().raw_decode(truth[0, False][4])[0]["size"] in (1, 2, 3)
        for frame in range(1, num_frames, 10):
            with network_rig(pool, num_workers=2) as rig:
                stream = await rig.open(ask)
                first = holder_of(rig)
                while len(first.frames) < frame:
                    first.turn()
                first.die()
                rig.run()
                assert told(stream.records) == truth

    asyncio.run(story())


@pytest.mark.parametrize(("kind", "finish"), [("greedy", "length"), ("stop strings", "stop"), ("regex", "stop")])
def test_what_had_nothing_more_to_say_ends_without_a_worker(
    pool: LimitedPool, kind: str, finish: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        truth, usage, _ = await undisturbed(pool, ASKS[kind])
        with network_rig(pool) as rig:
            stream = await rig.open(ASKS[kind])
            (worker,) = rig.workers
            lives = rig.service._lives
            monkeypatch.setattr(lives, "_take_ends", lambda frame, said, now_s: lives._tell(said, frame.step, now_s))
            while worker.keys:
                worker.turn()
            assert not stream.is_ended
            lives.lost(worker.name, list(lives._voices))
            assert finishes(stream) == {0: finish} and told(stream.records) == truth
            assert stream.ending is not None and stream.ending.usage == usage
            rig.finish(stream)

    asyncio.run(story())


def test_rows_that_come_twice_are_heard_once_and_a_gap_is_replayed(pool: LimitedPool) -> None:
    async def story() -> None:
        ask = Ask(raw="hello", max_tokens=30, logprobs=1)
        truth, _, _ = await undisturbed(pool, ask)
        with network_rig(pool) as rig:
            stream = await rig.open(ask)
            (worker,) = rig.workers
            sink = rig.service._lives
            for _ in range(5):
                worker.turn()
            for frame in worker.frames:
                sink.take(worker.name, frame)
            heard = ids_of(stream)
            worker._sink = Deaf()
            worker.turn()
            worker._sink = sink
            worker.turn()
            assert ids_of(stream) == heard
            rig.wait(0.06)
            assert worker.submitted[-1].replay_ids == tuple(heard)
            rig.run()
            assert told(stream.records) == truth
            rig.finish(stream)
            rig.assert_nothing_left()

    asyncio.run(story())


class Deaf:
    def take(self, replica: str, frame: Frame) -> None: ...

    def lost(self, replica: str, keys: Sequence[int], *, is_dead: bool = True) -> None: ...


def refingerprinted(worker: HandWorker, fingerprint: str) -> None:
    assert worker.card is not None
    worker.card = replace(worker.card, fingerprint=fingerprint)


def test_only_what_has_not_spoken_goes_on_with_other_numbers(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool, num_workers=2) as rig:
            first, second = rig.workers
            second.state = WorkerState.GONE
            spoken = await rig.open(Ask(raw="hello", max_tokens=30))
            for _ in range(5):
                first.turn()
            silent = await rig.open(Ask(raw="hello", max_tokens=30))
            refingerprinted(second, "others")
            rig.change(second)
            first.die()
            rig.run()
            assert silent.is_ended and silent.fingerprint == "others"
            assert not spoken.is_ended and spoken.fingerprint == "fp"
            rig.change(first)
            rig.run()
            assert finishes(spoken) == {0: "length"} and spoken.fingerprint == "fp"

    asyncio.run(story())


async def waiting_stream(rig: NetworkRig, ask: Ask) -> Stream:
    """Its only worker died after five tokens."""
    stream = await rig.open(ask)
    (worker,) = rig.workers
    for _ in range(5):
        worker.turn()
    worker.die()
    assert not stream.is_ended and rig.service._recovery.num_waiting == 1
    return stream


def test_what_waits_goes_on_when_its_worker_is_back_and_its_time_adds_up(pool: LimitedPool) -> None:
    async def story() -> None:
        ask = Ask(raw="hello", max_tokens=30)
        truth, _, _ = await undisturbed(pool, ask)
        with network_rig(pool) as rig:
            stream = await waiting_stream(rig, ask)
            rig.clock.time_s += 7.0
            rig.change(rig.workers[0])
            rig.run()
            assert told(stream.records) == truth
            rig.finish(stream)
            (explained,) = rig.explained
            assert explained.stages["route"] == pytest.approx(7.0)
            assert sum(explained.stages.values()) == pytest.approx(rig.clock.now_s())

    asyncio.run(story())


def test_what_waits_can_be_cancelled_paused_and_timed_out(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            cancelled = await waiting_stream(rig, Ask(raw="hello", max_tokens=30))
            rig.service.cancel(cancelled, "disconnected")
            assert failure_code(cancelled) == "disconnected" and rig.service._recovery.num_waiting == 0
            rig.change(rig.workers[0])
            late = await waiting_stream(rig, Ask(raw="hello", max_tokens=30, deadline_s=20.0))
            rig.wait(21.0)
            assert failure_code(late) == "timed_out"
            rig.change(rig.workers[0])
            paused = await waiting_stream(rig, Ask(raw="hello", max_tokens=30))
            rig.service.pause(paused)
            rig.change(rig.workers[0])
            said = len(paused.records)
            for _ in range(5):
                rig.workers[0].turn()
            assert len(paused.records) == said and rig.workers[0].keys
            rig.service.resume(paused)
            rig.run()
            assert finishes(paused) == {0: "length"}
            for stream in (cancelled, late, paused):
                rig.finish(stream)
            rig.assert_nothing_left()

    asyncio.run(story())


def test_a_full_queue_is_no_end_for_what_was_promised_an_answer(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            stream = await waiting_stream(rig, Ask(raw="hello", max_tokens=30))
            (worker,) = rig.workers
            submit_all = worker.engine.submit_all

            def refuse(*_: object) -> list[int]:
                worker.engine.submit_all = submit_all  # type: ignore[method-assign]
                raise QueueFull("too much", retry_after_s=0.5)

            worker.engine.submit_all = refuse  # type: ignore[method-assign, assignment]
            rig.change(worker)
            worker.turn()
            assert not worker.keys and not stream.is_ended
            rig.wait(0.6)
            rig.run()
            assert finishes(stream) == {0: "length"}

    asyncio.run(story())


@pytest.mark.parametrize("has_spoken", [True, False])
def test_what_one_worker_would_not_take_goes_to_one_that_does(pool: LimitedPool, has_spoken: bool) -> None:
    """It was let in: that the next one is smaller, or slower, is not its fault."""

    async def story() -> None:
        with network_rig(pool) as rig:
            ask = Ask(raw="hello", max_tokens=30, n=2)
            stream = await waiting_stream(rig, ask) if has_spoken else await rig.open(ask)
            (worker,) = rig.workers
            if not has_spoken:
                worker.die()
            submit_all = worker.engine.submit_all

            def refuse(*_: object) -> list[int]:
                raise InvalidInput("2 sequences at once are too many", param="n")

            worker.engine.submit_all = refuse  # type: ignore[method-assign, assignment]
            rig.change(worker)
            for _ in range(3):
                worker.turn()
                rig.wait(1.1)
            assert not stream.is_ended
            worker.engine.submit_all = submit_all  # type: ignore[method-assign]
            rig.run()
            assert finishes(stream) == {0: "length", 1: "length"}

    asyncio.run(story())


def test_what_no_worker_takes_fails_with_what_they_say(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            stream = await waiting_stream(rig, Ask(raw="hello", max_tokens=30))
            (worker,) = rig.workers

            def refuse(*_: object) -> list[int]:
                raise InvalidInput("it is too large for me")

            worker.engine.submit_all = refuse  # type: ignore[method-assign, assignment]
            rig.change(worker)
            for _ in range(int(FAILOVER_S)):
                worker.turn()
                rig.wait(1.1)
            assert stream.ending is not None and stream.ending.failure is not None
            assert stream.ending.failure.message.endswith("no other could take it over: it is too large for me")
            rig.finish(stream)
            rig.assert_nothing_left()

    asyncio.run(story())


def test_a_draining_worker_hands_over_and_only_to_its_equal(pool: LimitedPool) -> None:
    async def story() -> None:
        asks = [ASKS["seeded"], ASKS["four choices"], ASKS["schema"], ASKS["prompt"]]
        truths = [(await undisturbed(pool, ask))[0] for ask in asks]
        with network_rig(pool, num_workers=2) as rig:
            first, second = rig.workers
            second.state = WorkerState.LOADING
            clocks: list[StageClock] = []
            streams = []
            for ask in asks:
                streams.append(await rig.open(ask))
                clocks.append(rig.stages)
            for _ in range(4):
                first.turn()
            refingerprinted(second, "others")
            rig.change(second)
            rig.change(first, WorkerState.DRAINING)
            assert not second.keys
            refingerprinted(second, "fp")
            rig.change(second)
            assert len(second.keys) == 7
            rig.run()
            assert [told(stream.records) for stream in streams] == truths
            for stream in streams:
                rig.finish(stream)
            assert [explained.attempts for explained in rig.explained] == [2] * 4
            rig.assert_nothing_left()

    asyncio.run(story())
