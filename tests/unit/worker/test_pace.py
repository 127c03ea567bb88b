"""A kept profile saves the steps that measure one, while the device keeps its pace."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.core.clock import SystemClock
from headrace.core.config import CostProfile, EngineConfig
from headrace.core.plan import Work
from headrace.runner.fake import FakeRunner
from headrace.worker.pace import Pace, holds
from headrace.worker.probe import golden_probe
from headrace.worker.shelf import Shelf
from headrace.worker.timed import NotedRunner
from headrace.worker.warmup import SCENES

CONFIG = EngineConfig(slots=32, blocks=600, block_size=16, context_len=2048, vocab_size=1000, max_step_tokens=512)
SLOW = CostProfile(c0_s=0.01, c_in_s=1.5e-3, c_out_s=2e-3, c_kv_s=3e-6, c_att_s=4e-7)
CHUNK = Work(prefill_tokens=16, decode_rows=0, kv_tokens=16, attended=256)
ROW = Work(prefill_tokens=0, decode_rows=1, kv_tokens=20, attended=0)


def times(factor: float) -> CostProfile:
    return CostProfile(*(each * factor for each in SLOW.coefficients()))


def start(
    shelf: Shelf | None, device: CostProfile, config: EngineConfig = CONFIG, model: str = "m"
) -> tuple[CostProfile, int]:
    """As a worker does it: the profile, and how many steps were run to find it."""
    runner = NotedRunner(FakeRunner(config, profile=device), SystemClock())
    golden_probe(runner, config, SystemClock())
    probed = len(runner.seen)
    return Pace(shelf, model, model).profile(runner, config, SCENES, list(runner.seen)), len(runner.seen) - probed


def test_the_second_start_runs_no_steps_for_it(tmp_path: Path) -> None:
    first, steps = start(Shelf(tmp_path), SLOW)
    assert first.coefficients() == pytest.approx(SLOW.coefficients(), rel=0.01) and steps > 10
    assert start(Shelf(tmp_path), SLOW) == (first, 0)


@pytest.mark.parametrize("factor", [0.5, 2.5])
def test_a_device_with_another_pace_is_measured_anew(tmp_path: Path, factor: float) -> None:
    start(Shelf(tmp_path), SLOW)
    again, steps = start(Shelf(tmp_path), times(factor))
    assert again.coefficients() == pytest.approx(times(factor).coefficients(), rel=0.01) and steps > 10
    assert start(Shelf(tmp_path), times(factor)) == (again, 0)


@pytest.mark.parametrize("sizes", [{"slots": 8}, {"blocks": 20}, {"max_step_tokens": 64}, {"block_size": 8}])
def test_an_engine_of_another_size_is_measured_anew(tmp_path: Path, sizes: dict[str, int]) -> None:
    start(Shelf(tmp_path), SLOW)
    assert start(Shelf(tmp_path), SLOW, replace(CONFIG, **sizes))[1] > 0


def test_more_blocks_than_are_used_change_nothing(tmp_path: Path) -> None:
    start(Shelf(tmp_path), SLOW)
    assert start(Shelf(tmp_path), SLOW, replace(CONFIG, blocks=601))[1] == 0


def test_another_model_is_measured_for_itself(tmp_path: Path) -> None:
    start(Shelf(tmp_path), SLOW)
    assert start(Shelf(tmp_path), SLOW, model="n")[1] > 0
    assert start(Shelf(tmp_path), SLOW)[1] == 0


def test_without_a_shelf_every_start_measures() -> None:
    assert start(None, SLOW)[1] == start(None, SLOW)[1] > 10


def test_the_quickest_step_of_each_kind_tells() -> None:
    chunk_s, row_s = (0.01 + 16 * 1.5e-3 + 16 * 3e-6 + 256 * 4e-7, 0.01 + 2e-3 + 20 * 3e-6)
    assert holds(SLOW, [(CHUNK, chunk_s), (ROW, row_s)])
    assert holds(SLOW, [(CHUNK, 9 * chunk_s), (CHUNK, chunk_s), (ROW, row_s), (ROW, 9 * row_s)])
    assert not holds(SLOW, [(CHUNK, 2.5 * chunk_s), (ROW, row_s)])
    assert not holds(SLOW, [(CHUNK, chunk_s), (ROW, row_s), (ROW, row_s / 2)])
    assert not holds(SLOW, [])
