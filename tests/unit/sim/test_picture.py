"""Spans of slots, and their picture."""

from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import InvalidInput
from headrace.core.plan import Plan, Work
from headrace.sim.picture import Caption, draw_slots, request_hues, shade
from headrace.sim.spans import SlotRecorder, Spans

pytestmark = pytest.mark.unit

_NONE = np.zeros(0, np.int32)


def plan(slots: list[int], counts: list[int]) -> Plan:
    rows = np.array(slots, np.int32)
    samples = np.ones(len(slots), np.bool_)
    return Plan(
        0, rows, rows, np.array(counts, np.int32), samples, _NONE, (), _NONE, _NONE, _NONE, Work(0, 0, 0, 0), 1.0, 1.0
    )


def record(*steps: tuple[list[int], list[int], list[int], int]) -> Spans:
    """Steps of one second each: slots, counts, who holds each slot, how many wait."""
    recorder = SlotRecorder(2)
    for second, (slots, counts, holders, waiting) in enumerate(steps):
        recorder.launched(plan(slots, counts), np.array(holders, np.int64), waiting)
        recorder.ended(second * 10**9, (second + 1) * 10**9)
    return recorder.spans()


def listed(spans: Spans) -> list[tuple[int, int, float, float, bool]]:
    rows = zip(spans.slots, spans.ordinals, spans.starts_s, spans.ends_s, spans.prefill, strict=True)
    return sorted((int(slot), int(who), float(a), float(b), bool(p)) for slot, who, a, b, p in rows)


def test_steps_of_one_request_join_and_prefill_stands_apart() -> None:
    spans = record(([0], [8], [5, 0], 0), ([0], [1], [5, 0], 0), ([0, 1], [1, 4], [5, 6], 0))
    assert listed(spans) == [(0, 5, 0.0, 1.0, True), (0, 5, 1.0, 3.0, False), (1, 6, 2.0, 3.0, True)]


def test_a_slot_held_without_a_row_counts_as_held() -> None:
    spans = record(([0], [1], [5, 0], 0), ([1], [1], [5, 7], 0), ([0], [1], [5, 7], 0))
    assert (0, 5, 0.0, 3.0, False) in listed(spans)


def test_the_next_request_ends_a_span_and_idle_time_is_left_out() -> None:
    spans = record(([0], [1], [5, 0], 2), ([1], [1], [5, 0], 0), ([0], [1], [6, 0], 0))
    assert (0, 5, 0.0, 1.0, False) in listed(spans)
    assert (0, 6, 2.0, 3.0, False) in listed(spans)
    assert (spans.waiting_at_s.tolist(), spans.waiting.tolist()) == ([0.0, 1.0], [2, 0])


def test_a_dead_workers_slots_are_empty() -> None:
    recorder = SlotRecorder(1)
    recorder.launched(plan([0], [1]), np.array([5]), 0)
    recorder.ended(0, 10)
    recorder.launched(plan([0], [1]), np.array([5]), 0)
    recorder.worker_died()
    recorder.launched(plan([0], [1]), np.array([5]), 0)
    recorder.ended(90, 100)
    assert [row[2:4] for row in listed(recorder.spans())] == [(0.0, 1e-8), (9e-8, 1e-7)]


def busy(num_slots: int, each: int) -> Spans:
    count = num_slots * each
    slots, turns = np.divmod(np.arange(count), each)
    starts = turns.astype(np.float64)
    order = np.random.default_rng(0).permutation(count)
    return Spans(slots, order, starts, starts + 1.0, order % 3 == 0, np.zeros(1), np.ones(1, np.int64), num_slots)


def test_neighbours_differ_in_hue() -> None:
    spans = busy(8, 40)
    hues = request_hues(spans)
    grid = np.array([hues[ordinal] for ordinal in spans.ordinals.tolist()]).reshape(8, 40)
    for apart in (np.diff(grid, axis=0) % 24, np.diff(grid, axis=1) % 24):
        assert np.minimum(apart, 24 - apart).min() >= 2


def test_prefill_is_lighter() -> None:
    assert sum(shade(3, 1, prefill=True)) > sum(shade(3, 1, prefill=False))


def test_a_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "slots.png"
    draw_slots(busy(4, 2000), Caption("title", "facts"), path)
    draw_slots(record(), Caption("nothing", ""), tmp_path / "empty.png")
    assert path.read_bytes().startswith(b"\x89PNG") and (tmp_path / "empty.png").stat().st_size > 1000


def test_a_picture_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(InvalidInput, match="nowhere"):
        draw_slots(busy(2, 2), Caption("", ""), tmp_path / "nowhere" / "slots.png")
    with pytest.raises(InvalidInput, match="must end in"):
        draw_slots(busy(2, 2), Caption("", ""), tmp_path / "slots.xyz")
