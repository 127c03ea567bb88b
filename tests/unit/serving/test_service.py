"""Orders over workers: text as the runner's truth has it, refusals before anything is said, exactly one ending."""

import asyncio
import threading
from collections.abc import Awaitable

import pytest
from msgspec.structs import replace

from headrace.core.caller import Caller
from headrace.core.errors import (
    ContextLengthExceeded,
    HeadraceError,
    InvalidInput,
    ModelNotFound,
    NotFound,
    QueueFull,
    TimedOut,
    Unreachable,
)
from headrace.core.hashing import chain_blocks
from headrace.core.messages import SubmitPart, WorkerState
from headrace.core.request import Tier
from headrace.core.stages import Stage, StageClock
from headrace.serving import service
from headrace.serving.ask import Ask
from headrace.serving.order import Order
from headrace.streams.record import Usage
from headrace.streams.stream import Stream
from headrace.text.limited import LimitedPool
from tests.unit.serving.network_rig import (
    CALLER,
    CONFIG,
    TOKENIZER,
    NetworkRig,
    PlainDialect,
    finishes,
    ids_of,
    network_rig,
    text_of,
)

pytestmark = pytest.mark.unit


def test_a_stream_is_the_runners_truth_one_record_a_frame(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            stream = await rig.say(Ask(raw="hello", max_tokens=30, seed=5))
            truth = rig.workers[0].runner.truth(TOKENIZER.encode_text("hello"), 30, seed=5)
            assert ids_of(stream) == truth
            assert text_of(stream) == TOKENIZER.decode(truth)
            assert finishes(stream) == {0: "length"}
            assert [record.number for record in stream.records] == list(range(1, len(stream.records) + 1))
            steps = [record.step for record in stream.records[:-1]]
            assert len(set(steps)) == len(steps), "a frame gave a stream two records"
            ending = stream.records[-1].ending
            assert ending is not None and ending.failure is None
            assert ending.usage == Usage(5, 0, 30)
            rig.assert_nothing_left()

    asyncio.run(story())


def test_parts_say_how_much_came_before_them(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            stream = await rig.open(Ask(raw="hello", max_tokens=30), counts=True)
            rig.run()
            tokens = characters = 0
            for record in stream.records[:-1]:
                (part,) = record.parts
                assert (part.index, part.offset) == (tokens, characters)
                tokens += len(part.ids)
                characters += len(part.text)
                assert record.usage is not None and record.usage.completion_tokens == tokens

    asyncio.run(story())


def test_choices_and_prompts_are_numbered_through_and_a_prompt_counts_once(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool, num_workers=2) as rig:
            asks = [Ask(raw=text, max_tokens=6, n=3, seed=9) for text in ("one", "three")]
            stream = await rig.say(*asks)
            runner = rig.workers[0].runner
            for place, ask in enumerate(asks):
                for choice in range(3):
                    truth = runner.truth(TOKENIZER.encode_text(ask.raw or ""), 6, seed=9, choice=choice)
                    assert ids_of(stream, place * 3 + choice) == truth
            assert finishes(stream) == dict.fromkeys(range(6), "length")
            assert stream.ending is not None
            assert (stream.ending.usage.prompt_tokens, stream.ending.usage.completion_tokens) == (8, 36)
            assert [len(worker.submitted) for worker in rig.workers] == [6, 0], "an order stays together"

    asyncio.run(story())


def test_prefix_hashes_differ_between_tenants_and_agree_within_one(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            first = await rig.say(Ask(raw="the same prompt", max_tokens=2))
            second = await rig.say(Ask(raw="the same prompt", max_tokens=2))
            other = await rig.say(Ask(raw="the same prompt", max_tokens=2), caller=Caller("other"))
            cached = [stream.ending.usage.cached_tokens for stream in (first, second, other) if stream.ending]
            assert cached == [0, 12, 0]

    asyncio.run(story())


def test_priority_only_lowers_a_tier(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            for priority in (None, Tier.BATCH, Tier.ENTERPRISE):
                await rig.say(Ask(raw="a", max_tokens=1, priority=priority))
            assert [request.tier for request in rig.workers[0].submitted] == [Tier.PLUS, Tier.BATCH, Tier.PLUS]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (Ask(raw="a", temperature=-1.0), InvalidInput),
        (Ask(raw="a", stop=[""]), InvalidInput),
        (Ask(raw="a", min_tokens=9, max_tokens=4), InvalidInput),
        (Ask(raw="a" * 2000), ContextLengthExceeded),
        (Ask(raw="a", max_tokens=5000), ContextLengthExceeded),
        (Ask(raw="a", deadline_s=-1.0), InvalidInput),
        (Ask(raw="a", bad_words=["b"]), InvalidInput),
        (Ask(ids=[600]), InvalidInput),
        (Ask(raw="a", regex="("), InvalidInput),
        (Ask(raw="a", n=100, max_tokens=1, seed=2**70), InvalidInput),
    ],
)
def test_what_is_refused_is_a_typed_error_and_leaves_nothing(
    pool: LimitedPool, ask: Ask, error: type[HeadraceError]
) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            with pytest.raises(error):
                await rig.open(ask)
            rig.assert_nothing_left()
            await rig.say(Ask(raw="a", max_tokens=2))

    asyncio.run(story())


def test_choices_are_refused_together(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool, config=replace(CONFIG, slots=1, max_waiting=6)) as rig:
            first = await rig.open(Ask(raw="a", max_tokens=4, n=5))
            with pytest.raises(QueueFull) as caught:
                await rig.open(Ask(raw="a", max_tokens=4, n=2))
            assert caught.value.retry_after_s > 0.0
            assert rig.service.num_sequences == 5
            rig.run()
            rig.finish(first)
            rig.assert_nothing_left()

    asyncio.run(story())


def test_an_unknown_model_is_named_with_those_there_are(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            order = Order("r", "gpt-9", (Ask(raw="a"),), PlainDialect())
            with pytest.raises(ModelNotFound, match="m, default"):
                await rig.service.open(order, CALLER, StageClock(Stage.RECEIVE, 0.0))
            (card,) = rig.service.models()
            assert (card.name, card.is_ready, card.fingerprint, card.context_len) == ("m", True, "fp", 1024)

    asyncio.run(story())


def test_no_ready_worker_is_said_before_anything_is_kept(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            rig.workers[0].state = WorkerState.DRAINING
            with pytest.raises(Unreachable):
                await rig.open(Ask(raw="a"))
            assert rig.service.num_open == rig.service.num_sequences == 0

    asyncio.run(story())


def test_cancelling_frees_the_worker_and_ends_the_stream_once(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            stream = await rig.open(Ask(raw="hello", max_tokens=500, n=2))
            for _ in range(10):
                rig.workers[0].turn()
            rig.service.cancel(stream, "disconnected")
            rig.service.cancel(stream, "disconnected")
            assert stream.ending is not None and stream.ending.failure is not None
            assert stream.ending.failure.code == "disconnected"
            assert sum(record.ending is not None for record in stream.records) == 1
            rig.finish(stream)
            rig.assert_nothing_left()
            assert rig.explained[0].error == "disconnected"
            assert rig.explained[0].usage.completion_tokens == 20

    asyncio.run(story())


async def cut_off(rig: NetworkRig) -> tuple[Stream, Awaitable[None]]:
    """A stream that was cancelled after ten steps, and what is to be waited for then."""
    stream = await rig.open(Ask(raw="hello", max_tokens=500, n=2))
    for _ in range(10):
        rig.workers[0].turn()
    rig.service.cancel(stream, "disconnected")
    parting = rig.service.parting(stream)
    assert parting is not None
    return stream, parting


def test_a_worker_is_asked_where_the_time_of_what_was_cancelled_went(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            stream, parting = await cut_off(rig)
            waiting = asyncio.ensure_future(parting)
            await asyncio.sleep(0)
            assert not waiting.done()
            rig.workers[0].turn()
            await waiting
            assert rig.service.parting(stream) is None
            rig.finish(stream)
            told = rig.explained[0]
            assert told.stages["prefill"] > 0.0 and told.stages["decode"] > told.stages["transfer"]
            assert sum(told.stages.values()) == pytest.approx(told.wall_s) == pytest.approx(rig.clock.time_s)
            rig.assert_nothing_left()

    asyncio.run(story())


def test_what_was_cut_off_says_what_of_its_prompt_was_cached(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            ask = Ask(raw="the same prompt", max_tokens=50)
            await rig.say(ask)
            stream = await rig.open(ask)
            for _ in range(3):
                rig.workers[0].turn()
            rig.service.cancel(stream, "disconnected")
            assert stream.ending is not None and stream.ending.usage.cached_tokens == 12

    asyncio.run(story())


def test_what_a_worker_says_of_a_request_that_it_ended_is_told(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool, config=replace(CONFIG, slots=1)) as rig:
            await rig.open(Ask(raw="hello", max_tokens=500))
            rig.workers[0].turn()
            stream = await rig.open(Ask(raw="late", queue_timeout_s=0.5))
            rig.workers[0].turn()
            rig.wait(1.0)
            rig.run()
            rig.finish(stream)
            told = rig.explained[0]
            assert told.error == "timed_out" and told.stages["wait:capacity"] > 0.4 > told.stages["transfer"]

    asyncio.run(story())


def test_time_without_a_worker_is_booked_once(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            stream = await rig.open(Ask(raw="hello", max_tokens=500))
            for _ in range(5):
                rig.workers[0].turn()
            rig.workers[0].die()
            rig.wait(30.0)
            rig.service.cancel(stream, "disconnected")
            rig.finish(stream)
            told = rig.explained[0]
            assert told.stages["route"] == pytest.approx(30.0, abs=0.1)
            assert told.wall_s == pytest.approx(rig.clock.time_s)

    asyncio.run(story())


@pytest.mark.parametrize("is_lost", [True, False])
def test_what_no_worker_says_of_a_cancelled_request_is_guessed(
    pool: LimitedPool, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    monkeypatch.setattr(service, "_PARTING_S", 60.0 if is_lost else 0.01)

    async def story() -> None:
        with network_rig(pool) as rig:
            stream, parting = await cut_off(rig)
            assert rig.service.explain("r1", CALLER).error == "disconnected", "it is explained meanwhile"
            if is_lost:
                rig.workers[0].die()
            await asyncio.wait_for(parting, 5.0)
            assert rig.service.parting(stream) is None
            rig.finish(stream)
            told = rig.explained[0]
            assert "prefill" not in told.stages and told.stages["decode"] > 0.0
            assert sum(told.stages.values()) == pytest.approx(told.wall_s) == pytest.approx(rig.clock.time_s)

    asyncio.run(story())


def test_an_opening_that_is_given_up_leaves_nothing(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            order = Order("r", "m", (Ask(raw="a", n=3),), PlainDialect())
            task = asyncio.create_task(rig.service.open(order, CALLER, StageClock(Stage.RECEIVE, 0.0)))
            while not rig.workers[0].keys:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            rig.assert_nothing_left()

    asyncio.run(story())


def test_pausing_holds_every_choice_until_it_is_resumed(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            stream = await rig.open(Ask(raw="hello", max_tokens=40, n=2))
            rig.workers[0].turn()
            rig.service.pause(stream)
            said = len(stream.records)
            for _ in range(5):
                rig.workers[0].turn()
            assert len(stream.records) == said and len(rig.workers[0].paused) == 2
            rig.service.resume(stream)
            rig.run()
            assert [len(ids_of(stream, choice)) for choice in range(2)] == [40, 40]

    asyncio.run(story())


def test_a_queue_that_takes_too_long_ends_with_a_typed_failure(pool: LimitedPool) -> None:
    from msgspec.structs import replace

    async def story() -> None:
        with network_rig(pool, config=replace(CONFIG, slots=1)) as rig:
            first = await rig.open(Ask(raw="hello", max_tokens=200))
            rig.workers[0].turn()
            second = await rig.open(Ask(raw="hello", max_tokens=5, queue_timeout_s=0.5))
            late = await rig.open(Ask(raw="hello", max_tokens=5, deadline_s=1.0, priority=Tier.BATCH))
            rig.run()
            failures = [stream.ending.failure for stream in (first, second, late) if stream.ending is not None]
            codes = [(failure.code, failure.status) if failure else None for failure in failures]
            assert codes == [None, ("timed_out", 504), ("deadline_exceeded", 504)]
            assert second.records[0].ending is not None, "nothing was said before the failure"

    asyncio.run(story())


def test_a_deadline_runs_from_the_first_byte(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            for spent_s, error in ((0.5, None), (3.0, TimedOut)):
                stages = StageClock(Stage.RECEIVE, rig.clock.now_s())
                rig.clock.time_s += spent_s
                order = Order("r", "m", (Ask(raw="a", max_tokens=1, deadline_s=2.0),), PlainDialect())
                task = asyncio.create_task(rig.service.open(order, CALLER, stages))
                while not task.done():
                    await asyncio.sleep(0)
                    rig.workers[0].answer()
                if error is None:
                    rig.service.finished(await task, stages)
                else:
                    with pytest.raises(error):
                        await task
            (request,) = rig.workers[0].submitted
            assert request.deadline_s == pytest.approx(1.5)
            rig.assert_nothing_left()

    asyncio.run(story())


def test_explanations_are_for_their_tenant_alone(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            await rig.say(Ask(raw="hello", max_tokens=9))
            found = rig.service.explain("r1", CALLER)
            assert found.usage == Usage(5, 0, 9) and found.finish == ("length",)
            assert found.replica == "w0" and found.ttft_s is not None and found.itl_s is not None
            for request_id, caller in (("r1", Caller("other")), ("r9", CALLER)):
                with pytest.raises(NotFound):
                    rig.service.explain(request_id, caller)

    asyncio.run(story())


def test_tokens_and_back(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            ids = await rig.service.tokenize("default", Ask(raw="héllo"))
            assert ids == list("héllo".encode())
            assert await rig.service.detokenize("m", ids) == "héllo"
            chat = await rig.service.tokenize("m", Ask(messages=[{"role": "user", "content": "hi"}]))
            assert TOKENIZER.special_ids["<|im_start|>"] in chat

    asyncio.run(story())


def test_warming_up_asks_each_template_once_what_it_can(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            assert rig.model.template is not None and rig.model.template._traits is None
            await rig.service.warm_up()
            assert rig.model.template._traits is not None

    asyncio.run(story())


def test_an_order_is_one_submission_with_each_prompt_once(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            parts: list[SubmitPart] = []
            submit = rig.workers[0].submit

            def listen(*made: SubmitPart) -> None:
                assert not parts, "a second submission"
                parts.extend(made)
                submit(*made)

            rig.workers[0].submit = listen  # type: ignore[method-assign]
            other = Ask(raw="b", max_tokens=3)
            stream = await rig.say(Ask(raw="a", max_tokens=3, n=3), other, other)
            assert [(len(part.keys), part.request.choice) for part in parts] == [(3, 0), (1, 0), (1, 0)]
            truth = rig.workers[0].runner.truth
            assert [ids_of(stream, choice) for choice in range(3)] == [
                truth(TOKENIZER.encode_text("a"), 3, seed=7, choice=choice) for choice in range(3)
            ]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("asks", "param"),
    [
        ([Ask(ids=[1] * 2000, n=128)] * 5, "n"),
        ([Ask(ids=[1] * 2000)] * 600, "prompt"),
    ],
)
def test_choices_times_prompt_tokens_are_bounded(pool: LimitedPool, asks: list[Ask], param: str) -> None:
    async def story() -> None:
        with network_rig(pool, config=replace(CONFIG, context_len=4096)) as rig:
            with pytest.raises(InvalidInput) as caught:
                await rig.open(*asks)
            assert caught.value.param == param and caught.value.status == 400
            assert not rig.workers[0].submitted
            rig.assert_nothing_left()

    asyncio.run(story())


def test_long_prompts_are_hashed_off_the_loop(pool: LimitedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[int, threading.Thread] = {}

    def chain(root: bytes, ids: tuple[int, ...], block_size: int) -> tuple[bytes, ...]:
        threads[len(ids)] = threading.current_thread()
        return chain_blocks(root, ids, block_size)

    async def story() -> None:
        config = replace(CONFIG, context_len=8192, blocks=4096)
        with network_rig(pool, config=config) as rig:
            monkeypatch.setattr("headrace.serving.placement.chain_blocks", chain)
            for length in (100, 5000):
                await rig.say(Ask(ids=[1] * length, max_tokens=1))
            assert threads[100] is threading.main_thread() and threads[5000] is not threading.main_thread()
            hashed = rig.workers[0].submitted[-1]
            assert hashed.block_hashes == chain_blocks(hashed.prefix_root, hashed.prompt_ids, 4)

    asyncio.run(story())
