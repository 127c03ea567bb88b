"""`headrace bench`: flags, tables and files of the benchmarks. What is measured lives elsewhere.

The measuring modules are imported when a benchmark runs, so that help is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from headrace.cli.console import as_text, check_finite, leave, note, picture_target, print_json
from headrace.cli.kernels.command import kernels
from headrace.cli.load.command import serve
from headrace.core.errors import InvalidInput

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.cli.engine_bench import EngineFigures
    from headrace.cli.engine_profile import LoadProfile
    from headrace.cli.step_cost import SchedulerReport, StepCost
    from headrace.sim.batching_report import BatchingReport, Figures, Load, Setting

PICTURE = Path("bench-batching.png")

# Of prompts, and of KV: a few gigabytes.
_MOST_TOKENS = 2**27
_LONGEST_OUTPUT = 1_000_000

_FOOTNOTE = """\
Short replies have at most 20 tokens. A static or dynamic batch returns its
replies together; "if streamed" and "first token" are what clients would see if
it streamed them. Its finished rows and padding cost it nothing here. With a
backlog a dynamic batch is full at once and equals a static one."""

bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
bench.command()(serve)
bench.command()(kernels)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")]


@bench.command()
def batching(
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="Requests in the trace.")] = 1000,
    slots: Annotated[int, typer.Option(min=2, max=4096, help="Rows of the running table.")] = 32,
    prompt: Annotated[str, typer.Option(help="Prompt lengths.")] = "lognormal:100:0.6:10:1000",
    output: Annotated[str, typer.Option(help="Output lengths.")] = "lognormal:50:1.0:5:500",
    poisson: Annotated[bool, typer.Option("--poisson", help="Poisson arrivals, not all at the start.")] = False,
    rate: Annotated[
        float | None, typer.Option(min=1e-3, max=1e6, help="Requests/s, implies --poisson. Default: saturating.")
    ] = None,
    linger_ms: Annotated[
        float, typer.Option(min=0, max=1e6, help="How long a dynamic batch stays open for its first request.")
    ] = 50.0,
    kv_share: Annotated[
        float, typer.Option(min=0.01, max=1, help="KV of the second trace, as a share of what full slots use.")
    ] = 0.5,
    depth: Annotated[int, typer.Option(min=1, max=2, help="Plans in flight in the engine.")] = 2,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    picture: Annotated[Path | None, typer.Option(help=f"Where to draw it. [default: {PICTURE}]")] = None,
    as_json: AsJson = False,
) -> None:
    """One trace under static, dynamic and continuous batching, side by side, drawn.

    Lengths are written 25, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA:LOW:HIGH. All times are virtual.
    """
    from headrace.sim.batching import Machine
    from headrace.sim.batching_report import Setting, ample_blocks, run_batching, saturating_rate
    from headrace.sim.lengths import parse_lengths

    check_finite(rate=rate, linger_ms=linger_ms, kv_share=kv_share)
    target = picture_target(picture, PICTURE)
    prompts, outputs = parse_lengths(prompt, "--prompt"), parse_lengths(output, "--output")
    machine = Machine(slots=slots, depth=depth)
    machine = Machine(slots, ample_blocks(prompts, outputs, machine), depth=depth)
    if poisson and rate is None:
        rate = saturating_rate(prompts, outputs, machine)
    setting = Setting(requests, prompts, outputs, machine, rate, linger_ms / 1e3, kv_share, seed)
    _check_fits(setting)
    result = run_batching(setting, note)
    if target is not None:
        from headrace.sim.batching_picture import draw_batching

        draw_batching(result, target)
    if as_json:
        print_json({"report": result.report, "picture": as_text(target)})
        return
    _print_batching(result.report)
    if target is not None:
        print(f"picture: {as_text(target)}")


@bench.command()
def scheduler(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and steps: a few seconds.")] = False,
    depth: Annotated[int, typer.Option(min=1, max=2, help="Plans in flight in the engine.")] = 1,
    prefix_cache: Annotated[bool, typer.Option(help="Hash generated blocks, as in production.")] = True,
    as_json: AsJson = False,
) -> None:
    """Cost of planning and applying a step, against slots, queue length and tenants, in wall time.

    Steady decode with natural ends and admissions (prompts about 100 tokens, outputs about 200) over
    a runner that takes no time.
    """
    from msgspec import structs

    from headrace.cli.step_cost import QUICK, Sizes, run_scheduler

    sizes = QUICK if quick else Sizes()
    report = run_scheduler(structs.replace(sizes, depth=depth, prefix_cache=prefix_cache), note)
    if as_json:
        print_json(report)
    else:
        _print_scheduler(report)


@bench.command()
def engine(
    load: Annotated[
        list[str] | None,
        typer.Option(help="A name or REQUESTS:PROMPT:OUTPUT, lengths as N or LOW-HIGH; may be given again."),
    ] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="A pulled model, a .gguf file or a folder.")] = "default",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu; auto takes a CUDA card that can be used.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, fp32, int8 or int4; on a card bf16 or fp8.")] = "auto",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="On a card: the same bits alone and in any company, more slowly.")
    ] = False,
    slots: Annotated[int, typer.Option(min=1, max=4096, help="Sequences that run at once.")] = 32,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    profile: Annotated[
        Path | None, typer.Option(help="Folder for Chrome traces of the steps; also tells operators by their time.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Random prompts through engine and model: tokens/s, latencies, and where a step's time goes.

    All requests are there at the start, greedy, and run to their full length. Names: prefill, decode1, decode8,
    decode16, decode32, single, batch64, batch256, mixed256.
    """
    from headrace.cli.engine_bench import parse_load, run_load
    from headrace.cli.engine_profile import open_folder, profile_load
    from headrace.cli.local import open_local
    from headrace.worker.assembly import LoadSettings

    loads = [parse_load(text) for text in load or ("prefill", "decode1", "decode8", "decode16", "decode32")]
    if profile is not None:
        open_folder(profile)
    results, profiles = [], []
    settings = LoadSettings(device=device, dtype=dtype, slots=slots, deterministic=deterministic)
    with open_local(model, settings) as local:
        for each in loads:
            note(f"{each.name}: {each.requests} requests")
            if profile is None:
                results.append(run_load(local, each, seed))
                continue
            figures, found = profile_load(local, each, seed, profile)
            results.append(figures)
            profiles.append(found)
        about = local.describe()
    if as_json:
        traced = {} if profile is None else {"profile": {"folder": as_text(profile), "loads": profiles}}
        print_json({"model": about, "loads": results} | traced)
    else:
        _print_engine(results, _title(about), profiles, profile)
    if profile is not None and about["device"] == "cuda":
        leave()  # in half of all times torch's profiler and a card's libraries corrupt memory when they end


