"""Limited processes as an event loop uses them: no thread where all goes well, and one where it does not."""

import asyncio
import gc
import os
import re
import select
import signal
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import uvloop

from headrace.core.errors import InvalidInput, Refused, TimedOut
from headrace.text.limited import LimitedPool
from headrace.text.limited_process import LimitedProcess, Limits
from headrace.text.rendering import RenderJob, TemplateSource

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
Story = Callable[[], Awaitable[Any]]


@pytest.fixture(scope="module")
def pool() -> Iterator[LimitedPool]:
    with LimitedPool(Limits(processes=1, job_s=30.0, max_answer_bytes=1 << 20)) as pool:
        yield pool


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop])
def run(request: pytest.FixtureRequest) -> Callable[[Story], Any]:
    """Runs a story in an event loop of its own, of either kind."""

    def run(story: Story) -> Any:
        async def whole() -> Any:
            return await story()

        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(whole())

    return run


async def render(
    pool: LimitedPool, template: str, *, limit_s: float | None = None, most: int = 1000, quick: bool = False
) -> list[str]:
    job = RenderJob(TemplateSource(template), [], max_chars=most)
    return await pool.call(
        "render", job, list[str], subject="the text", param="messages", limit_s=limit_s, is_quick=quick
    )


def in_threads(pool: LimitedPool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is left to threads from now on."""
    seen: list[str] = []
    for name in ("run", "conclude"):
        found = getattr(LimitedProcess, name)

        def spy(self: LimitedProcess, *args: Any, name: str = name, found: Any = found) -> Any:
            seen.append(name)
            return found(self, *args)

        monkeypatch.setattr(LimitedProcess, name, spy)
    return seen


def num_open_fds() -> int:
    return len(os.listdir("/dev/fd"))


def test_a_job_that_was_refused_is_not_kept_for_the_garbage_collector(
    pool: LimitedPool, run: Callable[[Story], Any]
) -> None:
    async def story() -> list[InvalidInput | None]:
        refused: list[weakref.ref[InvalidInput]] = []
        for template in ("{{ raise_exception('no') }}", "x" * 2000):
            try:
                await render(pool, template)
            except InvalidInput as error:
                refused.append(weakref.ref(error))
        # A thread that told of one may not have gone on yet.
        for _ in range(500):
            await asyncio.sleep(0.01)
            if not any(error() for error in refused):
                break
        return [error() for error in refused]

    gc.disable()
    try:
        assert run(story) == [None, None]
    finally:
        gc.enable()


def test_the_loop_hands_over_small_jobs_itself_in_the_order_they_came(
    pool: LimitedPool, run: Callable[[Story], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> list[list[str]]:
        await render(pool, "the first one starts the process")
        seen = in_threads(pool, monkeypatch)
        found = await asyncio.gather(*(render(pool, f"{{{{ {number} * 2 }}}}") for number in range(40)))
        assert seen == []
        return found

    assert run(story) == [[str(2 * number)] for number in range(40)]


def test_quick_jobs_go_together_and_each_has_its_own_answer(
    pool: LimitedPool, run: Callable[[Story], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        await render(pool, "x")
        seen = in_threads(pool, monkeypatch)
        texts = ["{{ 1 + 1 }}", "b", "{{ raise_exception('no') }}", *(f"text {number}" for number in range(30))]
        found = await asyncio.gather(*(render(pool, text, quick=True) for text in texts), return_exceptions=True)
        assert found[:2] == [["2"], ["b"]]
        assert isinstance(found[2], InvalidInput) and (found[2].message, found[2].param) == ("no", "messages")
        assert found[3:] == [[text] for text in texts[3:]]
        assert seen == []

    run(story)


@pytest.mark.parametrize(("bad", "match"), [("{{ 'a' * 10 ** 9 }}", "memory"), (LOOP, r"\b2 s")])
def test_one_that_goes_wrong_among_others_is_the_only_one_to_fail(
    pool: LimitedPool, run: Callable[[Story], Any], bad: str, match: str
) -> None:
    async def story() -> list[Any]:
        await render(pool, "x")
        texts = ["first", "a", bad, "b", "c"]
        # The others' time as well, some of them in a process that is yet to start.
        jobs = [render(pool, text, quick=True, limit_s=2.0) for text in texts]
        return await asyncio.gather(*jobs, return_exceptions=True)

    first, a, failed, b, c = run(story)
    assert (first, a, b, c) == (["first"], ["a"], ["b"], ["c"])
    assert isinstance(failed, InvalidInput | TimedOut)
    assert re.search(match, failed.message)


def test_a_batch_that_everybody_gave_up_leaves_its_process_to_others(
    pool: LimitedPool, run: Callable[[Story], Any]
) -> None:
    async def story() -> list[str]:
        await render(pool, "x")
        jobs = [asyncio.ensure_future(render(pool, text, quick=True, limit_s=0.3)) for text in ("one", LOOP, "two")]
        await jobs[0]
        for job in jobs:
            job.cancel()
        return await render(pool, "others")

    assert run(story) == ["others"]


def test_large_jobs_and_answers_are_left_to_a_thread(
    pool: LimitedPool, run: Callable[[Story], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> list[list[str]]:
        await render(pool, "x")
        seen = in_threads(pool, monkeypatch)
        found = [
            await render(pool, "b" * 200_000, most=1 << 20),
            await render(pool, "{{ 'a' * 200000 }}", most=1 << 20),
        ]
        assert seen == ["run", "conclude", "conclude"]
        assert await render(pool, "and on") == ["and on"]
        assert len(seen) == 3
        return found

    assert run(story) == [["b" * 200_000], ["a" * 200_000]]


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        (LOOP, (InvalidInput, TimedOut), r"0\.3 s"),
        ("{{ 'a' * 10 ** 9 }}", InvalidInput, "memory"),
        ("{{ 'a' * 2000000 }}", InvalidInput, "too long"),
        ("{{ raise_exception('no') }}", InvalidInput, "no"),
    ],
)
def test_what_goes_wrong_is_told_and_costs_nobody_else(
    pool: LimitedPool, run: Callable[[Story], Any], bad: str, error: Any, match: str
) -> None:
    async def story() -> None:
        await render(pool, "x")
        limit_s = 0.3 if bad == LOOP else None
        failing = asyncio.ensure_future(render(pool, bad, limit_s=limit_s, most=4_000_000))
        waiting = asyncio.ensure_future(render(pool, "waits"))
        with pytest.raises(error, match=match) as caught:
            await failing
        assert caught.value.param in ("messages", None)
        assert await waiting == ["waits"]
        assert await render(pool, "next") == ["next"]

    run(story)


def test_a_short_limit_holds_though_a_longer_one_was_there_before(
    pool: LimitedPool, run: Callable[[Story], Any]
) -> None:
    async def story() -> None:
        await render(pool, "x", limit_s=60.0)
        await render(pool, "x", limit_s=60.0)
        with pytest.raises((InvalidInput, TimedOut), match=r"0\.2 s"):
            await render(pool, LOOP, limit_s=0.2)

    run(story)


def test_a_process_that_dies_idle_is_replaced_before_the_next_job(
    pool: LimitedPool, run: Callable[[Story], Any]
) -> None:
    async def story() -> None:
        await render(pool, "x")
        await render(pool, "x")
        (first,) = pool.pids
        watched = os.pidfd_open(first)
        os.kill(first, signal.SIGKILL)
        assert select.select([watched], [], [], 60.0)[0]
        os.close(watched)
        assert await render(pool, "y") == ["y"]
        assert pool.pids != (first,)

    run(story)


def test_who_gives_up_leaves_the_line_or_a_job_that_a_thread_concludes(
    pool: LimitedPool, run: Callable[[Story], Any]
) -> None:
    async def story() -> None:
        await render(pool, "x")
        looping = asyncio.ensure_future(render(pool, LOOP, limit_s=0.3))
        waiting = asyncio.ensure_future(render(pool, "never asked"))
        last = asyncio.ensure_future(render(pool, "last"))
        await asyncio.sleep(0)
        looping.cancel()
        waiting.cancel()
        assert await last == ["last"]
        assert all(
            isinstance(e, asyncio.CancelledError)
            for e in await asyncio.gather(looping, waiting, return_exceptions=True)
        )

    run(story)


def test_a_loop_that_ends_amid_a_job_takes_no_process_with_it(pool: LimitedPool, run: Callable[[Story], Any]) -> None:
    tasks = []

    async def cut_off() -> None:
        await render(pool, "x")
        tasks.append(asyncio.ensure_future(render(pool, LOOP, limit_s=0.3)))
        await asyncio.sleep(0)

    async def story() -> list[str]:
        return await render(pool, "here")

    run(cut_off)
    assert run(story) == ["here"]
    sync = pool.call_sync("render", RenderJob(TemplateSource("and here"), []), list[str], subject="the text")
    assert sync == ["and here"]


def test_threads_and_loops_share_the_processes(pool: LimitedPool, run: Callable[[Story], Any]) -> None:
    def block(text: str) -> list[str]:
        return pool.call_sync("render", RenderJob(TemplateSource(text), []), list[str], subject="the text")

    async def story() -> None:
        for round in range(5):
            mixed = [render(pool, f"loop {round}"), asyncio.to_thread(block, f"thread {round}"), render(pool, "more")]
            assert await asyncio.gather(*mixed) == [[f"loop {round}"], [f"thread {round}"], ["more"]]

    run(story)


def test_what_it_says_to_a_thread_is_no_sign_of_its_end(pool: LimitedPool, run: Callable[[Story], Any]) -> None:
    async def story() -> None:
        await render(pool, "x")
        (pids, listeners) = pool.pids, list(pool._listeners.values())
        for listener in listeners:
            listener._read()  # as when its loop gets to it after a thread took the answer
        assert await render(pool, "y") == ["y"] and pool.pids == pids

    run(story)


def test_closing_in_the_loop_tells_who_waits_and_leaves_no_descriptor(run: Callable[[Story], Any]) -> None:
    before = num_open_fds()

    async def story() -> list[Any]:
        pool = LimitedPool(Limits(processes=1, job_s=60.0))
        await render(pool, "x")
        jobs = [asyncio.ensure_future(render(pool, text)) for text in (LOOP, "waits")]
        await asyncio.sleep(0)
        pool.close()
        return await asyncio.gather(*jobs, return_exceptions=True)

    assert all(isinstance(told, Refused) for told in run(story))
    assert num_open_fds() <= before
