"""Lives that are disturbed: workers lost at every stage, random lives by the thousand, time that adds up."""

import asyncio
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.core.errors import HeadraceError, Unreachable
from headrace.core.event import Outcome, Waits
from headrace.core.messages import Frame, ScoreTable, WorkerState
from headrace.core.plan import Scores
from headrace.core.stages import Stage, StageClock
from headrace.serving.ask import Ask
from headrace.serving.choice import Choice
from headrace.serving.injection import LateSink
from headrace.serving.life import Life, spread
from headrace.serving.voice import Voice
from headrace.streams.stream import Stream
from headrace.text.limited import LimitedPool
from tests.unit.serving.asks import told, undisturbed
from tests.unit.serving.network_rig import CONFIG, TOKENIZER, HandWorker, finishes, ids_of, network_rig, text_of
from tests.unit.serving.scripted import ScriptedRig

pytestmark = pytest.mark.unit


def failure_code(stream: Stream) -> str | None:
    assert stream.ending is not None
    return stream.ending.failure.code if stream.ending.failure is not None else None


def die_of_it(worker: HandWorker) -> None:
    """Instead of an answer to a submission."""
    if worker.keys:
        worker.die()


def test_a_worker_lost_before_it_accepted_is_replaced_unseen(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool, num_workers=2) as rig:
            rig.workers[0].answer = partial(die_of_it, rig.workers[0])  # type: ignore[method-assign]
            stream = await rig.open(Ask(raw="hello", max_tokens=9))
            rig.run()
            assert ids_of(stream) == rig.workers[1].runner.truth(TOKENIZER.encode_text("hello"), 9, seed=7)
            rig.finish(stream)
            assert (rig.explained[0].attempts, rig.explained[0].replica) == (2, "w1")

    asyncio.run(story())


def test_what_loses_all_its_workers_waits_a_minute_for_one_and_then_fails(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool, num_workers=2) as rig:
            silent = await rig.open(Ask(raw="hello", max_tokens=9, n=2))
            spoken = await rig.open(Ask(raw="hello", max_tokens=9))
            holder = {len(worker.submitted): worker for worker in rig.workers}
            holder[1].turn()
            holder[2].die()
            holder[1].die()
            rig.wait(59.0)
            assert not silent.is_ended and not spoken.is_ended
            rig.wait(2.0)
            assert failure_code(spoken) == failure_code(silent) == "unreachable"
            assert spoken.ending is not None and spoken.ending.failure is not None
            assert spoken.ending.failure.status == 503 and spoken.ending.failure.retry_after_s == 1.0
            for stream in (silent, spoken):
                rig.finish(stream)
            assert (rig.service.num_open, rig.service.num_sequences) == (0, 0)

    asyncio.run(story())


def test_what_was_placed_again_is_whole(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool, num_workers=2) as rig:
            stream = await rig.open(Ask(raw="hello", max_tokens=9, n=2))
            holder = next(worker for worker in rig.workers if worker.submitted)
            holder.die()
            rig.run()
            assert finishes(stream) == {0: "length", 1: "length"}
            for choice in range(2):
                truth = holder.runner.truth(TOKENIZER.encode_text("hello"), 9, seed=7, choice=choice)
                assert ids_of(stream, choice) == truth

    asyncio.run(story())


def test_a_lost_worker_does_not_undo_a_stop(pool: LimitedPool) -> None:
    async def story() -> None:
        rig = ScriptedRig(pool)
        stream = await rig.open(Ask(raw="a", stop="!"))
        rig.worker.say(b"done!")
        rig.worker.die()
        assert text_of(stream) == "done" and finishes(stream) == {0: "stop"} and failure_code(stream) is None
        rig.model.close()

    asyncio.run(story())


def test_a_row_that_fails_ends_its_stream_alone(pool: LimitedPool) -> None:
    async def story() -> None:
        rig = ScriptedRig(pool)
        first, second = await rig.open(Ask(raw="a", n=2)), await rig.open(Ask(raw="a"))
        rig.worker.step({0: 65, 1: 65, 2: 65})
        rig.worker.end(0, Outcome.FAILED, "not_finite", "the row was not finite")
        assert failure_code(first) == "not_finite"
        assert [key for key, _ in rig.worker.aborts] == [1]
        rig.worker.step({1: 65, 2: 66}, "length")
        assert text_of(second) == "AB" and failure_code(second) is None
        rig.model.close()

    asyncio.run(story())


