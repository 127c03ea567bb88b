"""Loads against a live server of our own: what was sent, what came, and how each request ended."""

import asyncio

import pytest
import uvloop
from msgspec import structs

from headrace.cli.load.figures import is_without_end, summarise
from headrace.cli.load.http import Endpoint, Pool
from headrace.cli.load.outcome import State
from headrace.cli.load.plan import Churn, LoadPlan
from headrace.sim.arrivals import Evenly, Poisson, Together
from tests.unit.cli.load.stub import Ask, Script, answer, drive, plan, serving

pytestmark = pytest.mark.unit


async def states_of(script: Script, *, streamed: bool = True, patience_s: float = 20.0) -> tuple[list[str], list[str]]:
    """How two requests end under a server that does `script`, and what it did that it must not."""
    async with serving(script) as server:
        record, _ = await drive(server, plan(Together(2)), streamed=streamed, patience_s=patience_s)
    return [str(one.state) for one in record.outcomes], [one.violation or one.message for one in record.outcomes]


@pytest.mark.parametrize("streamed", [True, False])
def test_every_request_of_an_open_load_is_sent_once_and_finishes(streamed: bool) -> None:
    async def load() -> None:
        async with serving() as server:
            record, _ = await drive(server, plan(Poisson(2000.0), requests=60), streamed=streamed)
            assert len(server.asks) == len(record.outcomes) == 60
            assert len({ask.body["seed"] for ask in server.asks}) == 60
        assert {one.state for one in record.outcomes} == {State.FINISHED}
        assert not any(map(is_without_end, record.outcomes))
        figures = summarise(record.outcomes, 1.0, None)
        assert figures.output_tokens_per_s == 240.0
        assert (figures.ttft_s is not None) == streamed
        assert all(len(one.pieces_s) == (4 if streamed else 0) for one in record.outcomes)

    uvloop.run(load())


def test_a_closed_load_keeps_its_users_at_work_and_its_connections_open() -> None:
    async def load() -> None:
        together = asyncio.Barrier(3)

        async def script(ask: Ask) -> None:
            """Nobody is answered before three have asked."""
            await together.wait()
            await answer(ask)

        async with serving(script) as server:
            record, _ = await drive(server, plan(users=3, requests=51))
        assert [one.state for one in record.outcomes] == [State.FINISHED] * 51
        assert record.dialled == 3

    uvloop.run(load())


def test_progress_is_a_line_on_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # What a file is taken for as wide; no line is broken for it.
    monkeypatch.setenv("COLUMNS", "40")
    from headrace.cli.load.drive import Driver
    from headrace.cli.load.progress import LiveProgress
    from headrace.cli.load.wording import Asked, Wording

    async def load() -> None:
        async with serving() as server:
            pool = Pool(asyncio.get_running_loop(), server.endpoint)
            await pool.start()
            load = plan(Together(3))
            driver = Driver(pool, load, Wording(server.endpoint, load, Asked("m")), streamed=True)
            await driver.run()
        with LiveProgress() as progress:
            # Twice at once: the second is too soon to be told.
            progress.show("streamed", driver)
            progress.show("streamed", driver)

    uvloop.run(load())
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    words = " ".join(printed.err.split())
    assert words.startswith("streamed: 0.") and words.count("3 sent") == 1
    assert "0 in flight · 3 over · 0 bad" in words and "TTFT" in words


async def show(load: LoadPlan, script: Script = answer, *, streamed: bool = True) -> None:
    """Progress, when a load has just begun and when it is over."""
    from headrace.cli.load.drive import Driver
    from headrace.cli.load.progress import LiveProgress
    from headrace.cli.load.wording import Asked, Wording

    async with serving(script) as server:
        pool = Pool(asyncio.get_running_loop(), server.endpoint)
        await pool.start()
        wording = Wording(server.endpoint, load, Asked("m", streamed=streamed))
        driver = Driver(pool, load, wording, streamed=streamed)
        begun, over = LiveProgress(), LiveProgress()
        running = asyncio.create_task(driver.run())
        await asyncio.sleep(0)
        begun.show("load", driver)
        await running
        over.show("load", driver)


