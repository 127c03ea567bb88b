"""The whole command against a server of our own: facts, pairs, truth, exit codes, JSON, picture."""

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import uvloop

from headrace.cli import main as cli
from headrace.cli.load.http import Endpoint
from headrace.cli.load.measure import LoadReport, Settings
from headrace.cli.load.process import server_pids, usage_of
from tests.unit.cli.load.stub import Ask, Script, answer, plan, serving

pytestmark = pytest.mark.unit


@contextmanager
def in_thread(script: Script = answer) -> Iterator[str]:
    """A server in a thread of its own, because the command has a loop of its own."""
    ready, url = threading.Event(), ""
    stop: asyncio.Event
    loop: asyncio.AbstractEventLoop

    async def run() -> None:
        nonlocal stop, loop, url
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        async with serving(script) as server:
            url = f"http://{server.endpoint.authority}"
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=uvloop.run, args=(run(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def bench(*flags: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "serve", *flags])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_one_document_with_every_figure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "load.png"
    load = ("--users", "4", "--requests", "40", "--warmup", "0", "--prompt", "8", "--output", "6", "--compare")
    with in_thread() as url:
        code = bench("--url", url, *load, "--pairs", "1", "--slo", "ttft=5", "--picture", str(picture), "--json")
    assert code == 0
    report = msgspec.json.decode(capsys.readouterr().out, type=LoadReport)
    assert [run.streamed for run in report.runs] == [True, False]
    assert all(run.overall.requests == 40 and run.overall.good_share == 1.0 for run in report.runs)
    assert report.model == "default" and report.runs[0].overall.itl_s is not None
    # We are the server ourselves.
    assert os.getpid() in {process.pid for process in report.runs[0].processes}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tables_for_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    tenants = ("--tenant", "name=quiet,key=a,rate=200", "--tenant", "name=flood,key=b,together=20")
    with in_thread() as url:
        assert bench("--url", url, *tenants, "--requests", "10", "--warmup", "0", "--output", "5") == 0
    shown = capsys.readouterr().out
    # Our own command line is longer than the terminal is wide; no number is cut for it.
    assert "…" not in shown and "descriptors" in shown
    assert "requests/s offered, " in shown
    assert "TTFT quiet" in shown and "TTFT flood" in shown and "ITL all" in shown
    assert "met     every request came to exactly one end" in shown


def test_a_wrong_token_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    async def lie(ask: Ask) -> None:
        if "prompt" in ask.body and "max_tokens" in ask.body:
            ask.body["seed"] += ask.body["seed"] % 2
        await answer(ask)

    flags = ("--together", "10", "--output", "5", "--check-truth")
    with in_thread(answer) as url:
        assert bench("--url", url, *flags) == 0
    assert "every token is the truth: 50 in 10 replies" in capsys.readouterr().out
    with in_thread(lie) as url:
        assert bench("--url", url, *flags) == 1
    assert "replies are not the truth" in capsys.readouterr().out


def test_a_broken_promise_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    async def stop_short(ask: Ask) -> None:
        if not ask.body.get("stream"):
            await answer(ask)
            return
        ask.begin_stream()
        ask.piece("a")
        ask.chunk(b"")

    with in_thread(stop_short) as url:
        assert bench("--url", url, "--together", "3", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["runs"][0]["without_end"] == 3
    assert "without [DONE]" in report["runs"][0]["examples"][0]


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--url", "http://127.0.0.1:1", "--wait-s", "0") == 1
    assert capsys.readouterr().err.startswith("error: 127.0.0.1:1: no connection")


def test_nobody_there_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--url", "http://127.0.0.1:1", "--wait-s", "0.3") == 1
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "waiting for 127.0.0.1:1, up to 0.3 s" and told[1].startswith("error: 127.0.0.1:1: no connection")
    assert len(told) == 2


def test_a_server_that_starts_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    async def start_slowly(ask: Ask) -> None:
        asked.append(ask.path)
        if ask.path == "/ready" and len(asked) < 3:
            ask.whole({"status": "starting"}, 503)
        else:
            await answer(ask)

    with in_thread(start_slowly) as url:
        assert bench("--url", url, "--together", "1", "--output", "5") == 0
    assert asked[:4] == ["/ready", "/ready", "/ready", "/v1/models"]
    assert capsys.readouterr().err.count("waiting for") == 1


@pytest.mark.parametrize(
    "flags",
    [
        ("--rate", "5", "--users", "5"),
        ("--api", "images"),
        ("--disconnect", "0.7", "--timeout", "0.7"),
        ("--slo", "speed=1"),
        ("--extra", "[]"),
        ("--tenant", "name=a", "--tenant", "name=a"),
        ("--prompt", "lognormal:1"),
        ("--key", "env:HEADRACE_NO_SUCH_VARIABLE"),
        ("--rate", "nan"),
    ],
)
def test_flags_that_mean_nothing_are_the_callers_fault(flags: tuple[str, ...]) -> None:
    assert bench("--url", "http://127.0.0.1:1", *flags) == 2


def test_pairs_alternate() -> None:
    settings = Settings(Endpoint("http", "h", 1), plan(users=1), pairs=3)
    assert settings.order == [True, False, False, True, True, False]


def test_a_process_is_found_by_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert os.getpid() in server_pids(listener.getsockname()[1])
        usage = usage_of(os.getpid())
        assert usage is not None and usage.cpu_s > 0 and usage.rss_bytes > 1 << 20 and usage.descriptors > 3
    assert usage_of(2**22 + 1) is None
