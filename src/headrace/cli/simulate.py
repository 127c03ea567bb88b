"""`headrace simulate`: reads a scenario or builds one from flags, runs the world, shows what came of it.

Owns the options and how a summary looks; the world itself is in `sim.world`.
"""

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from headrace.cli.console import as_text, check_finite, print_json
from headrace.core.errors import HeadraceError, InvalidInput
from headrace.sim.arrivals import Arrivals, Bursty, Diurnal, Poisson
from headrace.sim.lengths import parse_lengths
from headrace.sim.picture import Caption, check_picture, draw_slots
from headrace.sim.report import Quantiles, Summary, TenantSummary, summarise
from headrace.sim.scenario import Scenario, TenantLoad, check_scenario, read_scenario
from headrace.sim.spans import SlotRecorder
from headrace.sim.traces import write_trace
from headrace.sim.workload import draw_rows
from headrace.sim.world import World


class Process(StrEnum):
    POISSON = "poisson"
    BURSTY = "bursty"
    DIURNAL = "diurnal"


# A burst takes a quarter of the time and carries all requests.
_ON_S, _OFF_S = 5.0, 15.0
_RATE, _DURATION_S = 20.0, 30.0
_PROMPT, _OUTPUT = "lognormal:200:0.8:8:4000", "lognormal:80:0.8:4:1000"
_MOST_TENANT_ROWS = 20
_PIPE_COLUMNS = 110

