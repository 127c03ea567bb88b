"""Draws what `headrace bench batching` found: who held each slot and when, and the figures beside it.

Owns colours and layout only; every number comes from the report. The only drawing library is imported
inside the functions, because the product runs without it.
"""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.core.errors import InvalidInput
from headrace.sim.batching import Policy, PolicyRun
from headrace.sim.batching_report import SHORT_TOKENS, Batching, BatchingReport, Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POLICY_COLOURS = {Policy.STATIC: "#b5533c", Policy.DYNAMIC: "#d9a441", Policy.CONTINUOUS: "#2f6f9f"}
_HELD = "#dedede"
_HUES = 24
_DPI = 130


def draw_batching(batching: Batching, path: Path) -> None:
    """Write the picture as a PNG (or what the suffix says)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidInput("a picture needs matplotlib: pip install 'headrace[draw]'", param="picture") from None
    report = batching.report
    figure = Figure(figsize=(15, 14.5), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(4, 4, height_ratios=[1, 1, 1, 1.05])
    seats: list[Axes] = []
    for row, policy in enumerate(Policy):
        axes = figure.add_subplot(grid[row, :], sharex=seats[0] if seats else None)
        _draw_slots(axes, batching.saturated, policy)
        seats.append(axes)
    _frame_slots(seats, batching.saturated)
    _draw_throughput(figure.add_subplot(grid[3, 0]), report)
    _draw_tails(figure.add_subplot(grid[3, 1]), report)
    _draw_kv(figure.add_subplot(grid[3, 2]), batching.kv_bound)
    _draw_straggler(figure.add_subplot(grid[3, 3]), report)
    figure.suptitle(_title(report), fontsize=15, fontweight="bold")
    try:
        figure.savefig(path, dpi=_DPI)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"picture {path}: {error}", param="picture") from None


def _title(report: BatchingReport) -> str:
    shortest, longest = report.output.least, report.output.greatest
    return (
        f"The same {report.requests:,} requests ({shortest}–{longest} output tokens) on {report.machine.slots} slots: "
        f"continuous batching is {report.saturated.ratio_to_static(Policy.CONTINUOUS):.1f}x static"
    )


def _draw_slots(axes: Axes, comparison: Comparison, policy: Policy) -> None:
    """A row per slot; a request's colour while it computes, grey while its batch keeps the slot from others."""
    from matplotlib.collections import PolyCollection

    run, figures = comparison.runs[policy], comparison.load.policies[policy]
    spans = run.spans
    wanted = PolyCollection(_boxes(spans.slots, spans.starts_s, spans.wanted_s), linewidths=0)
    wanted.set_facecolor([request_colour(request) for request in spans.requests.tolist()])
    axes.add_collection(wanted)
    kept = spans.ends_s > spans.wanted_s
    if policy is not Policy.CONTINUOUS and kept.any():
        boxes = _boxes(spans.slots[kept], spans.wanted_s[kept], spans.ends_s[kept])
        axes.add_collection(PolyCollection(boxes, facecolor=_HELD, edgecolor="white", hatch="////", linewidths=0))
    axes.axvline(figures.makespan_s + run.trace.arrivals_s[0], color="black", linewidth=0.8, linestyle=":")
    axes.set_title(
        f"{policy.capitalize()}: {figures.output_tokens_per_s:,.0f} tokens/s, done after {figures.makespan_s:.1f} s, "
        f"slots at work {_percent(figures.occupancy_while_waiting)} of the time while requests wait{_remark(comparison, policy)}",
        loc="left",
        fontsize=11,
        color=_POLICY_COLOURS[policy],
        fontweight="bold",
    )


def _remark(comparison: Comparison, policy: Policy) -> str:
    """Why two panels may look the same."""
    figures = comparison.load.policies
    same = policy is Policy.DYNAMIC and figures[policy] == figures[Policy.STATIC]
    return " (a backlog fills each batch at once: the same as static)" if same else ""


def _boxes(slots: Any, lefts: Any, rights: Any) -> Any:
    """Corners of one rectangle per span, shape [spans, 4, 2]."""
    low, high = slots - 0.46, slots + 0.46
    return np.stack(
        [np.column_stack(corner) for corner in ((lefts, low), (lefts, high), (rights, high), (rights, low))], axis=1
    )


def request_colour(request: int) -> tuple[float, float, float]:
    """Neighbours in number are far apart in hue; grey is never used."""
    turn = (request * 7) % _HUES / _HUES
    return colorsys.hls_to_rgb(turn, 0.48 + 0.16 * (request % 3) / 2, 0.5)


def _frame_slots(seats: list[Axes], comparison: Comparison) -> None:
    from matplotlib.patches import Patch

    ends_s = [run.returned_s.max() for run in comparison.runs.values()]
    for axes in seats:
        axes.set_xlim(0, float(max(ends_s)) * 1.01)
        axes.set_ylim(_num_slots(comparison) - 0.4, -0.6)
        axes.set_ylabel("slot")
        axes.spines[["top", "right"]].set_visible(False)
    seats[-1].set_xlabel("virtual time (s), the same axis for all three")
    key = [
        Patch(facecolor=request_colour(index), label=label)
        for index, label in ((0, "a request at work"), (1, "another (colours repeat)"))
    ]
    key.append(
        Patch(facecolor=_HELD, edgecolor="white", hatch="////", label="finished, slot held until its batch ends")
    )
    key.append(Patch(facecolor="white", edgecolor="#888888", label="idle"))
    seats[-1].legend(handles=key, loc="center right", fontsize=10, frameon=True)


