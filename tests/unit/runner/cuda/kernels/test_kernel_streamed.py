"""Streamed products: which there are, what they take of a card, and that they compile for one. What they give is checked on
a card: the interpreter does not know them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from headrace.runner.cuda.kernels.streamed_product import (
    StreamedConfig,
    can_stream,
    is_worth_streaming,
    is_worth_streaming_alone,
    streamed_config,
)
from headrace.runner.cuda.squares import LEAST_COLUMNS
from headrace.weights.shape import ModelShape

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[5]
# Of a card of compute capability 9.0, for one program.
SHARED_BYTES = 227 << 10
SMALL = ModelShape("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, 40960, 1e-6, 1e6)
LARGE = ModelShape("llama", 4096, 32, 32, 8, 128, 14336, 128256, 131072, 1e-5, 5e5)
OF_SMALL, OF_LARGE = 6144 * 1024, 28672 * 4096


@pytest.mark.parametrize(
    ("height", "width"),
    [(4096, 1024), (1024, 2048), (3072, 1024), (6144, 4096), (4096, 14336), (14336, 4096), (128256, 4096), (100, 2112)],
)
@pytest.mark.parametrize(("gated", "itemsize"), [(False, 2), (True, 2), (False, 1)])
def test_every_number_of_rows_finds_room(height: int, width: int, gated: bool, itemsize: int) -> None:
    width -= width % (128 // itemsize)
    for rows in range(2, 257):
        config = streamed_config(rows, height, width, gated=gated, itemsize=itemsize)
        lines = config.lines * (2 if gated else 1)
        # Barriers, and what a norm's factors pass through.
        assert (config.rows + lines) * config.span * itemsize * config.num_stages + 4096 <= SHARED_BYTES
        assert width % config.span == 0 and 2 <= config.num_stages <= width // config.span
        assert config.lines >= LEAST_COLUMNS and config.num_warps in (4, 8)
        programs = -(-height // config.lines) * -(-rows // config.rows)
        assert programs >= 90 or config.lines == LEAST_COLUMNS


def test_few_rows_of_a_large_matrix_read_it_once() -> None:
    assert streamed_config(128, 4096, 14336, gated=False).rows == 128
    assert streamed_config(64, 14336, 4096, gated=True) == StreamedConfig(64, 64, 128, 2)


def test_models_and_rows_that_were_not_faster_so_are_left_to_others() -> None:
    assert [rows for rows in range(1, 300) if is_worth_streaming(rows, SMALL, OF_SMALL)] == list(range(2, 257))
    of_large = [rows for rows in range(1, 300) if is_worth_streaming(rows, LARGE, OF_LARGE)]
    assert of_large == [*range(2, 65), *range(113, 129)]
    assert not is_worth_streaming(64, replace(LARGE, hidden_size=5120), OF_LARGE)
    assert not is_worth_streaming(64, replace(LARGE, intermediate_size=14340), OF_LARGE)
    assert not is_worth_streaming(64, replace(SMALL, hidden_size=576), 3072 * 576)


def test_a_matrix_alone_is_worth_it_for_few_rows() -> None:
    head = torch.empty(128256, 4096, dtype=torch.bfloat16, device="meta")
    assert [is_worth_streaming_alone(rows, head) for rows in (1, 2, 64, 65)] == [False, True, True, False]
    assert not is_worth_streaming_alone(64, head[:1024])
    assert not is_worth_streaming_alone(64, head[:, :4090])
    eights = torch.empty(28672, 4160, dtype=torch.float8_e4m3fn, device="meta")
    assert is_worth_streaming_alone(64, eights[:, :4096]) and not is_worth_streaming_alone(64, eights)


def test_no_other_card_is_asked_for_them_and_no_unknown_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.runner.cuda.kernels import early

    card = torch.device("cuda", 0)
    for capability, is_able in (((8, 0), False), ((9, 0), True), ((10, 0), False)):
        early.capability.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert can_stream(card) == is_able
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    early.capability.cache_clear()
    for version, is_known in (("3.8.1", True), ("3.60.0", False), ("4.0.0", False)):
        monkeypatch.setattr("triton.__version__", version)
        assert can_stream(card) == is_known
    early.capability.cache_clear()
    assert not can_stream(torch.device("cpu"))


def test_they_compile_ahead_and_need_no_more_than_a_card_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
    argv = [sys.executable, "-m", "tests.unit.runner.cuda.streamed_alone"]
    found = json.loads(subprocess.run(argv, stdout=subprocess.PIPE, timeout=240, check=True).stdout)
    assert found["compiled"] == [] and found["launched"] == len(found["kernels"]) == 7
    for kernel in found["kernels"]:
        assert kernel["shared"] <= SHARED_BYTES
        assert kernel["stack"] == 0
    assert len(found["loops"]) == 7
    for loop in found["loops"]:
        # No warp fetches into a tile that another one still reads.
        assert {"bar.sync", "barrier.cta.sync"} & set(loop[loop.index("wgmma.wait_group") :])
