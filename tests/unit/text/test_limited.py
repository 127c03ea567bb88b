"""Limited processes: jobs cost at most their own process, and no process outlives its parent."""

import asyncio
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from headrace.core.errors import ContextLengthExceeded, InvalidInput, QueueFull, Refused, TimedOut
from headrace.text.limited import LimitedPool
from headrace.text.limited_process import Limits
from headrace.text.rendering import RenderJob, TemplateSource

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
PARENT = f"""
import sys
from headrace.text.limited import LimitedPool
from headrace.text.rendering import RenderJob, TemplateSource
pool = LimitedPool()
def job(text):
    return pool._submit("render", RenderJob(TemplateSource(text), []), list, "it", None, 60.0)
for future in [job("x"), job("x")]:
    future.result()
job({LOOP!r})
print(*pool.pids, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[LimitedPool]:
    with LimitedPool(Limits(job_s=30.0, max_job_bytes=1 << 20, max_answer_bytes=1 << 20)) as pool:
        yield pool


def payload(template: str, max_chars: int = 1000) -> RenderJob:
    return RenderJob(TemplateSource(template), [], max_chars=max_chars)


def render(pool: LimitedPool, template: str, max_chars: int = 1000) -> list[str]:
    return pool.call_sync("render", payload(template, max_chars), list[str], subject="the text", param="messages")


async def render_soon(pool: LimitedPool, template: str) -> list[str]:
    return await pool.call("render", payload(template), list[str], subject="the text")


def wait_for_end(pid: int) -> bool:
    """Whether the process ends within seconds. It need not be a child of this one."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], 60.0)[0])
    finally:
        os.close(watched)


def test_a_job_is_answered(pool: LimitedPool) -> None:
    assert render(pool, "{{ 6 * 7 }}") == ["42"]


def test_a_job_that_never_ends_is_stopped(pool: LimitedPool) -> None:
    with pytest.raises((InvalidInput, TimedOut), match=r"0\.3 s"):
        pool.call_sync("render", payload(LOOP), list[str], subject="the text", limit_s=0.3)
    assert render(pool, "next") == ["next"]


@pytest.mark.parametrize(
    "bomb",
    [
        "{% set ns = namespace(a='a' * 1000) %}{% for i in range(30) %}{% set ns.a = ns.a * 2 %}{% endfor %}",
        "{% set x = range(99999) | list %}{% set y = x * 9999 %}",
        "{{ 'a' * 10 ** 9 }}",
    ],
)
def test_a_job_that_grows_is_refused(pool: LimitedPool, bomb: str) -> None:
    with pytest.raises(InvalidInput, match="memory"):
        render(pool, bomb)
    assert render(pool, "still here") == ["still here"]


def test_an_answer_that_is_too_long_is_refused(pool: LimitedPool) -> None:
    with pytest.raises(InvalidInput, match="too long") as caught:
        render(pool, "{{ 'a' * 2000000 }}", max_chars=4_000_000)
    assert caught.value.param == "messages"


def test_a_text_that_grows_beyond_any_context_is_told_as_that_however_it_is_waited_for(pool: LimitedPool) -> None:
    long = payload("{{ 'a' * 1001 }}")

    async def wait() -> None:
        await pool.call("render", long, list[str], subject="the text", param="messages")

    for attempt in (lambda: render(pool, "{{ 'a' * 1001 }}"), lambda: asyncio.run(wait())):
        with pytest.raises(ContextLengthExceeded, match="more than 1000 characters") as caught:
            attempt()
        assert caught.value.param == "messages"


def test_a_job_that_is_too_large_or_no_unicode_is_refused_before_it_is_sent(pool: LimitedPool) -> None:
    with pytest.raises(InvalidInput, match="larger than"):
        render(pool, "a" * (1 << 20))
    with pytest.raises(InvalidInput, match="not Unicode"):
        render(pool, "\ud800")


def test_an_unknown_job_is_our_own_fault_and_costs_one_process(pool: LimitedPool) -> None:
    with pytest.raises(Exception, match="failed with KeyError"):
        pool.call_sync("unheard", None, bool, subject="the job")
    assert render(pool, "on") == ["on"]


def test_a_child_that_is_killed_while_idle_is_replaced() -> None:
    with LimitedPool(Limits(processes=1)) as pool:
        render(pool, "one")
        (first,) = pool.pids
        os.kill(first, signal.SIGKILL)
        assert wait_for_end(first)
        assert render(pool, "two") == ["two"]
        assert pool.pids != (first,)


def test_a_line_that_is_full_refuses_and_a_long_wait_ends() -> None:
    async def story(pool: LimitedPool) -> list[object]:
        jobs = [render_soon(pool, text) for text in (LOOP, "waits", "is too many")]
        return await asyncio.gather(*jobs, return_exceptions=True)

    with LimitedPool(Limits(processes=1, max_waiting=1, max_wait_s=0.2, job_s=0.4)) as pool:
        _, waited, refused = asyncio.run(story(pool))
    assert isinstance(waited, TimedOut)
    assert isinstance(refused, QueueFull) and refused.retry_after_s > 0


def test_others_are_answered_while_a_job_loops_and_closing_ends_it_without_a_trace() -> None:
    async def story() -> tuple[object, tuple[int, ...]]:
        pool = LimitedPool(Limits(job_s=60.0))
        looping = asyncio.ensure_future(render_soon(pool, LOOP))
        assert [await render_soon(pool, "ok") for _ in range(5)] == [["ok"]] * 5
        assert not looping.done()
        pids = pool.pids
        await asyncio.to_thread(pool.close)
        return (await asyncio.gather(looping, return_exceptions=True))[0], pids

    error, pids = asyncio.run(story())
    assert isinstance(error, Refused)
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_closed_pool_refuses() -> None:
    pool = LimitedPool()
    pool.close()
    with pytest.raises(Refused):
        render(pool, "x")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's tie to the parent is Linux's")
def test_children_die_with_a_parent_that_is_killed_even_while_they_compute() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
        parent.wait()
    assert len(pids) == 2
    assert all(wait_for_end(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_knows_no_secret_and_has_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_LOCAL_KEY", "a-secret")
    with LimitedPool(Limits(processes=1, memory_bytes=300 << 20, niceness=7)) as pool:
        render(pool, "x")
        (pid,) = pool.pids
        with open(f"/proc/{pid}/environ", "rb") as environment:
            assert b"a-secret" not in environment.read()
        with open(f"/proc/{pid}/cmdline", "rb") as title:
            assert title.read().rstrip(b"\0") == b"headrace: limited"
        assert resource.prlimit(pid, resource.RLIMIT_AS) == (300 << 20, 300 << 20)
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + 7
