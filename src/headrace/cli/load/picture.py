"""Draws a load: latencies over its time, and their distributions. Owns layout and colours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.cli.load.figures import gaps
from headrace.cli.load.outcome import Outcome, State
from headrace.core.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from headrace.cli.load.drive import RunRecord
    from headrace.cli.load.measure import LoadReport

_COLOURS = ("#2f6db5", "#c8553d", "#3a8f5c", "#8a5fb0", "#b8860b", "#4a4a4a")
_MOST_DOTS = 20_000
_BINS = 60
_LEAST_S = 1e-6
_DPI = 130


def draw_load(report: LoadReport, records: list[RunRecord], tenants: list[str], path: Path) -> None:
    """TTFT and gaps over time above, their distributions below; one colour per tenant, or per way of answering."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 9), layout="constrained", facecolor="white")
    axes = figure.subplots(2, 2)
    for index, (name, record, outcomes) in enumerate(_groups(report, records, tenants)):
        colour = _COLOURS[index % len(_COLOURS)]
        starts, firsts = _firsts(outcomes, record.started_s)
        _over_time(axes[0][0], starts, firsts, name, colour)
        _over_time(axes[0][1], *_gaps(outcomes, record.started_s), name, colour)
        _distribution(axes[1][0], firsts, f"{name}, first token", colour)
        ends = np.array([one.e2e_s for one in outcomes if one.state is State.FINISHED], np.float64)
        _distribution(axes[1][0], ends, f"{name}, whole reply", colour, style=":")
        _distribution(axes[1][1], gaps(outcomes), name, colour)
    _label(axes[0][0], "time to first token, by the time a request was meant to be sent", "seconds of the load", "ms")
    _label(axes[0][1], "time between pieces of a reply", "seconds of the load", "ms")
    _label(axes[1][0], "share of requests within", "ms", "")
    _label(axes[1][1], "share of gaps within", "ms", "")
    title = f"headrace bench serve: {report.model} at {report.url}"
    figure.suptitle(title, parse_math=False, x=0.01, ha="left", fontsize=14, fontweight="bold")
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise InvalidInput(f"picture {path}: {error.strerror or error}", param="picture") from None


def _groups(
    report: LoadReport, records: list[RunRecord], tenants: list[str]
) -> Iterable[tuple[str, RunRecord, list[Outcome]]]:
    """Several runs are shown by their first pair; several tenants each by itself."""
    runs = list(zip(report.runs, records, strict=True))[:2]
    for run, record in runs:
        how = "streamed" if run.streamed else "not streamed"
        counted = [outcome for outcome in record.outcomes if outcome.counted]
        if len(tenants) == 1:
            yield how, record, counted
            continue
        for index, tenant in enumerate(tenants):
            name = tenant if len(runs) == 1 else f"{tenant}, {how}"
            yield name, record, [outcome for outcome in counted if outcome.shot.tenant == index]


def _firsts(outcomes: list[Outcome], started_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    pairs = [(o.intended_s - started_s, o.ttft_s) for o in outcomes if o.ttft_s is not None]
    both = np.array(pairs, np.float64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _gaps(outcomes: list[Outcome], started_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    ends = [np.frombuffer(outcome.pieces_s)[1:] for outcome in outcomes if len(outcome.pieces_s) > 1]
    return (np.concatenate(ends) if ends else np.zeros(0)) - started_s, gaps(outcomes)


def _over_time(axes: Axes, at_s: NDArray[np.float64], values_s: NDArray[np.float64], name: str, colour: str) -> None:
    """A dot for each, thinned where there are too many, and the median and p99 of each stretch of time."""
    if not len(at_s):
        return
    every = max(1, len(at_s) // _MOST_DOTS)
    axes.plot(at_s[::every], 1e3 * values_s[::every], ".", ms=2, alpha=0.25, color=colour, rasterized=True)
    edges = np.linspace(at_s.min(), at_s.max() + 1e-9, min(_BINS, max(2, len(at_s) // 20)) + 1)
    places = np.digitize(at_s, edges)
    for share, style in ((50, "-"), (99, "--")):
        bins = [index for index in range(1, len(edges)) if (places == index).any()]
        heights = [1e3 * np.percentile(values_s[places == index], share) for index in bins]
        middles = [(edges[index - 1] + edges[index]) / 2 for index in bins]
        axes.plot(middles, heights, style, lw=1.6, color=colour, label=f"{name} p{share}")


def _distribution(axes: Axes, values_s: NDArray[np.float64], name: str, colour: str, style: str = "-") -> None:
    if len(values_s):
        # Pieces that came in one read have no time between them, and a logarithm no place for it.
        ordered = np.sort(1e3 * np.maximum(values_s, _LEAST_S))
        shares = np.arange(1, len(ordered) + 1) / len(ordered)
        axes.plot(ordered, shares, style, drawstyle="steps-post", color=colour, lw=1.6, label=name)


def _label(axes: Axes, title: str, across: str, up: str) -> None:
    from matplotlib.ticker import LogFormatter

    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(across, fontsize=9)
    axes.set_ylabel(up, fontsize=9)
    axes.grid(alpha=0.25)
    if not up:
        axes.set_ylim(0, 1.01)
        if axes.lines:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))
        for share in (0.5, 0.99):
            axes.axhline(share, color="#999999", lw=0.7, ls=":")
    elif axes.lines:
        axes.set_ylim(bottom=0)
    names = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    if names:
        axes.legend(handles=names, fontsize=8, framealpha=0.9)
    else:
        axes.text(0.5, 0.5, "nothing to show", transform=axes.transAxes, ha="center", color="#888888")
