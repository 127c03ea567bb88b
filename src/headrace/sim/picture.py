"""Draws who held each slot of a worker and when, over a strip of how many waited.

Owns layout and colours; all it knows of the run is its spans. The only drawing library is imported
inside the functions, because the product runs without it.
"""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from headrace.core.errors import InvalidInput
from headrace.sim.spans import Spans
from headrace.sim.traces import check_target

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

_HUES = 24
_WAITING = "#b5533c"
# More spans than this are too thin to see: the picture ends earlier and says so.
_MOST_SPANS = 4_000
_DPI = 130


class Caption(Struct, frozen=True):
    """What the picture says in words."""

    title: str
    facts: str


def check_picture(path: Path) -> None:
    """Refuse what could not be written, before a long run rather than after it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise InvalidInput("a picture needs matplotlib: pip install 'headrace[draw]'", param="picture") from None
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise InvalidInput(f"picture {path}: the name must end in one of {', '.join(sorted(kinds))}", param="picture")
    try:
        check_target(path)
    except FileNotFoundError:
        raise InvalidInput(f"picture {path}: there is no folder {path.parent}", param="picture") from None
    except OSError as error:
        raise InvalidInput(f"picture {path}: {error.strerror or error}", param="picture") from None


def draw_slots(spans: Spans, caption: Caption, path: Path, *, from_s: float = 0.0, for_s: float | None = None) -> None:
    """Write the picture; the suffix says which format. A part of a run must hold something to see."""
    check_picture(path)
    until_s = _window_end(spans, from_s, for_s)
    if (from_s > 0.0 or for_s is not None) and not _in_window(spans, from_s, until_s).any():
        param = "--picture-from" if from_s > 0.0 else "--picture-for"
        raise InvalidInput(f"{param}: the picture would be empty, nothing was computed then", param=param)
    from matplotlib.figure import Figure

    height = min(14.0, max(3.2, 1.8 + 0.19 * spans.num_slots))
    figure = Figure(figsize=(14, height + 1.4), layout="constrained", facecolor="white")
    seats = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [height, 1.0], "hspace": 0.02})
    _draw_spans(seats[0], spans, from_s, until_s)
    _draw_waiting(seats[1], spans, from_s, until_s)
    # A dollar sign in a name begins no formula.
    figure.suptitle(caption.title, parse_math=False, x=0.01, ha="left", fontsize=14, fontweight="bold")
    seats[0].set_title(_facts(caption, spans, from_s, until_s), loc="left", fontsize=9.5, color="#444444")
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise InvalidInput(f"picture {path}: {error.strerror or error}", param="picture") from None


def request_hues(spans: Spans) -> dict[int, int]:
    """A hue for each request, far from those of the request before it in its slot and beside it."""
    hues: dict[int, int] = {}
    latest = [-_HUES] * spans.num_slots
    order = np.lexsort((spans.slots, spans.starts_s))
    for slot, ordinal in zip(spans.slots[order].tolist(), spans.ordinals[order].tolist(), strict=True):
        if ordinal not in hues:
            taken = latest[max(0, slot - 1) : slot + 2]
            candidates = [(ordinal * 7 + 5 * turn) % _HUES for turn in range(_HUES)]
            hues[ordinal] = max(candidates[:8], key=lambda hue: min(3, *(_distance(hue, other) for other in taken)))
        latest[slot] = hues[ordinal]
    return hues


def _distance(hue: int, other: int) -> int:
    """Steps around the wheel; a negative `other` is nobody's."""
    apart = (hue - other) % _HUES
    return _HUES if other < 0 else min(apart, _HUES - apart)


def shade(hue: int, ordinal: int, *, prefill: bool) -> tuple[float, float, float]:
    """Prefill is lighter than decode; requests of the same hue differ a little."""
    lightness = 0.42 + 0.14 * (ordinal % 3) / 2
    if prefill:
        lightness = 1.0 - (1.0 - lightness) * 0.38
    return colorsys.hls_to_rgb(hue / _HUES, lightness, 0.55)