def test_a_reply_that_cannot_be_told_fails_alone(pool: LimitedPool, caplog: pytest.LogCaptureFixture) -> None:
    class Endless(Choice):
        def finish(self) -> str:
            raise ZeroDivisionError

    async def story() -> None:
        rig = ScriptedRig(pool)
        streams = [await rig.open(Ask(raw="a")) for _ in range(3)]
        first, second, _ = (rig.service._open[stream].voices[0] for stream in streams)
        first.choice, second.choice = Dumb(TOKENIZER.table), Endless(TOKENIZER.table)
        rig.worker.step(dict.fromkeys(range(3), 65))
        rig.worker.step(dict.fromkeys(range(3), 66), "length")
        assert [failure_code(stream) for stream in streams] == ["internal_error", "internal_error", None]
        assert text_of(streams[2]) == "AB" and len(caplog.records) == 2
        assert [key for key, _ in rig.worker.aborts] == [0]
        rig.model.close()

    asyncio.run(story())


def test_what_a_worker_gives_up_is_asked_for_again_after_a_moment(pool: LimitedPool) -> None:
    async def story() -> None:
        rig = ScriptedRig(pool)
        stream = await rig.open(Ask(raw="a"))
        rig.worker.say(b"ab")
        rig.worker.end(0, Outcome.ABORTED, "aborted")
        assert list(rig.worker.requests) == [0]
        rig.clock.time_s += 0.06
        rig.service._recovery.look()
        assert rig.worker.requests[1].replay_ids == tuple(b"ab")
        rig.worker.say(b"c", key=1, end="stop")
        assert text_of(stream) == "abc" and failure_code(stream) is None
        rig.model.close()

    asyncio.run(story())


def test_what_another_gateway_took_ends_here(pool: LimitedPool) -> None:
    async def story() -> None:
        rig = ScriptedRig(pool)
        stream = await rig.open(Ask(raw="a"))
        rig.worker.end(0, Outcome.ABORTED, "taken")
        assert failure_code(stream) == "unreachable"
        rig.model.close()

    asyncio.run(story())


def test_stages_sum_to_wall_time_and_the_engines_are_in_them(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool, config=replace(CONFIG, slots=1)) as rig:
            began_s = rig.clock.now_s()
            first = await rig.open(Ask(raw="hello", max_tokens=20))
            stages = rig.stages
            rig.clock.time_s += 0.125
            rig.run()
            rig.clock.time_s += 0.25
            seconds = stages.close(rig.clock.now_s())
            rig.service.finished(first, stages)
            assert sum(seconds.values()) == pytest.approx(rig.clock.now_s() - began_s, abs=1e-12)
            assert seconds[Stage.CLIENT] == 0.25
            assert seconds[Stage.WAIT_CAPACITY] + seconds.get(Stage.WAIT_FAIRNESS, 0.0) == pytest.approx(0.125)
            assert seconds[Stage.DECODE] == pytest.approx(19 * 0.0101, rel=0.01)
            assert seconds[Stage.PREFILL] > 0.0 and seconds[Stage.TRANSFER] == pytest.approx(0.0, abs=1e-12)
            (explained,) = rig.explained
            assert explained.wall_s == pytest.approx(rig.clock.now_s() - began_s)
            assert explained.ttft_s == pytest.approx(0.125 + seconds[Stage.PREFILL])
            assert explained.itl_s == pytest.approx(0.0101, rel=0.01)

    asyncio.run(story())


def test_time_that_no_engine_accounts_for_is_transfer() -> None:
    stages = StageClock(Stage.ROUTE, 0.0)
    stages.enter(Stage.TRANSFER, 1.0)
    stages.enter(Stage.DETOKENISE, 4.0)
    spread(stages.seconds, Waits(wait_capacity_s=0.5, prefill_s=1.0, decode_s=0.75, paused_s=0.25), 3.0)
    expected = {
        Stage.ROUTE: 1.0,
        Stage.TRANSFER: 0.5,
        Stage.WAIT_CAPACITY: 0.5,
        Stage.PREFILL: 1.0,
        Stage.DECODE: 0.75,
        Stage.CLIENT: 0.25,
    }
    assert stages.seconds == expected


def test_a_stay_longer_than_its_interval_is_the_interval() -> None:
    stages = StageClock(Stage.TRANSFER, 0.0)
    stages.enter(Stage.DETOKENISE, 2.0)
    spread(stages.seconds, Waits(prefill_s=1.0, decode_s=3.0), 2.0)
    assert stages.seconds == {Stage.TRANSFER: 0.0, Stage.PREFILL: 0.5, Stage.DECODE: 1.5}


def test_late_frames_keep_their_order() -> None:
    class Sink:
        def __init__(self) -> None:
            self.heard: list[object] = []

        def take(self, replica: str, frame: Frame) -> None:
            self.heard.append(frame.number)

        def lost(self, replica: str, keys: object, *, is_dead: bool = True) -> None:
            self.heard.append(keys)

    async def story() -> None:
        sink = Sink()
        late = LateSink(sink, 1e-4)
        for number in range(5):
            late.take("w", Frame(number, 0))
        late.lost("w", [7])
        assert sink.heard == []
        while len(sink.heard) < 6:
            await asyncio.sleep(0)
        assert sink.heard == [0, 1, 2, 3, 4, [7]]

    asyncio.run(story())


