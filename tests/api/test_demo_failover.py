"""`headrace demo failover` as a new user runs it: it kills its own processes, says what came of it, and leaves none."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.api.live_server import descendants, eventually, is_alive

PATIENCE_S = 300.0
COMMAND = [sys.executable, "-m", "headrace.cli.main", "demo", "failover", "--tokens", "150"]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "HEADRACE_HOME": str(home)}  # noqa: TID251


def test_all_three_replies_are_identical_and_nothing_is_left(home: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--json"], stdout=subprocess.PIPE, text=True, env=environment(home), timeout=PATIENCE_S, check=True
    )
    report = json.loads(done.stdout)
    assert report["identical"] and report["difference"] is None
    worker, gateway, undisturbed = report["worker"], report["gateway"], report["undisturbed"]
    assert worker["text"] == gateway["text"] == undisturbed["text"] and len(undisturbed["text"].split()) > 30
    # A worker's death is nothing that a connection notices; a gateway's ends it.
    assert (worker["connections"], undisturbed["connections"]) == (1, 1) and gateway["connections"] >= 2
    assert worker["blow"]["victim"].startswith("worker fake ") and gateway["blow"]["victim"] == "gateway"
    for blow in (worker["blow"], gateway["blow"]):
        assert 0 < blow["after_letters"] < len(undisturbed["text"]) and blow["gap_ms"] > 0
        assert not is_alive(blow["pid"])
    assert not list((home / "run").iterdir())


def heed_interrupts() -> None:
    """A job in the background of a shell ignores them, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_it_can_be_interrupted_and_even_killed(home: Path) -> None:
    for blow, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, env=environment(home), preexec_fn=heed_interrupts)
        with process:
            assert process.stdout is not None
            line = b"\n"
            while b"killed" not in line:
                line = process.stdout.readline()
                assert line, "it ended before anything was killed"
            started = descendants(process.pid)
            assert len(started) >= 4
            process.send_signal(blow)
            process.stdout.read()
            assert process.wait(PATIENCE_S) == code
        eventually(lambda: not any(is_alive(pid) for pid in started), "processes are left behind")  # noqa: B023


def test_a_model_that_is_not_there_is_told_in_one_line(home: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--model", "nowhere", "--json"],
        capture_output=True,
        text=True,
        env=environment(home),
        timeout=PATIENCE_S,
    )
    assert done.returncode in (1, 2) and "nowhere" in json.loads(done.stdout)["error"]["message"]
    assert "Traceback" not in done.stderr


def test_who_stops_reading_ends_it(home: Path) -> None:
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(home))
    with process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
        assert process.wait(PATIENCE_S) == 1
