"""The trace of an engine's turns: every moment in exactly one part, children inside their turn, one span per step."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from headrace.cli.engine_bench import Load, make_requests, run_load
from headrace.cli.main import main
from headrace.cli.operators import MIDDLE, pass_by, sum_operators
from headrace.cli.step_trace import MOST_TURNS, PARTS, Span, StepTrace, TracedRunner, cut
from headrace.core.clock import SystemClock
from headrace.engine.loop import Engine
from headrace.runner.fake import FakeRunner
from tests.builders import engine_config
from tests.unit.weights.files import tiny_shape, write_gguf

pytestmark = pytest.mark.unit


def traced(depth: int, tmp_path: Path) -> tuple[StepTrace, Any, list[dict[str, Any]]]:
    """A few sequences through the fake, and the file that came of it."""
    config = engine_config(max_queue_s=1e6)
    clock = SystemClock()
    runner = TracedRunner(FakeRunner(config, depth=depth), clock)
    trace = StepTrace(runner)
    local = SimpleNamespace(engine=Engine(config, runner), times=runner.times, config=config, clock=clock)
    figures = run_load(local, Load("few", 3, (5, 9), (4, 6)), trace=trace)  # type: ignore[arg-type]
    trace.write(tmp_path / "steps.json", "a fake")
    document = json.loads((tmp_path / "steps.json").read_text())
    return trace, figures, document["traceEvents"]


@pytest.mark.parametrize("depth", [1, 2])
def test_parts_fill_their_turn_and_lie_inside_it(depth: int, tmp_path: Path) -> None:
    trace, _, events = traced(depth, tmp_path)
    loop = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    turns = [event for event in loop if event["name"] not in PARTS]
    parts = [event for event in loop if event["name"] in PARTS]
    assert len(turns) == trace.num_turns
    for turn in turns:
        end = turn["ts"] + turn["dur"]
        inside = [part for part in parts if turn["ts"] <= part["ts"] < end]
        assert sum(part["dur"] for part in inside) == pytest.approx(turn["dur"], abs=0.01)
        assert all(part["ts"] + part["dur"] <= end + 0.01 for part in inside)
    whole_us = sum(turn["dur"] for turn in turns)
    assert 1e6 * sum(trace.totals_s.values()) == pytest.approx(whole_us, rel=1e-6)


@pytest.mark.parametrize("depth", [1, 2])
def test_every_step_is_in_flight_once_with_what_it_computed(depth: int, tmp_path: Path) -> None:
    _, figures, events = traced(depth, tmp_path)
    flights = [event for event in events if event["ph"] == "X" and event["tid"] > 1]
    assert len({event["name"] for event in flights}) == len(flights) == figures.steps
    assert {event["tid"] for event in flights} == set(range(2, 2 + depth))
    computed = sum(event["args"]["prefill_tokens"] + event["args"]["decode_rows"] for event in flights)
    # The last token of each of three sequences is never computed.
    assert computed >= figures.prompt_tokens + figures.output_tokens - 3
    named = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"a fake", "the engine's loop", "steps in flight 1"} <= named


def test_what_precedes_the_wait_is_planning_and_what_follows_it_applying() -> None:
    calls = [Span("launch", 1.0, 2.0), Span("sample", 2.5, 3.0), Span("wait", 4.0, 6.0), Span("sample", 7.0, 7.5)]
    told = [(span.name, span.start_s, span.end_s) for span in cut(calls, 0.0, 8.0)]
    assert told == [
        ("plan", 0.0, 1.0),
        ("launch", 1.0, 2.0),
        ("plan", 2.0, 2.5),
        ("sample", 2.5, 3.0),
        ("plan", 3.0, 4.0),
        ("wait", 4.0, 6.0),
        ("apply", 6.0, 7.0),
        ("sample", 7.0, 7.5),
        ("apply", 7.5, 8.0),
    ]


def test_a_very_long_load_keeps_its_sums_and_the_beginning_of_its_spans() -> None:
    config = engine_config()
    trace = StepTrace(TracedRunner(FakeRunner(config), SystemClock()))
    for turn in range(MOST_TURNS + 10):
        trace.turn(float(turn), turn + 0.25, turn + 0.5)
    assert trace.totals_s["plan"] == pytest.approx(0.25 * (MOST_TURNS + 10))
    assert len(trace.events) == 3 * MOST_TURNS


@pytest.mark.parametrize("depth", [1, 2])
def test_watching_begins_in_the_middle_of_a_load(depth: int) -> None:
    config = engine_config(max_queue_s=1e6)
    clock = SystemClock()
    runner = TracedRunner(FakeRunner(config, depth=depth), clock)
    engine = Engine(config, runner)
    requests = make_requests(Load("few", 4, (10, 10), (30, 30)), config.vocab_size, config.context_len, 0)
    numbers = engine.submit_all(requests, clock.now_s())
    pass_by(MIDDLE, engine, runner, requests, clock)
    emitted = [engine.counters_of(number).emitted for number in numbers]
    # 4 times 10 and 30 tokens; four tenths of them are the prompts and a fifth of what is emitted.
    assert all(5 <= count <= 9 for count in emitted)


def _event(name: str, device: DeviceType, count: int, host_us: float, device_us: float) -> SimpleNamespace:
    times = {"self_cpu_time_total": host_us, "self_device_time_total": device_us}
    return SimpleNamespace(key=name, count=count, device_type=device, **times)


def test_operators_are_summed_by_their_own_time_without_our_marks() -> None:
    events = [
        # What an operator's kernel takes is told of both.
        _event("aten::mm", DeviceType.CPU, 4, 600.0, 100.0),
        _event("product", DeviceType.CUDA, 4, 0.0, 100.0),
        _event("attention", DeviceType.CUDA, 8, 0.0, 300.0),
        _event("headrace: turn", DeviceType.CPU, 1, 9e9, 9e9),
        _event("headrace: turn", DeviceType.CUDA, 1, 0.0, 9e9),
    ]
    host = sum_operators(events, 2, 1e-3, on_card=False)
    (product,) = host.operators
    assert product.name == "aten::mm" and product.calls == 4 and product.share == pytest.approx(0.6)
    card = sum_operators(events, 2, 1e-3, on_card=True)
    assert [each.name for each in card.operators] == ["attention", "product"]
    assert card.operators[0].share == pytest.approx(0.75)


def test_the_command_writes_both_traces(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", tiny_shape())
    asked = ["--model", str(model), "--load", "2:8:12", "--dtype", "fp32", "--device", "cpu", "--slots", "2"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "engine", *asked, "--profile", str(tmp_path / "new" / "folder"), "--json"])
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    (found,) = json.loads(out)["profile"]["loads"]
    assert set(found["parts_s"]) == set(PARTS) and found["operators"]["operators"]
    for name, span in (("steps-2x8x12.json", "step 0"), ("operators-2x8x12.json", "headrace: launch")):
        events = json.loads((tmp_path / "new" / "folder" / name).read_text())["traceEvents"]
        assert span in {event.get("name") for event in events}


def test_a_folder_that_cannot_be_is_refused_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "engine", "--model", "no-such", "--profile", str(tmp_path / "file" / "folder")])
    assert ended.value.code == 2 and "--profile" in capsys.readouterr().err
