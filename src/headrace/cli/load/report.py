"""A report in tables for people. Owns words and columns; computes nothing but ratios."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from headrace.cli.load.figures import Figures, Percentiles, ProcessFigures, RunFigures
    from headrace.cli.load.measure import LoadReport

_LATENCIES = (
    ("TTFT", "ttft_s"),
    ("ITL", "itl_s"),
    ("TPOT", "tpot_s"),
    ("E2E", "e2e_s"),
    ("sent late", "lateness_s"),
    ("answered", "service_s"),
)
_FOOTNOTE = """\
TTFT and E2E count from the time a request was meant to be sent. E2E is "sent
late", until its first byte was written, and "answered". ITL: gaps between
pieces that bring tokens. TPOT: a request's mean time per token after the first."""


def print_report(report: LoadReport) -> None:
    console = Console()
    console.print(f"{report.url}, model {report.model}, {report.api}, seed {report.seed}", highlight=False)
    for run in report.runs:
        _print_run(console, run)
    if len(report.runs) > 1:
        console.print(_compared(report.runs))
    console.print(_FOOTNOTE, highlight=False)
    if report.load_average > report.cores:
        told = f"a busy machine: load average {report.load_average:.1f} on {report.cores} cores before the load"
        console.print(f"{told}; latencies are its as well", highlight=False)
    for line in verdicts(report):
        console.print(line, highlight=False, markup=False)


def verdicts(report: LoadReport) -> list[str]:
    """What must hold of any load, in words."""
    without = sum(run.without_end for run in report.runs)
    lines = []
    if without:
        lines.append(f"NOT met {without:,} requests without exactly one proper end")
        lines += [f"        {example}" for run in report.runs for example in run.examples]
    else:
        lines.append("met     every request came to exactly one end")
    truth = report.truth
    if truth is not None and truth.wrong:
        lines.append(f"NOT met {truth.wrong:,} of {truth.requests:,} replies are not the truth; {truth.first}")
    elif truth is not None:
        warm = ", those of the warm-up as well" if report.warmup_s else ""
        lines.append(f"met     every token is the truth: {truth.tokens:,} in {truth.requests:,} replies{warm}")
    return lines


def _print_run(console: Console, run: RunFigures) -> None:
    console.print(_latencies(run))
    for name, figures in run.tenants.items() if len(run.tenants) > 1 else ():
        console.print(f"{name}: {_speeds(figures)}", highlight=False, markup=False)
    console.print(f"all: {_speeds(run.overall)}", highlight=False)
    if run.processes:
        console.print(_processes(run.processes))
    client = run.client
    per_frame = "" if client.cpu_us_per_frame is None else f", {client.cpu_us_per_frame:,.0f} µs a frame"
    busy = " (too busy to be trusted)" if client.cpu_share > 0.9 else ""
    console.print(
        f"this client: {client.cpu_share:.0%} of a core{busy}{per_frame}, {client.connections:,} connections, "
        f"{client.received_bytes / 1e6:,.1f} MB received",
        highlight=False,
    )


def _latencies(run: RunFigures) -> Table:
    how = "streamed" if run.streamed else "not streamed"
    table = Table(title=f"{how}, {run.seconds:,.1f} s, {run.overall.requests:,} requests", title_justify="left")
    several = len(run.tenants) > 1
    table.add_column("ms")
    for name in ("p50", "p90", "p95", "p99", "max", "mean"):
        table.add_column(name, justify="right", no_wrap=True)
    groups = [*(run.tenants.items() if several else ()), ("all" if several else "", run.overall)]
    for tenant, figures in groups:
        for name, field in _LATENCIES:
            values: Percentiles | None = getattr(figures, field)
            if values is not None:
                row = (values.p50, values.p90, values.p95, values.p99, values.max, values.mean)
                table.add_row(f"{name} {tenant}".strip(), *(f"{1e3 * value:,.2f}" for value in row))
    return table


def _speeds(figures: Figures) -> str:
    rate = f"{figures.finished_per_s:,.1f} requests/s"
    if figures.offered_per_s is not None:
        rate = f"{figures.offered_per_s:,.1f} requests/s offered, {figures.finished_per_s:,.1f}/s until the last reply's end"
    parts = [
        rate,
        f"{figures.output_tokens_per_s:,.0f} output tokens/s",
        f"{figures.prompt_tokens_per_s:,.0f} prompt tokens/s",
        ", ".join(f"{count:,} {state}" for state, count in sorted(figures.states.items())),
    ]
    if figures.goodput_per_s is not None:
        share = "–" if figures.good_share is None else f"{figures.good_share:.1%}"
        parts.append(f"goodput {figures.goodput_per_s:,.2f}/s ({share})")
    if figures.errors:
        parts.append("errors " + ", ".join(f"{count:,} × {error}" for error, count in sorted(figures.errors.items())))
    return " · ".join(part for part in parts if part)


def _processes(processes: list[ProcessFigures]) -> Table:
    table = Table(title="processes of the server, while counted; before → after the run", title_justify="left")
    # Only this one wraps: a terminal that is too narrow breaks names, not numbers.
    table.add_column("process", overflow="fold")
    for name in ("CPU s", "requests\n/ CPU s", "frames\n/ CPU s", "RSS MiB", "descriptors"):
        table.add_column(name, justify="right", no_wrap=True)
    for process in processes:
        rss = " → ".join(f"{size / 2**20:,.0f}" for size in process.rss_bytes)
        rates = (process.requests_per_cpu_s, process.frames_per_cpu_s)
        shown = ("–" if rate is None else f"{rate:,.0f}" for rate in rates)
        descriptors = " → ".join(f"{count:,}" for count in process.descriptors)
        table.add_row(
            f"{process.pid} {process.title.removeprefix('headrace: ')}",
            f"{process.cpu_s:,.2f}",
            *shown,
            rss,
            descriptors,
        )
    return table


def _compared(runs: list[RunFigures]) -> Table:
    """Medians over the pairs: one slow moment of a shared machine decides nothing."""
    title = f"streamed against not streamed, medians of {len(runs) // 2} pairs"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("streamed", "not streamed", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = (
        ("requests/s", lambda run: run.overall.finished_per_s),
        ("output tokens/s", lambda run: run.overall.output_tokens_per_s),
        ("first token p50, ms", lambda run: _first_ms(run, "p50")),
        ("first token p99, ms", lambda run: _first_ms(run, "p99")),
        ("E2E p50, ms", lambda run: _ms(run.overall.e2e_s, "p50")),
        ("E2E p99, ms", lambda run: _ms(run.overall.e2e_s, "p99")),
    )
    for name, figure in rows:
        streamed, whole = (median(figure(run) for run in runs if run.streamed is kind) for kind in (True, False))
        ratio = f"{streamed / whole:.2f}x" if whole else "–"
        table.add_row(name, f"{streamed:,.1f}", f"{whole:,.1f}", ratio)
    return table


def _first_ms(run: RunFigures, name: str) -> float:
    """A reply that comes whole shows its first token when it ends."""
    return _ms(run.overall.ttft_s if run.streamed else run.overall.e2e_s, name)


def _ms(values: Percentiles | None, name: str) -> float:
    return 0.0 if values is None else 1e3 * float(getattr(values, name))
