"""`headrace simulate`: flags, files, what is printed and what is refused."""

from pathlib import Path

import msgspec
import pytest

from headrace.cli.main import main
from headrace.sim.report import Summary

pytestmark = pytest.mark.unit

QUICK = ["simulate", "--requests", "12", "--rate", "50", "--prompt", "20", "--output", "uniform:2:9", "--slots", "4"]
STEADY = str(Path(__file__).parents[3] / "examples/scenarios/steady.toml")


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(words)
    return int(left.value.code or 0)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> Summary:
    assert run(*words, "--json") == 0
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    return msgspec.json.decode(output, type=Summary)


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    summary = told(capsys, *QUICK, "--verify", "--workers", "2", "--depth", "2", "--seed", "5")
    assert (summary.requests.finished, summary.verified, summary.workers, summary.seed) == (12, 12, 2, 5)
    assert len(summary.trace_hash) == 64


def test_the_table_has_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*QUICK, "--tenants", "3") == 0
    output = capsys.readouterr().out
    for word in ("12 of 12 finished", "TTFT", "inter-token time", "KV in use", "preemptions", "trace hash", "t2"):
        assert word in output


def test_flags_override_a_scenario_file(capsys: pytest.CaptureFixture[str]) -> None:
    summary = told(capsys, "simulate", STEADY, "--requests", "9", "--slots", "3", "--no-cells")
    assert (summary.scenario, summary.requests.arrived, summary.slots) == ("steady", 9, 3)


@pytest.mark.parametrize("process", ["poisson", "bursty", "diurnal"])
def test_arrival_processes(capsys: pytest.CaptureFixture[str], process: str) -> None:
    summary = told(capsys, *QUICK, "--arrivals", process, "--tenants", "2", "--no-cells")
    assert summary.requests.arrived == 12 and len(summary.tenants) == 2


def test_a_saved_trace_replays_to_the_same_hash(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = str(tmp_path / "t.jsonl")
    drawn = told(capsys, *QUICK, "--save-trace", saved)
    assert told(capsys, "simulate", "--trace", saved, "--slots", "4").trace_hash == drawn.trace_hash


def test_a_picture_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "slots.png"
    assert run(*QUICK, "--picture", str(path)) == 0
    assert path.stat().st_size > 5000 and f"picture: {path}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt", "lognormal:1"], "--prompt"),
        (["--rate", "-3"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--slots", "0"], "engine.slots"),
        (["--workers", "0"], "workers"),
        (["--requests", "-1"], "requests"),
        (["--duration", "nan"], "--duration"),
        (["--verify", "--no-cells"], "--verify"),
        (["--trace", "none.jsonl", "--rate", "1"], "--rate"),
        (["--trace", "none.jsonl"], "No such file"),
        ([STEADY, "--rate", "1"], "--rate"),
        (["none.toml"], "No such file"),
        (["--requests", "5", "--picture", "/nowhere/slots.png"], "picture"),
        (["--requests", "5", "--save-trace", "/nowhere/t.jsonl"], "trace"),
    ],
)
def test_bad_input_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert run("simulate", *words) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert caught.err.startswith("error: ") and said in caught.err
    assert caught.err.count("\n") == 1