def _num_slots(comparison: Comparison) -> int:
    return comparison.runs[Policy.STATIC].machine.slots


def _draw_throughput(axes: Axes, report: BatchingReport) -> None:
    speeds = [report.saturated.policies[policy].output_tokens_per_s for policy in Policy]
    bars = axes.bar(list(Policy), speeds, color=[_POLICY_COLOURS[policy] for policy in Policy])
    labels = [
        f"{speed:,.0f}\n{report.saturated.ratio_to_static(policy):.1f}x"
        for policy, speed in zip(Policy, speeds, strict=True)
    ]
    axes.bar_label(bars, labels)
    _frame_panel(
        axes,
        f"Output: {report.saturated.ratio_to_static(Policy.CONTINUOUS):.1f}x the tokens of static",
        "output tokens/s",
    )
    axes.set_ylim(0, max(speeds) * 1.22)


def _draw_tails(axes: Axes, report: BatchingReport) -> None:
    """Grouped by load; the axis is logarithmic because the answers are orders of magnitude apart."""
    if report.saturated.policies[Policy.STATIC].short_p99_s is None:
        axes.set_axis_off()
        axes.text(0.5, 0.5, f"no reply of at most {SHORT_TOKENS} tokens", ha="center")
        return
    loads = ((report.saturated, "backlog"), (report.steady, f"steady\n{report.steady.rate or 0:.1f} req/s"))
    tails: list[float] = []
    for offset, policy in enumerate(Policy):
        values = [load.policies[policy].short_p99_s or np.nan for load, _ in loads]
        bars = axes.bar(np.arange(2) + 0.27 * (offset - 1), values, 0.25, color=_POLICY_COLOURS[policy], label=policy)
        axes.bar_label(bars, [_seconds(value) for value in values], fontsize=8)
        tails += values
    axes.set_xticks([0, 1], [label for _, label in loads])
    axes.set_yscale("log")
    axes.set_ylim(np.nanmin(tails) / 2, np.nanmax(tails) * 8)
    axes.legend(fontsize=8, loc="upper center", ncols=3, columnspacing=0.8, handlelength=1.0)
    steady = report.steady.policies
    shrink = (steady[Policy.STATIC].short_p99_s or np.nan) / (steady[Policy.CONTINUOUS].short_p99_s or np.nan)
    _frame_panel(
        axes,
        f"Short replies: p99 {shrink:.0f}x sooner at steady load",
        f"p99 of replies <= {SHORT_TOKENS} tokens (s, log)",
    )


def _draw_kv(axes: Axes, comparison: Comparison) -> None:
    for policy in Policy:
        run, figures = comparison.runs[policy], comparison.load.policies[policy]
        times_s, shares = _smooth_kv(run)
        label = f"{policy}: {_percent(figures.kv_use_while_waiting)}"
        colour, dashes = _POLICY_COLOURS[policy], "--" if policy is Policy.DYNAMIC else "-"
        axes.plot(times_s, 100 * shares, dashes, color=colour, linewidth=1.3, label=label)
    axes.set_ylim(0, 104)
    axes.set_xlabel("virtual time (s)")
    axes.legend(fontsize=8, loc="center right", title="mean while requests wait", title_fontsize=8)
    used = _percent(comparison.load.policies[Policy.CONTINUOUS].kv_use_while_waiting)
    _frame_panel(axes, f"Scarce KV ({comparison.load.blocks} blocks): {used} in use", "KV blocks in use (%)")


def _smooth_kv(run: PolicyRun, buckets: int = 160) -> tuple[Any, Any]:
    """Mean share of used blocks in equal spans of time."""
    edges = np.linspace(run.steps.starts_s[0], run.steps.ends_s[-1], buckets + 1)
    block_s = np.concatenate(([0.0], np.cumsum(run.steps.kv_blocks * (run.steps.ends_s - run.steps.starts_s))))
    at = np.interp(edges, np.concatenate((run.steps.starts_s[:1], run.steps.ends_s)), block_s)
    return (edges[1:] + edges[:-1]) / 2, np.diff(at) / np.diff(edges) / run.machine.blocks


def _draw_straggler(axes: Axes, report: BatchingReport) -> None:
    longs = [straggler.long_output for straggler in report.straggler]
    styles = {Policy.STATIC: "-o", Policy.DYNAMIC: "--s", Policy.CONTINUOUS: "-o"}
    for policy in Policy:
        tails = [straggler.short_p99_s[policy] for straggler in report.straggler]
        axes.plot(longs, tails, styles[policy], color=_POLICY_COLOURS[policy], label=policy, markersize=4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("output tokens of the one long request")
    axes.legend(fontsize=8, loc="upper left")
    tails = [straggler.short_p99_s[Policy.CONTINUOUS] for straggler in report.straggler]
    _frame_panel(
        axes,
        f"Straggler: short p99 stays {_seconds(max(tails))}",
        f"p99 of {report.machine.slots - 1} five-token replies (s, log)",
    )


def _frame_panel(axes: Axes, title: str, ylabel: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _seconds(value: float) -> str:
    if np.isnan(value):
        return ""
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"