def test_progress_says_what_is_not_counted_and_how_long_whole_replies_take(capsys: pytest.CaptureFixture[str]) -> None:
    uvloop.run(show(plan(Evenly(1000.0), requests=20, warmup_s=0.5), streamed=False))
    begun, over = capsys.readouterr().err.splitlines()
    assert begun.startswith("load, not counted yet: ") and "no token yet" in begun
    assert over.startswith("load: ") and "whole replies after" in over


def test_progress_takes_no_refusal_for_a_reply(capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse(ask: Ask) -> None:
        ask.whole({"error": {"message": "full", "type": "overloaded", "code": "queue_full"}}, 503)

    uvloop.run(show(plan(users=2, requests=6), refuse))
    _, over = capsys.readouterr().err.splitlines()
    assert "6 over" in over and "no token yet" in over


def test_a_warm_up_is_sent_and_not_counted() -> None:
    async def load() -> None:
        async with serving() as server:
            record, _ = await drive(server, plan(Evenly(1000.0), requests=20, warmup_s=0.02))
        counted = [one.counted for one in record.outcomes]
        assert counted == [False] * 20 + [True] * 20
        assert record.began.at_s - record.started_s >= 0.019

    uvloop.run(load())


def test_an_open_load_sees_a_stall_that_a_closed_one_hides() -> None:
    stall_s = 0.4

    async def run(open_loop: bool) -> list[float]:
        release: asyncio.Future[None] | None = None
        seen = 0

        async def script(ask: Ask) -> None:
            """At the tenth request everything stops for a while."""
            nonlocal release, seen
            seen += 1
            if seen == 10:
                release = asyncio.get_running_loop().create_future()
                asyncio.get_running_loop().call_later(stall_s, release.set_result, None)
            if release is not None:
                await release
            await answer(ask)

        async with serving(script) as server:
            load = plan(Evenly(100.0), requests=50) if open_loop else plan(users=1, requests=50)
            record, _ = await drive(server, load)
        return sorted(one.ttft_s or 0.0 for one in record.outcomes)

    opened, closed = uvloop.run(run(True)), uvloop.run(run(False))
    # 40 requests were meant to be sent during the stall; a user who waits sends one.
    assert opened[-1] > 0.95 * stall_s and closed[-1] > 0.95 * stall_s
    assert sum(ttft_s > 0.5 * stall_s for ttft_s in opened) >= 15
    assert sum(ttft_s > 0.5 * stall_s for ttft_s in closed) <= 5


def test_time_spent_waiting_for_a_connection_counts() -> None:
    """With one connection the second request is sent when the first is answered, and was meant to be sent before."""

    async def script(ask: Ask) -> None:
        await asyncio.sleep(0.1)
        await answer(ask)

    async def load() -> None:
        from headrace.cli.load.drive import Driver
        from headrace.cli.load.wording import Asked, Wording

        async with serving(script) as server:
            pool = Pool(asyncio.get_running_loop(), server.endpoint, most=1)
            await pool.start()
            load = plan(Together(2))
            wording = Wording(server.endpoint, load, Asked("m"))
            record = await Driver(pool, load, wording, streamed=True).run()
        first, second = sorted(one.ttft_s or 0.0 for one in record.outcomes)
        assert first >= 0.1 and second >= first + 0.1
        assert record.dialled == 1

    uvloop.run(load())


def test_clients_leave_and_give_up_as_planned() -> None:
    async def slow(ask: Ask) -> None:
        ask.begin_stream()
        for _ in range(3):
            ask.piece()
            await ask.writer.drain()
        await asyncio.sleep(30)

    async def load() -> None:
        async with serving(slow) as server:
            churning = structs.replace(
                plan(Together(40), output=4), churn=Churn(disconnect=0.5, timeout=0.5, timeout_s=0.05)
            )
            record, _ = await drive(server, churning, patience_s=3.0)
        left = [one for one in record.outcomes if one.state is State.LEFT]
        assert left and all(one.shot.leave_after_pieces in (None, 1, 2, 3) for one in left)
        assert all(len(one.pieces_s) == one.shot.leave_after_pieces for one in left if one.shot.leave_after_pieces)
        given_up = [one for one in record.outcomes if one.shot.timeout_s is not None]
        assert given_up and {one.state for one in given_up} == {State.TIMED_OUT}
        # Who wanted to leave after a fourth piece waits in vain.
        hung = [one for one in record.outcomes if one.state is State.HUNG]
        assert len(left) + len(given_up) + len(hung) == 40
        assert all(one.shot.leave_after_pieces == 4 for one in hung)

    uvloop.run(load())


def test_a_refusal_has_its_status_and_code() -> None:
    async def refuse(ask: Ask) -> None:
        ask.whole({"error": {"message": "full", "type": "overloaded", "code": "queue_full"}}, 503)

    async def load() -> None:
        async with serving(refuse) as server:
            record, _ = await drive(server, plan(users=2, requests=6))
        figures = summarise(record.outcomes, 1.0, None)
        assert figures.errors == {"503 queue_full": 6} and figures.states == {"refused": 6}
        assert not any(map(is_without_end, record.outcomes))
        assert record.dialled == 2

    uvloop.run(load())


def test_a_stream_that_breaks_off_with_an_error_has_one_end() -> None:
    async def fail(ask: Ask) -> None:
        ask.begin_stream()
        ask.piece()
        ask.event({"error": {"message": "gone", "code": "runner_failed"}})
        ask.event(b"[DONE]")
        ask.chunk(b"")

    assert uvloop.run(states_of(fail)) == (["failed"] * 2, ["gone"] * 2)


async def _no_done(ask: Ask) -> None:
    ask.begin_stream()
    ask.piece("a", "length")
    ask.chunk(b"")


async def _no_finish(ask: Ask) -> None:
    ask.begin_stream()
    ask.piece("a")
    ask.end_stream(1)


async def _two_ends(ask: Ask) -> None:
    ask.begin_stream()
    ask.piece("a", "length")
    ask.piece("b", "stop")
    ask.end_stream(2)


async def _error_after_the_end(ask: Ask) -> None:
    ask.begin_stream()
    ask.piece("a", "length")
    ask.event({"error": {"message": "late"}})
    ask.end_stream(1)


async def _after_done(ask: Ask) -> None:
    ask.begin_stream()
    ask.piece("a", "length")
    ask.event(b"[DONE]")
    ask.piece("b")
    ask.chunk(b"")


async def _garbage(ask: Ask) -> None:
    ask.begin_stream()
    ask.event(b"{nonsense")
    ask.piece("a", "length")
    ask.end_stream(1)


async def _cut(ask: Ask) -> None:
    ask.begin_stream()
    ask.piece("a")
    await ask.writer.drain()
    raise ConnectionError


async def _no_http(ask: Ask) -> None:
    ask.writer.write(b"SSH-2.0-x\r\n\r\n")


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (_no_done, r"without \[DONE\]"),
        (_no_finish, "0 of 1 choices"),
        (_two_ends, "went on after its finish_reason"),
        (_error_after_the_end, "an error frame besides"),
        (_after_done, r"after \[DONE\]"),
        (_garbage, "no reply"),
        (_cut, "closed within a reply"),
        (_no_http, "malformed"),
    ],
)
def test_a_reply_in_bad_order_is_found(script: Script, says: str) -> None:
    import re

    states, words = uvloop.run(states_of(script))
    assert all(re.search(says, word) for word in words), words
    assert set(states) <= {"broken", "failed"}


def test_a_whole_reply_without_finish_is_found() -> None:
    async def script(ask: Ask) -> None:
        ask.whole({"choices": [{"index": 0, "message": {"content": "a"}}]})

    states, words = uvloop.run(states_of(script, streamed=False))
    assert states == ["broken"] * 2 and "0 of 1 choices" in words[0]


def test_a_reply_that_ends_with_its_connection_is_whole() -> None:
    async def script(ask: Ask) -> None:
        ask.writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        ask.writer.write(b'{"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}')
        await ask.writer.drain()
        ask.writer.close()

    assert uvloop.run(states_of(script, streamed=False))[0] == ["finished"] * 2


def test_nobody_listens() -> None:
    async def load() -> None:
        pool = Pool(asyncio.get_running_loop(), Endpoint("http", "127.0.0.1", 1))
        await pool.start()
        from headrace.cli.load.drive import Driver
        from headrace.cli.load.wording import Asked, Wording

        load = plan(users=2, requests=4)
        record = await Driver(pool, load, Wording(Endpoint("http", "h", 1), load, Asked("m")), streamed=True).run()
        assert [one.state for one in record.outcomes] == [State.BROKEN] * 4
        assert "no connection" in record.outcomes[0].message

    uvloop.run(load())
