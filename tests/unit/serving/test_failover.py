"""Workers that die while they speak: every stream goes on as if nothing had been, wherever the death falls."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.core.errors import QueueFull, WorkerKilled
from headrace.core.messages import Frame, WorkerState
from headrace.core.stages import StageClock
from headrace.serving.ask import Ask
from headrace.serving.quarantine import REMEMBERED_S
from headrace.streams.record import Part
from headrace.streams.stream import Stream
from headrace.text.limited import LimitedPool
from tests.unit.serving.network_rig import CALLER, HandWorker, NetworkRig, finishes, ids_of, network_rig
from tests.unit.serving.test_lives import failure_code

pytestmark = pytest.mark.unit

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2, 3]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOL = {"name": "look", "parameters": SCHEMA}
ASKS: dict[str, Ask] = {
    "greedy": Ask(raw="hello", max_tokens=30, temperature=0.0),
    "seeded": Ask(raw="hello", max_tokens=30, temperature=1.0, seed=5),
    "stop strings": Ask(raw="hello there", max_tokens=30, stop=["zq", " lota'T"], seed=3),
    "penalties": Ask(raw="hello", max_tokens=30, frequency_penalty=1.0, presence_penalty=0.5, min_tokens=20),
    "scores": Ask(raw="hello", max_tokens=30, logprobs=2),
    "prompt": Ask(raw="hello", max_tokens=30, prompt_logprobs=1, echo=True),
    "only scores": Ask(raw="hello", max_tokens=1, prompt_logprobs=1, echo=True, score_only=True),
    "schema": Ask(raw="hello", max_tokens=30, json_schema=SCHEMA),
    "regex": Ask(raw="hello", max_tokens=30, regex="(ab|cd|e){8}"),
    "four choices": Ask(raw="hello", max_tokens=12, n=4, logprobs=1),
    "no bound": Ask(raw="h" * 1000),
}

Told = dict[tuple[int, bool], tuple[Any, ...]]


def told(stream: Stream) -> Told:
    """All that each choice said, and its prompt, however it was cut into records."""
    found: dict[tuple[int, bool], list[Part]] = {}
    for record in stream.records:
        for part in record.parts:
            parts = found.setdefault((part.choice, part.is_prompt), [])
            if not part.is_prompt:
                assert part.index == sum(len(before.ids) for before in parts)
            parts.append(part)
    return {
        key: (
            [token for part in parts for token in part.ids],
            "".join(part.text for part in parts),
            [score for part in parts for score in part.scores],
            [(call.index, call.name) for part in parts for call in part.calls if call.name],
            "".join(call.arguments for part in parts for call in part.calls),
            [part.finish for part in parts if part.finish is not None],
        )
        for key, parts in found.items()
    }


def holder_of(rig: NetworkRig) -> HandWorker:
    (worker,) = (worker for worker in rig.workers if worker.keys)
    return worker


async def undisturbed(pool: LimitedPool, *asks: Ask) -> tuple[Told, Any, int]:
    """What is said, what it costs, and how many frames it takes."""
    with network_rig(pool) as rig:
        stream = await rig.say(*asks)
        assert stream.ending is not None and stream.ending.failure is None
        return told(stream), stream.ending.usage, len(rig.workers[0].frames)


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
                assert told(stream) == truth, f"{kind}, after frame {frame}"
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
            assert deaths >= 4 and told(stream) == truth
            assert stream.ending is not None and stream.ending.usage == usage
            rig.finish(stream)
            (explained,) = rig.explained
            assert explained.attempts == deaths + 1 and explained.replayed_tokens > 2 * deaths
            assert explained.wall_s == pytest.approx(rig.clock.now_s())
            rig.assert_nothing_left()

    asyncio.run(story())


def test_tool_calls_go_on_in_mid_argument(pool: LimitedPool) -> None:
    async def story() -> None:
        ask = Ask(
            messages=[{"role": "user", "content": "look"}],
            tools=[{"type": "function", "function": TOOL}],
            tool_choice="required",
            max_tokens=120,
        )
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
                assert told(stream) == truth

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
            assert finishes(stream) == {0: finish} and told(stream) == truth
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
            assert told(stream) == truth
            rig.finish(stream)
            rig.assert_nothing_left()

    asyncio.run(story())


class Deaf:
    def take(self, replica: str, frame: Frame) -> None: ...

    def lost(self, replica: str, keys: Sequence[int]) -> None: ...


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
            assert told(stream) == truth
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


class Poison:
    """Whatever worker runs a step with this prompt dies of it."""

    def __init__(self, rig: NetworkRig, prompt: str) -> None:
        self.rig = rig
        self.prompt = prompt
        self.deaths = 0
        for worker in rig.workers:
            self._taint(worker)

    def _taint(self, worker: HandWorker) -> None:
        turn = worker.turn

        def run() -> None:
            worker.answer()
            if any(len(worker._request_of[key].prompt_ids) == len(self.prompt) for key in worker._number_of):
                self.deaths += 1
                worker.die()
            else:
                turn()

        worker.turn = run  # type: ignore[method-assign]


def test_who_kills_two_workers_ends_alone_and_is_known_for_a_while(pool: LimitedPool) -> None:
    async def story() -> None:
        asks = [Ask(raw="x" * size, max_tokens=40) for size in range(2, 7)]
        truths = [(await undisturbed(pool, ask))[0] for ask in asks]
        with network_rig(pool, num_workers=2) as rig:
            old = [await rig.open(ask) for ask in asks[:3]]
            for _ in range(5):
                for worker in rig.workers:
                    worker.turn()
            poison = Poison(rig, "y" * 50)
            killer = await rig.open(Ask(raw=poison.prompt))
            fresh = [await rig.open(ask) for ask in asks[3:]]
            for _ in range(200):
                for worker in rig.workers:
                    worker.turn() if worker.is_ready else rig.change(worker)
                rig.wait(0.01)
            assert poison.deaths == 2 and failure_code(killer) == "worker_killed"
            assert killer.ending is not None and killer.ending.failure is not None
            assert killer.ending.failure.status == 500
            assert [told(stream) for stream in [*old, *fresh]] == truths
            for stream in (killer, *old, *fresh):
                rig.finish(stream)
            rig.assert_nothing_left()
            with pytest.raises(WorkerKilled, match="refused for 10 minutes"):
                await rig.open(Ask(raw=poison.prompt))
            other = await rig.open(Ask(raw=poison.prompt), caller=replace(CALLER, tenant="globex"))
            rig.service.cancel(other, "disconnected")
            rig.finish(other)
            rig.clock.time_s += REMEMBERED_S
            assert not (await rig.open(Ask(raw=poison.prompt))).is_ended

    asyncio.run(story())


def test_suspects_are_tried_one_at_a_time_and_the_rest_moves_at_once(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            (worker,) = rig.workers
            old = [await rig.open(Ask(raw="x" * 9, max_tokens=40)) for _ in range(2)]
            for _ in range(5):
                worker.turn()
            fresh = [await rig.open(Ask(raw="y", max_tokens=40)) for _ in range(3)]
            worker.die()
            rig.change(worker)
            assert len(worker.keys) == 3
            for num_there in (3, 3, 3, 4, 4, 4, 5):
                assert len(worker.keys) == num_there
                worker.turn()
            rig.run()
            assert all(finishes(stream) == {0: "length"} for stream in [*old, *fresh])
            for stream in [*old, *fresh]:
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
            assert [told(stream) for stream in streams] == truths
            for stream in streams:
                rig.finish(stream)
            assert [explained.attempts for explained in rig.explained] == [2] * 4
            rig.assert_nothing_left()

    asyncio.run(story())