def _title(about: dict[str, Any]) -> str:
    return f"{about['name']}, {about['dtype']} on {about['device']}, ready after {about['ready_s']:.1f} s"


def _print_engine(results: list[EngineFigures], title: str, profiles: list[LoadProfile], folder: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    speeds = Table(title=title, title_justify="left")
    steps = Table(title="a mean step, ms", title_justify="left")
    latencies = ("TTFT ms\np50", "\np99", "ITL ms\np50", "\np99")
    for table, names in (
        (speeds, ("output\ntokens/s", "all\ntokens/s", *latencies)),
        (steps, ("plan", "launch", "sample", "emit")),
    ):
        table.add_column("load", overflow="fold")
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
    for each in results:
        itl = ("–", "–") if each.itl_s is None else (_ms(each.itl_s.p50), _ms(each.itl_s.p99))
        split = each.split
        parts = (split.plan_s, split.launch_s + split.wait_s, split.sample_s, split.emit_s)
        rates = (f"{each.output_tokens_per_s:,.1f}", f"{each.total_tokens_per_s:,.1f}")
        speeds.add_row(each.load.name, *rates, _ms(each.ttft_s.p50), _ms(each.ttft_s.p99), *itl)
        steps.add_row(each.load.name, *(_ms(part / max(1, each.steps)) for part in parts))
    console = Console()
    console.print(speeds)
    console.print(steps)
    console.print("launch has the forward pass and the wait for it")
    for found in profiles:
        from headrace.cli.engine_profile import print_load_profile

        assert folder is not None
        print_load_profile(found, folder, console)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def _check_fits(setting: Setting) -> None:
    """Every prompt is held from the start, and the pool has room for the longest request in every slot."""
    held = setting.requests * float(setting.prompt.mean())
    if held > _MOST_TOKENS:
        raise InvalidInput(
            f"--requests times --prompt: {held:,.0f} tokens, more than {_MOST_TOKENS:,}", param="--requests"
        )
    steps = setting.requests * float(setting.output.mean()) + setting.machine.slots * setting.output.greatest
    if setting.output.greatest > _LONGEST_OUTPUT or steps > _MOST_TOKENS:
        message = f"--output: at most {_LONGEST_OUTPUT:,} tokens long, and {_MOST_TOKENS:,} of all requests together"
        raise InvalidInput(message, param="--output")
    pool = setting.machine.blocks * setting.machine.block_size
    if pool > _MOST_TOKENS:
        message = f"--slots times the longest --prompt and --output: {pool:,} tokens of KV, more than {_MOST_TOKENS:,}"
        raise InvalidInput(message, param="--slots")


def _print_batching(report: BatchingReport) -> None:
    from rich.console import Console

    console = Console()
    for name in ("saturated", "kv_bound", "steady"):
        console.print(_load_table(name, getattr(report, name)))
    console.print(_straggler_table(report))
    console.print(_FOOTNOTE, highlight=False)
    for line in _acceptance(report):
        console.print(line, highlight=False)


def _load_table(name: str, load: Load) -> Table:
    from rich.table import Table

    from headrace.sim.batching import Policy

    rate = "" if load.rate is None else f", {load.rate:.1f} requests/s"
    table = Table(title=f"{name.replace('_', '-')}: {load.about}{rate}, {load.blocks:,} blocks", title_justify="left")
    table.add_column("")
    for policy in Policy:
        table.add_column(policy, justify="right")
    table.add_column("of static", justify="right")
    columns = [_cells(load.policies[policy]) for policy in Policy]
    for static, dynamic, continuous in zip(*columns, strict=True):
        ratio = _ratio(continuous.value, static.value)
        table.add_row(static.label, static.text, dynamic.text, continuous.text, ratio)
    return table


class _Cell(NamedTuple):
    label: str
    # None: a ratio would mean nothing.
    value: float | None
    text: str


def _cells(figures: Figures) -> tuple[_Cell, ...]:
    """A policy's column, from top to bottom."""

    def seconds(label: str, value: float | None) -> _Cell:
        return _Cell(label, value, "–" if value is None else f"{value:.3f} s")

    def share(label: str, value: float | None) -> _Cell:
        return _Cell(label, value, "–" if value is None else f"{value:.1%}")

    speed = figures.output_tokens_per_s
    return (
        _Cell("output tokens/s", speed, f"{speed:,.0f}"),
        seconds("makespan", figures.makespan_s),
        share("slots at work", figures.occupancy),
        share("  while anything waits", figures.occupancy_while_waiting),
        share("KV in use", figures.kv_use),
        share("  while anything waits", figures.kv_use_while_waiting),
        seconds("short replies p50", figures.short_p50_s),
        seconds("short replies p99", figures.short_p99_s),
        seconds("  p99 if streamed", figures.short_streamed_p99_s),
        seconds("first token p50", figures.ttft_p50_s),
        seconds("first token p99", figures.ttft_p99_s),
        _Cell("steps", figures.steps, f"{figures.steps:,}"),
        _Cell("preemptions", None, f"{figures.preemptions:,}"),
        _Cell("recomputed tokens", None, f"{figures.recomputed_tokens:,}"),
    )


def _ratio(value: float | None, base: float | None) -> str:
    return "" if value is None or not base else f"{value / base:.3g}x"


def _straggler_table(report: BatchingReport) -> Table:
    from rich.table import Table

    from headrace.sim.batching import Policy

    shorts = report.machine.slots - 1
    table = Table(title=f"straggler: p99 of {shorts} five-token replies beside one of L tokens", title_justify="left")
    table.add_column("L", justify="right")
    for policy in Policy:
        table.add_column(policy, justify="right")
    for straggler in report.straggler:
        tails = (f"{straggler.short_p99_s[policy] * 1e3:,.1f} ms" for policy in Policy)
        table.add_row(f"{straggler.long_output:,}", *tails)
    return table


def _acceptance(report: BatchingReport) -> list[str]:
    from headrace.sim.batching import Policy

    ratio = report.saturated.ratio_to_static(Policy.CONTINUOUS)
    busy = report.saturated.policies[Policy.CONTINUOUS].occupancy_while_waiting
    used = report.kv_bound.policies[Policy.CONTINUOUS].kv_use_while_waiting
    tails = [straggler.short_p99_s[Policy.CONTINUOUS] for straggler in report.straggler]
    moved, step_s = max(tails) - min(tails), report.straggler[0].step_s
    return [
        _verdict(ratio >= 2.0, f"continuous gives {ratio:.2f}x the tokens/s of static", "at least 2x"),
        _verdict(busy is None or busy >= 0.95, f"slots at work while anything waits: {_share(busy)}", "at least 95 %"),
        _verdict(
            used is None or used >= 0.95, f"KV-bound, KV in use while anything waits: {_share(used)}", "at least 95 %"
        ),
        _verdict(
            moved < step_s,
            f"the long reply moves the short p99 by {moved * 1e3:.2f} ms",
            f"less than a step, {step_s * 1e3:.2f} ms",
        ),
    ]


def _share(value: float | None) -> str:
    return "nothing waited" if value is None else f"{value:.1%}"


def _verdict(met: bool, told: str, target: str) -> str:
    return f"{'met    ' if met else 'NOT met'} {told} (target: {target})"


def _print_scheduler(report: SchedulerReport) -> None:
    from rich.console import Console

    from headrace.cli.step_cost import queue_growth

    console = Console()
    console.print(_scheduler_table(report))
    shared = max(point.both_p50_ms / point.cpu_p50_ms for point in report.points)
    last, submit_us = report.points[-1], max(point.submit_us for point in report.points)
    lines = [
        f"the last of these, wall time: plan {last.plan_p50_ms:.2f} ms, apply {last.apply_p50_ms:.2f} ms",
        f"median wall time is up to {shared:.2f}x the CPU time{' (a busy machine)' if shared > 1.1 else ''}",
        f"a submission takes up to {submit_us:.0f} µs; {report.machine}, Python {report.python}",
        f"{max(report.sizes.waiting):,} waiting cost up to {queue_growth(report.points):.2f}x of none",
        *(_verdict(verdict.met, verdict.measured, verdict.target) for verdict in report.verdicts),
    ]
    for line in lines:
        console.print(line, highlight=False)


def _scheduler_table(report: SchedulerReport) -> Table:
    from rich import box
    from rich.table import Table

    lengths = sorted(report.sizes.waiting)
    title = "plan + apply, ms of CPU time per step: median (p99), by requests waiting"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for name in ("slots", "tenants", *(f"{waiting:,}" for waiting in lengths)):
        table.add_column(name, justify="right", no_wrap=True)
    for slots in report.sizes.slots:
        for tenants in report.sizes.tenants:
            row = {point.waiting: point for point in report.points if (point.slots, point.tenants) == (slots, tenants)}
            table.add_row(f"{slots:,}", f"{tenants}", *(_step_cost(row.get(waiting)) for waiting in lengths))
    return table


def _step_cost(point: StepCost | None) -> str:
    return "" if point is None else f"{point.cpu_p50_ms:.2f} ({point.cpu_p99_ms:.1f})"