def _window_end(spans: Spans, from_s: float, for_s: float | None) -> float:
    """As far as asked, or as far as spans can be told apart."""
    last_s = float(spans.ends_s.max()) if len(spans.ends_s) else from_s + 1.0
    if for_s is not None:
        return min(last_s, from_s + for_s) if last_s > from_s else from_s + for_s
    later = np.sort(spans.starts_s[spans.ends_s > from_s])
    return last_s if len(later) <= _MOST_SPANS else float(later[_MOST_SPANS])


def _in_window(spans: Spans, from_s: float, until_s: float) -> NDArray[np.bool_]:
    return (spans.ends_s > from_s) & (spans.starts_s < until_s)


def _facts(caption: Caption, spans: Spans, from_s: float, until_s: float) -> str:
    last_s = float(spans.ends_s.max()) if len(spans.ends_s) else until_s
    if from_s <= 0.0 and until_s >= last_s:
        return caption.facts
    return f"{caption.facts} · shown: {from_s:g} to {until_s:.3g} of {last_s:.3g} s"


def _draw_spans(axes: Axes, spans: Spans, from_s: float, until_s: float) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    seen = np.flatnonzero(_in_window(spans, from_s, until_s))
    hues = request_hues(spans)
    colours = [
        shade(hues[ordinal], ordinal, prefill=prefill)
        for ordinal, prefill in zip(spans.ordinals[seen].tolist(), spans.prefill[seen].tolist(), strict=True)
    ]
    # White edges part neighbours; between very many they would be all there is to see.
    edges = np.where(spans.prefill[seen] | (len(seen) > 1500), 0.0, 0.5)
    boxes = _boxes(spans.slots[seen], spans.starts_s[seen], spans.ends_s[seen])
    axes.add_collection(PolyCollection(list(boxes), facecolors=colours, edgecolors="white", linewidths=edges))
    axes.set_xlim(from_s, until_s)
    axes.set_ylim(spans.num_slots - 0.4, -0.6)
    axes.set_ylabel("slot")
    axes.set_facecolor("#f1f1f1")
    axes.spines[["top", "right"]].set_visible(False)
    key = [
        Patch(facecolor=shade(0, 0, prefill=True), label="prefill (lighter)"),
        Patch(facecolor=shade(0, 0, prefill=False), label="decode"),
        Patch(facecolor="#f1f1f1", edgecolor="#999999", label="idle"),
    ]
    axes.legend(handles=key, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, fontsize=9, frameon=False)


def _boxes(slots: NDArray[np.int64], lefts: NDArray[np.float64], rights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Corners of one rectangle per span: [spans, 4, 2]."""
    corners = np.empty((len(slots), 4, 2))
    corners[:, :2, 0] = lefts[:, None]
    corners[:, 2:, 0] = rights[:, None]
    corners[:, [0, 3], 1] = slots[:, None] - 0.45
    corners[:, [1, 2], 1] = slots[:, None] + 0.45
    return corners


def _draw_waiting(axes: Axes, spans: Spans, from_s: float, until_s: float) -> None:
    from matplotlib.ticker import MaxNLocator

    times_s = np.append(spans.waiting_at_s, max(until_s, spans.waiting_at_s[-1] if len(spans.waiting_at_s) else 0.0))
    waiting = np.append(spans.waiting, spans.waiting[-1] if len(spans.waiting) else 0)
    axes.fill_between(times_s, waiting, step="post", color=_WAITING, alpha=0.75, linewidth=0)
    axes.set_xlim(from_s, until_s)
    shown = waiting[(times_s >= from_s) & (times_s <= until_s)]
    axes.set_ylim(0, max(1.0, 1.1 * float(shown.max() if len(shown) else 1)))
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set_ylabel("waiting")
    axes.set_xlabel("virtual time (s)")
    axes.spines[["top", "right"]].set_visible(False)