ScenarioFile = Annotated[Path | None, typer.Argument(help="A scenario file (TOML, or JSON by its suffix).")]
Rate = Annotated[float | None, typer.Option(help=f"Requests/s of all tenants together. [default: {_RATE:g}]")]
Duration = Annotated[float | None, typer.Option(help=f"Seconds of arrivals. [default: {_DURATION_S:g}]")]
Requests = Annotated[int | None, typer.Option(help="Most requests; without --duration the only bound.")]
Prompt = Annotated[str | None, typer.Option(help=f"Prompt lengths: 25, uniform:1:9, mix:... [default: {_PROMPT}]")]
Output = Annotated[str | None, typer.Option(help=f"Output lengths. [default: {_OUTPUT}]")]
ArrivalsOption = Annotated[Process | None, typer.Option(help="Arrival process. [default: poisson]")]
Tenants = Annotated[int | None, typer.Option(min=1, max=100_000, help="Equal tenants that share the rate.")]
TraceFile = Annotated[Path | None, typer.Option(help="Replay a trace (JSON lines) instead of drawing requests.")]
Slots = Annotated[int | None, typer.Option(help="Slots of a worker.")]
Blocks = Annotated[int | None, typer.Option(help="KV blocks of a worker.")]
Workers = Annotated[int | None, typer.Option(help="Workers behind the least-work router.")]
Depth = Annotated[int | None, typer.Option(help="Plans in flight.")]
Seed = Annotated[int | None, typer.Option(help="Seed of every random draw.")]
NoCells = Annotated[bool, typer.Option("--no-cells", help="Keep no KV cells: faster, nothing is checked.")]
Verify = Annotated[bool, typer.Option("--verify", help="Hold every stream against what its prompt must give.")]
PictureFile = Annotated[Path | None, typer.Option(help="Draw worker 0's slots over time (PNG).")]
PictureFrom = Annotated[float, typer.Option(min=0, help="Where the picture begins, in virtual seconds.")]
PictureFor = Annotated[float | None, typer.Option(min=1e-3, help="How many seconds it shows.")]
SaveTrace = Annotated[Path | None, typer.Option(help="Write the requests that were drawn as a trace.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]


def simulate(
    scenario: ScenarioFile = None,
    rate: Rate = None,
    duration: Duration = None,
    requests: Requests = None,
    prompt: Prompt = None,
    output: Output = None,
    arrivals: ArrivalsOption = None,
    tenants: Tenants = None,
    trace: TraceFile = None,
    slots: Slots = None,
    blocks: Blocks = None,
    workers: Workers = None,
    depth: Depth = None,
    seed: Seed = None,
    no_cells: NoCells = False,
    verify: Verify = False,
    picture: PictureFile = None,
    picture_from: PictureFrom = 0.0,
    picture_for: PictureFor = None,
    save_trace: SaveTrace = None,
    as_json: AsJson = False,
) -> None:
    """Run a scenario, or a load given by flags, under the virtual clock.

    Flags about sizes, seed and duration also override those of a scenario file.
    """
    check_finite(rate=rate, duration=duration, picture_from=picture_from, picture_for=picture_for)
    _check_span(picture, picture_from, picture_for)
    if scenario is None and trace is None and duration is None and requests is None:
        duration = _DURATION_S
    asked = _read(scenario, trace, _Load(rate, prompt, output, arrivals, tenants, duration))
    sizes = {"duration_s": duration, "requests": requests, "workers": workers, "depth": depth, "seed": seed}
    asked = _override(asked, sizes, {"slots": slots, "blocks": blocks}, no_cells)
    if verify and not asked.cells:
        raise InvalidInput("--verify needs cells", param="--verify")
    if picture is not None:
        check_picture(picture)
    if save_trace is not None:
        _save(save_trace, asked)
    recorder = SlotRecorder(asked.engine.slots) if picture is not None else None
    summary = _run(asked, recorder, verify)
    if picture is not None and recorder is not None:
        draw_slots(recorder.spans(), _caption(summary), picture, from_s=picture_from, for_s=picture_for)
    if as_json:
        print_json(summary)
    else:
        _print(summary, picture)


def _check_span(picture: Path | None, from_s: float, for_s: float | None) -> None:
    if picture is None and (from_s or for_s is not None):
        option = "--picture-from" if from_s else "--picture-for"
        raise InvalidInput(f"{option} needs --picture", param=option)


class _Load(NamedTuple):
    """The flags that say what is sent; they exclude a file that says it."""

    rate: float | None
    prompt: str | None
    output: str | None
    arrivals: Process | None
    tenants: int | None
    duration_s: float | None

    def refuse(self, why: str) -> None:
        for name in ("rate", "prompt", "output", "arrivals", "tenants"):
            if getattr(self, name) is not None:
                raise InvalidInput(f"--{name} {why}", param=f"--{name}")


def _read(scenario: Path | None, trace: Path | None, load: _Load) -> Scenario:
    if scenario is not None:
        load.refuse("does not go with a scenario file")
        if trace is not None:
            raise InvalidInput("--trace does not go with a scenario file", param="--trace")
        return read_scenario(scenario)
    if trace is not None:
        load.refuse("does not go with --trace")
        return Scenario(name=(as_text(Path(trace.name)) or "")[:200], trace=str(trace))
    return Scenario(duration_s=load.duration_s, tenants=_tenant_loads(load))


def _tenant_loads(load: _Load) -> tuple[TenantLoad, ...]:
    rate = _RATE if load.rate is None else load.rate
    if not 1e-3 <= rate <= 1e8:
        raise InvalidInput("--rate must be from 0.001 to 1e8 requests/s", param="--rate")
    count = load.tenants or 1
    each = max(rate / count, 1e-4)
    kinds: dict[Process, Arrivals] = {
        Process.POISSON: Poisson(each),
        Process.BURSTY: Bursty(each * (_ON_S + _OFF_S) / _ON_S, 0.0, _ON_S, _OFF_S),
        Process.DIURNAL: Diurnal(each, period_s=load.duration_s or _DURATION_S),
    }
    arrivals = kinds[load.arrivals or Process.POISSON]
    lengths = (
        parse_lengths(_given(load.prompt, _PROMPT), "--prompt"),
        parse_lengths(_given(load.output, _OUTPUT), "--output"),
    )
    names = ["default"] if load.tenants is None else [f"t{index}" for index in range(count)]
    return tuple(TenantLoad(name, arrivals, *lengths) for name in names)


def _given(text: str | None, default: str) -> str:
    return default if text is None else text


def _override(scenario: Scenario, top: dict[str, Any], engine: dict[str, Any], no_cells: bool) -> Scenario:
    engine_changes = {name: value for name, value in engine.items() if value is not None}
    changes: dict[str, Any] = {name: value for name, value in top.items() if value is not None}
    changes["engine"] = msgspec.structs.replace(scenario.engine, **engine_changes)
    if no_cells:
        changes["cells"] = False
    changed = msgspec.structs.replace(scenario, **changes)
    check_scenario(changed)
    return changed


def _save(target: Path, scenario: Scenario) -> None:
    """The trace that is replayed is read while it is saved: it cannot be the same file."""
    if scenario.trace is not None and target.exists() and target.samefile(scenario.trace):
        raise InvalidInput("--save-trace would overwrite the trace that is read", param="--save-trace")
    write_trace(target, draw_rows(scenario))


def _run(scenario: Scenario, recorder: SlotRecorder | None, verify: bool) -> Summary:
    world = World(scenario, detail=verify, recorder=recorder)
    # A thousand engines are a million objects that live as long as the run: looking through them for
    # cycles again and again would take a quarter of the time.
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    with _progress(scenario) as show:
        started_s = time.perf_counter()
        world.run(show)
        wall_s = time.perf_counter() - started_s
    verified = None
    if verify:
        try:
            verified = world.verify()
        except AssertionError as error:
            raise HeadraceError(f"a stream is wrong: {error}") from None
    return summarise(world, wall_s, verified)


@contextmanager
def _progress(scenario: Scenario) -> Iterator[Any]:
    """A bar on a terminal's stderr, of arrivals where their number is known, else of virtual time."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("simulating"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=scenario.requests or scenario.duration_s)

        def show(world: World) -> None:
            done = world.book.num_arrived if scenario.requests else world.clock.now_s()
            about = f"{world.clock.now_s():,.1f} s, {len(world.book.records):,} of {world.book.num_arrived:,} ended"
            progress.update(task, completed=done, description=about)

        yield show


def _caption(summary: Summary) -> Caption:
    about = summary.scenario or "simulation"
    occupancy = _percent(summary.slot_occupancy_while_waiting)
    return Caption(
        f"{about}: {summary.slots} slots of worker 0, a colour per request",
        f"{summary.requests.finished:,} of {summary.requests.arrived:,} requests finished · "
        f"{summary.output_tokens_per_s:,.0f} output tokens/s · slots occupied {_percent(summary.slot_occupancy)}, "
        f"{occupancy} while anything waits",
    )


def _print(summary: Summary, picture: Path | None) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_COLUMNS)
    table = Table(title=Text(summary.scenario or "simulation", "table.title"), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in _rows(summary):
        table.add_row(name, value)
    console.print(table)
    if len(summary.tenants) > 1:
        console.print(_tenant_table(summary.tenants))
    if picture is not None:
        print(f"picture: {as_text(picture)}")


def _rows(summary: Summary) -> list[tuple[str, str]]:
    requests = summary.requests
    odd = [
        ("cancelled since clients left or did not read", requests.cancelled),
        ("refused", requests.refused),
        ("failed", requests.failed),
    ]
    odd.append(("invalid", requests.invalid))
    ends = ", ".join(f"{count:,} {name}" for name, count in odd if count) or "no other end"
    refusals = f"; told {summary.refusals:,} times to come back later" if summary.refusals else ""
    rows = [
        ("requests", f"{requests.finished:,} of {requests.arrived:,} finished; {ends}{refusals}"),
        ("virtual time", f"{summary.virtual_s:,.3f} s on {summary.workers:,} × {summary.slots} slots"),
        ("output", f"{summary.output_tokens:,} tokens, {summary.output_tokens_per_s:,.1f}/s"),
        ("goodput", f"{summary.good_requests_per_s:,.2f} requests/s within targets ({_percent(summary.good_share)})"),
        ("TTFT", _times(summary.ttft_s)),
        ("inter-token time", _times(summary.itl_s)),
        ("end to end", _times(summary.e2e_s)),
        ("device busy", _percent(summary.utilisation)),
        ("slots occupied", _both(summary.slot_occupancy, summary.slot_occupancy_while_waiting)),
        (
            "KV in use",
            f"{_both(summary.kv_use, summary.kv_use_while_waiting)}; at most {_percent(summary.kv_use_max)}",
        ),
        ("queue at most", f"{summary.max_waiting:,} waiting, {summary.max_queue_s:,.2f} s of work"),
        ("preemptions", f"{summary.preemptions:,}; {summary.recomputed_tokens:,} tokens recomputed"),
        ("prompt tokens", f"{summary.prompt_tokens_computed:,} computed, {summary.prompt_tokens_cached:,} cached"),
    ]
    if summary.replays:
        rows.append(("replays", f"{summary.replays:,} streams moved, {summary.replayed_tokens:,} tokens replayed"))
    if summary.fairness is not None:
        rows.append(("fairness (Jain)", f"{summary.fairness:.4f} of what backlogged tenants got by weight"))
    if summary.verified is not None:
        rows.append(("verified", f"{summary.verified:,} streams are what their prompts must give"))
    rows.append(("trace hash", summary.trace_hash))
    rows.append(("wall time", f"{summary.wall_s:,.2f} s; {summary.steps:,} steps, {summary.steps_per_s:,.0f}/s"))
    return rows


def _tenant_table(tenants: tuple[TenantSummary, ...]) -> Table:
    title = "tenants" if len(tenants) <= _MOST_TENANT_ROWS else f"tenants, the first {_MOST_TENANT_ROWS}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("tenant", overflow="fold", min_width=8)
    for name in ("finished", "refused", "tokens/s", "TTFT p50", "p99", "good", "got/due"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in tenants[:_MOST_TENANT_ROWS]:
        table.add_row(
            Text(row.tenant),
            f"{row.requests.finished:,}/{row.requests.arrived:,}",
            f"{row.requests.refused:,}",
            f"{row.output_tokens_per_s:,.0f}",
            _seconds(row.ttft_s.p50),
            _seconds(row.ttft_s.p99),
            _percent(row.good_share),
            "–" if row.given_over_due is None else f"{row.given_over_due:.3f}",
        )
    return table


def _times(times: Quantiles) -> str:
    return f"p50 {_seconds(times.p50)}, p95 {_seconds(times.p95)}, p99 {_seconds(times.p99)}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1e3:,.1f} ms" if value < 1.0 else f"{value:,.2f} s"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _both(always: float | None, waiting: float | None) -> str:
    return f"{_percent(always)}, {_percent(waiting)} while anything waits"
