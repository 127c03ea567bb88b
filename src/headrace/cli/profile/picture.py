"""Draws a profile: tokens/s and inter-token time by rows, prompt speed by length, and how many sequences fit.

Owns layout and colours; every number comes from the profile, and every axis begins at zero. The only drawing library is
imported inside the functions, because the product runs without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.cli.profile.limits import memory_words
from headrace.cli.profile.sweep import predict_s
from headrace.core.errors import InvalidInput
from headrace.core.plan import Work
from headrace.core.profile import DecodePoint, Knee, ModelProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#2f6f9f", "#b5533c", "#3a8f5c", "#8a5fb0")
_GREY = "#777777"
_DPI = 130


def draw_profile(profile: ModelProfile, path: Path) -> None:
    """Write the picture; the suffix says which format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 9.6), layout="constrained", facecolor="white")
    axes = figure.subplots(2, 2)
    _draw_speed(axes[0][0], profile)
    _draw_latency(axes[0][1], profile)
    _draw_prompts(axes[1][0], profile)
    _draw_memory(axes[1][1], profile)
    for each in axes.flat:
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    title = f"{profile.model}, {profile.dtype} on {profile.machine.device}, measured {profile.measured_at}"
    figure.suptitle(title, parse_math=False, x=0.01, ha="left", fontsize=13, fontweight="bold")
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise InvalidInput(f"picture {path}: {error.strerror or error}", param="picture") from None


def _curves(profile: ModelProfile) -> list[tuple[str, Knee, list[DecodePoint]]]:
    """A colour, a knee and the points for each length of prompt."""
    return [
        (_COLOURS[index % len(_COLOURS)], knee, [p for p in profile.decode if p.prompt_tokens == knee.prompt_tokens])
        for index, knee in enumerate(profile.knees)
    ]


def _fitted_s(profile: ModelProfile, points: list[DecodePoint]) -> list[float]:
    return [predict_s(profile.cost, Work(0, point.rows, point.kv_tokens, 0)) for point in points]


def _draw_speed(axes: Axes, profile: ModelProfile) -> None:
    for colour, knee, points in _curves(profile):
        rows = [point.rows for point in points]
        name = f"behind {knee.prompt_tokens:,} prompt tokens"
        axes.plot(rows, [point.tokens_per_s for point in points], "o-", color=colour, label=name)
        fitted = [point.rows / seconds for point, seconds in zip(points, _fitted_s(profile, points), strict=True)]
        axes.plot(rows, fitted, ":", color=colour, label="  as the fitted cost model has it")
        _mark_knee(axes, knee, knee.tokens_per_s, colour)
    _frame(axes, "Throughput by batch (ring: the latency knee)", "decode rows in a step", "output tokens per second")


def _draw_latency(axes: Axes, profile: ModelProfile) -> None:
    for colour, knee, points in _curves(profile):
        rows = [point.rows for point in points]
        middle = np.array([1e3 * point.itl_p50_s for point in points])
        tail = np.array([1e3 * point.itl_p95_s for point in points])
        name = f"behind {knee.prompt_tokens:,}: median, up to p95"
        above = np.vstack([np.zeros(len(rows)), np.maximum(tail - middle, 0.0)])
        axes.plot(rows, middle, "o-", color=colour, label=name)
        axes.errorbar(rows, middle, yerr=above, fmt="none", ecolor=colour, capsize=3)
        fitted = [1e3 * seconds for seconds in _fitted_s(profile, points)]
        axes.plot(rows, fitted, ":", color=colour, label="  as the fitted cost model has it")
        _mark_knee(axes, knee, 1e3 * knee.itl_s, colour)
    _frame(
        axes, "Inter-token time by batch (ring: the latency knee)", "decode rows in a step", "milliseconds per token"
    )


def _mark_knee(axes: Axes, knee: Knee, height: float, colour: str) -> None:
    if not knee.is_last:
        axes.plot([knee.rows], [height], "o", ms=16, mfc="none", mec=colour, mew=2)
        axes.annotate(
            f"{knee.rows} rows", (knee.rows, height), xytext=(9, -15), textcoords="offset points", color=colour
        )


def _draw_prompts(axes: Axes, profile: ModelProfile) -> None:
    lengths = [point.tokens for point in profile.prompts]
    speeds = [point.tokens_per_s for point in profile.prompts]
    (line,) = axes.plot(lengths, speeds, "o-", color=_COLOURS[0], label="prompt tokens per second (left)")
    _frame(axes, "A prompt alone, by its length", "prompt tokens", "prompt tokens per second")
    beside = axes.twinx()
    seconds = [point.ttft_s for point in profile.prompts]
    (other,) = beside.plot(lengths, seconds, "s--", color=_COLOURS[1], label="seconds to the first token (right)")
    beside.set_ylabel("seconds to the first token", fontsize=9, color=_COLOURS[1])
    beside.set_ylim(0, 1.08 * max(seconds))
    beside.spines[["top"]].set_visible(False)
    axes.legend(handles=[line, other], fontsize=8.5, loc="center right", framealpha=0.9)


def _draw_memory(axes: Axes, profile: ModelProfile) -> None:
    """By KV alone the curve would go through the roof at short lengths: the slots end it."""
    memory = profile.memory
    longest = min(profile.context_len, memory.kv_tokens)
    lengths = np.unique(np.linspace(max(1, longest // 400), longest, 400).astype(int))
    held = np.array([memory.sequences(int(length)) for length in lengths])
    most = profile.slots
    axes.fill_between(
        lengths, np.minimum(held, most), step="mid", color=_COLOURS[0], alpha=0.2, label="can run at once"
    )
    axes.plot(lengths, held, drawstyle="steps-mid", color=_COLOURS[0], label="KV memory holds")
    axes.axhline(most, color=_GREY, ls="--", label=f"{most:,} slots")
    _frame(axes, memory_words(profile), "tokens that each sequence has come to", "sequences at once")
    axes.set_xlim(0, 1.02 * longest)
    axes.set_ylim(0, 2.5 * most)
    axes.legend(fontsize=8.5, framealpha=0.9)


def _frame(axes: Axes, title: str, across: str, up: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=10.5, wrap=True)
    axes.set_xlabel(across, fontsize=9)
    axes.set_ylabel(up, fontsize=9)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,g}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8.5, framealpha=0.9)