def test_a_frame_for_nobody_harms_nothing(pool: LimitedPool) -> None:
    async def story() -> None:
        rig = ScriptedRig(pool)
        stream = await rig.open(Ask(raw="a"))
        rig.service.cancel(stream, "disconnected")
        said = len(stream.records)
        rig.worker.say(b"late", end="stop")
        rig.worker._sink.take("w0", Frame(9, 9, ended=(rig.worker.ending(0, Outcome.FINISHED, "stop"),)))
        assert len(stream.records) == said
        rig.model.close()

    asyncio.run(story())


def random_ask(chance: random.Random) -> Ask:
    return Ask(
        raw="x" * chance.randint(1, 40),
        max_tokens=chance.randint(1, 30),
        n=chance.choice((1, 1, 1, 2, 3)),
        seed=chance.randint(0, 9),
        stop=chance.choice(([], [], ["a"], ["o ", "e"])),
        logprobs=chance.choice((None, None, 1)),
        echo=chance.random() < 0.1,
        queue_timeout_s=chance.choice((None, None, 0.05)),
        temperature=chance.choice((0.0, -1.0)) if chance.random() < 0.05 else 0.0,
    )


def test_a_thousand_random_lives_have_exactly_one_ending_each(pool: LimitedPool) -> None:
    async def story() -> None:
        chance = random.Random(11)
        with network_rig(pool, num_workers=3, config=replace(CONFIG, slots=4, blocks=128, max_waiting=12)) as rig:
            streams: list[Stream] = []
            asked: dict[Stream, list[Ask]] = {}
            paused: list[Stream] = []
            refused = 0
            while len(streams) + refused < 1000:
                try:
                    asks = [random_ask(chance) for _ in range(chance.choice((1, 1, 2)))]
                    stream = await rig.open(*asks)
                    streams.append(stream)
                    asked[stream] = asks
                except HeadraceError:
                    refused += 1
                for _ in range(chance.randint(0, 6)):
                    chance.choice(rig.workers).turn()
                luck = chance.random()
                if luck < 0.1 and streams:
                    rig.service.cancel(chance.choice(streams[-5:]), "disconnected")
                elif luck < 0.15 and streams:
                    paused.append(chance.choice(streams[-5:]))
                    rig.service.pause(paused[-1])
                elif luck < 0.18:
                    worker = chance.choice(rig.workers)
                    worker.die()
                    rig.change(worker)
                elif luck < 0.21:
                    worker = chance.choice(rig.workers)
                    rig.change(worker, WorkerState.DRAINING)
                    rig.change(worker)
                while paused and chance.random() < 0.5:
                    rig.service.resume(paused.pop())
            for stream in paused:
                rig.service.resume(stream)
            rig.run()
            while rig.service._recovery.num_waiting:
                rig.wait(1.0)
                rig.run()
            codes = {failure_code(stream) for stream in streams}
            assert {None, "disconnected", "timed_out"} <= codes and refused > 20
            assert codes <= {None, "disconnected", "timed_out", "worker_killed"}
            runner = rig.workers[0].runner
            for stream in streams:
                choices = [(ask, choice) for ask in asked[stream] for choice in range(ask.n)]
                for number, (ask, choice) in enumerate(choices):
                    prompt = TOKENIZER.encode_text(ask.raw or "")
                    truth = runner.truth(prompt, ask.max_tokens or 0, seed=ask.seed or 0, choice=choice)
                    heard = ids_of(stream, number)
                    assert heard == truth[: len(heard)]
                    assert finishes(stream).get(number) != "length" or heard == truth
            for stream in streams:
                assert sum(record.ending is not None for record in stream.records) == 1
                assert stream.records[-1].ending is not None
                rig.finish(stream)
            rig.assert_nothing_left()
            assert len(rig.explained) == len(streams)

    asyncio.run(story())


def test_a_reply_that_was_cancelled_says_how_long_it_spoke(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            stream = await rig.open(Ask(raw="hello", max_tokens=40))
            rig.workers[0].turn()
            rig.wait(0.5)
            rig.workers[0].turn()
            rig.service.cancel(stream, "disconnected")
            rig.finish(stream)
            (explained,) = rig.explained
            assert explained.stages["decode"] == pytest.approx(0.5, abs=0.2)
            assert explained.stages["decode"] + explained.stages["transfer"] == pytest.approx(
                explained.wall_s - explained.stages.get("client", 0.0), abs=0.01
            )

    asyncio.run(story())


def test_who_loses_every_worker_before_one_has_answered_goes_on_once_one_is_back(pool: LimitedPool) -> None:
    async def story() -> None:
        ask = Ask(raw="hello", max_tokens=8)
        truth = (await undisturbed(pool, ask))[0]
        with network_rig(pool, num_workers=2) as rig:
            for worker in rig.workers:
                worker.answer = partial(die_of_it, worker)  # type: ignore[method-assign]
            stream = await rig.open(ask)
            for worker in rig.workers:
                worker.answer()
            assert not any(worker.is_ready for worker in rig.workers) and not stream.is_ended
            with pytest.raises(Unreachable):
                await rig.open(Ask(raw="nobody is there"))
            for worker in rig.workers:
                del worker.answer
                rig.change(worker)
            rig.run()
            assert told(stream.records) == truth
            rig.finish(stream)
            rig.assert_nothing_left()

    asyncio.run(story())


def test_an_end_that_overtakes_its_abort_still_counts_to_the_stop(pool: LimitedPool) -> None:
    async def story() -> None:
        rig = ScriptedRig(pool)
        stream = await rig.open(Ask(raw="a", stop="!"))
        rig.worker.say(b"a!bcd", end="length")
        assert finishes(stream) == {0: "stop"} and text_of(stream) == "a"
        assert stream.ending is not None and stream.ending.usage.completion_tokens == 2
        rig.model.close()

    asyncio.run(story())


def test_a_pause_is_carried_over_to_the_next_worker(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool, num_workers=2) as rig:
            stream = await rig.open(Ask(raw="hello", max_tokens=9, n=2))
            holder, other = sorted(rig.workers, key=lambda worker: not worker.submitted)
            for _ in range(4):
                holder.turn()
            rig.service.pause(stream)
            said = len(stream.records)
            holder.die()
            assert other.paused == other.keys and len(other.keys) == 2
            for _ in range(5):
                other.turn()
            assert len(stream.records) == said
            rig.service.resume(stream)
            rig.run()
            assert finishes(stream) == {0: "length", 1: "length"}

    asyncio.run(story())


def fail(*_: object, **__: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("where", ["append", "usage", "tell", "ending"])
def test_a_life_that_breaks_anywhere_in_a_frame_breaks_alone(
    pool: LimitedPool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        rig = ScriptedRig(pool)
        streams = [await rig.open(Ask(raw="a")) for _ in range(3)]
        life = rig.service._open[streams[1]]
        life.counts = True
        kind, name = {
            "append": (Stream, "append"),
            "usage": (Life, "usage"),
            "tell": (Voice, "tell"),
            "ending": (Life, "tell_end"),
        }[where]
        before = getattr(kind, name)

        def break_one(self: Any, *others: Any, **named: Any) -> Any:
            is_it = self in (streams[1], life, life.voices[0])
            return fail() if is_it else before(self, *others, **named)

        monkeypatch.setattr(kind, name, break_one)
        rig.worker.step(dict.fromkeys(range(3), 65))
        rig.worker.step(dict.fromkeys(range(3), 66), "length")
        assert [failure_code(stream) for stream in streams] == [None, "internal_error", None]
        assert text_of(streams[0]) == text_of(streams[2]) == "AB"
        assert rig.service.num_sequences == 0
        rig.model.close()

    asyncio.run(story())


class Dumb(Choice):
    def push_one(self, token: int) -> str:
        raise ZeroDivisionError


def test_text_lost_in_its_last_frame_is_no_success(pool: LimitedPool) -> None:
    async def story() -> None:
        rig = ScriptedRig(pool)
        stream = await rig.open(Ask(raw="a", n=2))
        rig.service._open[stream].voices[0].choice = Dumb(TOKENIZER.table)
        rig.worker.step({0: 65, 1: 65}, "length")
        assert failure_code(stream) == "internal_error" and finishes(stream) == {}
        rig.model.close()

    asyncio.run(story())


def test_a_score_that_cannot_be_told_breaks_its_own_reply_alone(
    pool: LimitedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        rig = ScriptedRig(pool)
        streams = [await rig.open(Ask(raw="a", logprobs=1)) for _ in range(2)]
        broken, before = rig.service._open[streams[0]].voices[0], Voice.score
        monkeypatch.setattr(Voice, "score", lambda self, *others: fail() if self is broken else before(self, *others))
        scores = Scores(
            np.array([0, 1], np.int64),
            np.array([1, 1], np.int32),
            np.zeros(2, np.float32),
            np.array([[65], [65]], np.int32),
            np.zeros((2, 1), np.float32),
        )
        rig.worker._sink.take("w0", Frame(1, 1, scores=ScoreTable.pack(scores)))
        rig.worker.step({0: 65, 1: 65}, "length")
        assert [failure_code(stream) for stream in streams] == ["internal_error", None]
        rig.model.close()

    asyncio.run(story())
