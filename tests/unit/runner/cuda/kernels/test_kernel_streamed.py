"""Streamed products and attention: which there are, what they take of a card, and that they compile for one. What they give
is checked on a card: the interpreter does not know them."""

import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from headrace.runner.cuda import triton_ops
from headrace.runner.cuda.exact_ops import ExactOps
from headrace.runner.cuda.kernels import streamed_decode as streamed_decode_module
from headrace.runner.cuda.kernels.decode_attention import last_config
from headrace.runner.cuda.kernels.fresh_attention import fresh_rows
from headrace.runner.cuda.kernels.streamed_attention import TileQueue, streamed_rows
from headrace.runner.cuda.kernels.streamed_decode import (
    StretchScratch,
    can_stream_decode,
    is_streamed_memory,
    is_worth_streaming_decode,
)
from headrace.runner.cuda.kernels.streamed_product import (
    StreamedConfig,
    can_stream,
    is_worth_streaming,
    is_worth_streaming_alone,
    streamed_config,
)
from headrace.runner.cuda.squares import LEAST_COLUMNS, Squares
from headrace.runner.cuda.triton_ops import TritonOps
from headrace.weights.shape import ModelShape

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[5]
# Of a card of compute capability 9.0, for one program.
SHARED_BYTES = 227 << 10
SMALL, LARGE = (1024, 2048, 3072), (4096, 4096, 14336)
OF_SMALL, OF_LARGE = 6144 * 1024, 28672 * 4096


@pytest.mark.parametrize(
    ("height", "width"),
    [
        (4096, 1024),
        (1024, 2048),
        (3072, 1024),
        (6144, 4096),
        (4096, 14336),
        (14336, 4096),
        (2560, 9728),
        (128256, 4096),
        (100, 2112),
    ],
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
        assert programs >= 90 or config.lines == (LEAST_COLUMNS if height <= 2048 else 32)
        # What is left of squares by products that raise the hidden states.
        assert height > 4096 or -(-height // config.lines) <= 128


def test_few_rows_of_a_large_matrix_read_it_once() -> None:
    assert streamed_config(128, 4096, 14336, gated=False).rows == 128
    assert streamed_config(64, 14336, 4096, gated=True) == StreamedConfig(64, 64, 128, 2)


def test_models_and_rows_that_were_not_faster_so_are_left_to_others() -> None:
    assert [rows for rows in range(1, 300) if is_worth_streaming(rows, SMALL, OF_SMALL)] == list(range(2, 257))
    of_large = [rows for rows in range(1, 300) if is_worth_streaming(rows, LARGE, OF_LARGE)]
    assert of_large == [*range(2, 65), *range(113, 129)]
    for widths in ((5120, 5120, 14336), (4096, 4096, 14340), (4096, 4100, 14336), (576, 576, 1536)):
        assert not is_worth_streaming(64, widths, OF_LARGE) and not is_worth_streaming(64, widths, OF_SMALL)


def test_a_matrix_alone_is_worth_it_for_few_rows() -> None:
    head = torch.empty(128256, 4096, dtype=torch.bfloat16, device="meta")
    assert [is_worth_streaming_alone(rows, head) for rows in (1, 2, 64, 65)] == [False, True, True, False]
    assert not is_worth_streaming_alone(64, head[:1024])
    assert not is_worth_streaming_alone(64, head.float())
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


class _Streamed:
    """In the kernel's place: notes what it is called with."""

    def __init__(self, ops: TritonOps, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[StreamedConfig, dict[str, Any]]] = []
        monkeypatch.setattr(ops, "_may_stream", True)
        monkeypatch.setattr(triton_ops, "streamed_product", self)

    def __call__(self, rows: Tensor, weight: Tensor, out: Tensor, config: StreamedConfig, **given: Any) -> None:
        assert weight.shape == (len(weight), rows.shape[1]) and out.shape[0] == len(rows)
        self.calls.append((config, {name: value for name, value in given.items() if value is not None}))

    @property
    def given(self) -> dict[str, Any]:
        return self.calls.pop()[1]


def test_operations_hand_on_all_that_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape("qwen3", 1024, 1, 8, 8, 128, 3072, 1000, 4096, 1e-6, 1e6)
    ops = TritonOps(shape, 4, torch.device("cpu"))
    assert not ops.fuses(200)
    streamed = _Streamed(ops, monkeypatch)
    assert ops.fuses(200)

    def zeros(*dims: int) -> Tensor:
        return torch.zeros(dims, dtype=torch.bfloat16)

    rows, hidden, inner = zeros(200, 1024), zeros(1024, 1024), zeros(200, 3072)
    squares, bias, norm = Squares.make(1024, 200, torch.device("cpu")), zeros(1024), zeros(1024)
    ops.normed_product(rows, squares, hidden, bias, 1e-5, zeros(200, 1024))
    assert streamed.given == {"squares": squares, "eps": 1e-5, "bias": bias, "gated": False}
    ops.gated_product(rows, squares, zeros(6144, 1024), 1e-5, inner)
    assert streamed.calls[-1][0] == streamed_config(200, 3072, 1024, gated=True)
    assert streamed.given == {"squares": squares, "eps": 1e-5, "gated": True}
    scaled = zeros(200, 1024)
    ops.added_product(inner, zeros(1024, 3072), bias, rows, norm, scaled, squares)
    assert streamed.given == {"bias": bias, "norm": norm, "scaled": scaled, "left": squares, "gated": False}
    head, few = zeros(16384, 1024), rows[:9]
    ops.product(few, head, None, zeros(9, 16384))
    assert streamed.calls[-1][0] == streamed_config(9, 16384, 1024, gated=False)
    assert streamed.given == {}
    scale, eights = torch.ones(1), few.to(torch.float8_e4m3fn)
    ops.scaled_product(eights, head.to(torch.float8_e4m3fn), torch.ones(1), scale, zeros(9, 16384))
    assert streamed.calls[-1][0] == streamed_config(9, 16384, 1024, gated=False, itemsize=1)
    assert streamed.given == {"scale": scale}


def test_a_bias_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = TritonOps(ModelShape("qwen3", 1024, 1, 8, 8, 128, 3072, 1000, 4096, 1e-6, 1e6), 4, torch.device("cpu"))
    streamed = _Streamed(ops, monkeypatch)
    weight, bias, out = torch.zeros(16384, 1024), torch.ones(16384), torch.zeros(2, 16384)
    ops.product(torch.zeros(2, 1024), weight, bias, out)
    assert not streamed.calls and out.eq(1.0).all()


def test_they_compile_ahead_and_need_no_more_than_a_card_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
    argv = [sys.executable, "-m", "tests.unit.runner.cuda.streamed_alone"]
    found = json.loads(subprocess.run(argv, stdout=subprocess.PIPE, timeout=240, check=True).stdout)
    assert found["compiled"] == [] and found["launched"] == len(found["kernels"]) == 13
    for kernel in found["kernels"]:
        assert kernel["shared"] <= SHARED_BYTES
        assert kernel["stack"] == 0
    assert len(found["loops"]) == 7
    for loop in found["loops"]:
        # No warp fetches into a tile that another one still reads.
        assert {"bar.sync", "barrier.cta.sync"} & set(loop[loop.index("wgmma.wait_group") :])
    assert len(found["releases"]) == 2
    for order in found["releases"]:
        # A group of warps lets a tile go when all of them have read it, and asks for scores before it multiplies values.
        ends = [at for at, word in enumerate(order) if word.startswith("mbarrier.arrive")]
        assert all(order[at - 1].startswith("bar") for at in ends)
        assert sum(order[at - 2].startswith("wgmma") for at in ends) == 8
        assert sum(word.startswith("wgmma") and word.endswith("1") for word in order) == 2
        # Two groups let go what one thread fetched; nothing is read before the launch before has ended; and what a group
        # clears is seen by the tensor cores.
        counts = [word.removeprefix("mbarrier.init ") for word in order if word.startswith("mbarrier.init")]
        assert counts == 3 * ["1", "1", "2", "2"]
        assert order.count("griddepcontrol.wait") == 1 and order.count("fence.proxy.async") == 3
    assert len(found["looks"]) == 4
    # Each waits for the launch before: to look, to draw, and to put the tickets back; and to fetch, where that one has
    # written cells.
    assert sorted(order.count("griddepcontrol.wait") for order in found["looks"]) == [3, 3, 4, 4]
    for order in found["looks"]:
        # Of those who look, all have read a tile, or a note, before one lets it go; so has the warp that fetches written one.
        ends = [at for at, word in enumerate(order) if word.startswith("mbarrier.arrive")]
        assert len(ends) == 4 and all(order[at - 1].startswith("bar") for at in ends)
        assert sum(order[at - 2].startswith("wgmma") for at in ends) == 1
        # Queries, a row's own token or zeros, and weights are seen by the tensor cores, and barriers by all.
        assert order.count("fence.proxy.async") == 4
        counts = [word.removeprefix("mbarrier.init ") for word in order if word.startswith("mbarrier.init")]
        assert counts == 10 * ["1"]
        # The fetching warp draws, and counts those that leave, behind a wait; stretches are counted by those who have waited.
        alone = [word for word in order if not word.startswith("bar")]
        drawn = [at for at, word in enumerate(alone) if word.startswith("atom")]
        assert [alone[at].rpartition(".")[2] for at in drawn] == ["acq_rel", "relaxed", "acq_rel"]
        assert [alone[at - 1] for at in drawn[1:]] == 2 * ["griddepcontrol.wait"]
        # Where it waits to fetch, that is before its loop, of which the draw is the end.
        is_turned = order.count("griddepcontrol.wait") == 4
        assert (alone[drawn[1] - 2] == "griddepcontrol.wait") == is_turned
        assert alone.index("griddepcontrol.wait") < drawn[0]
        # Two programs of eight warps share a multiprocessor's registers.
        assert [int(word.split()[1]) * 2 * 8 * 32 for word in order if word.startswith(".maxnreg")] == [65536]
    # And its shared memory, of which each takes 1 KiB more.
    looks = [kernel["shared"] for kernel in found["kernels"] if kernel["name"] == "_look_streamed"]
    assert len(looks) == 4 and all(2 * (size + 1024) <= 228 << 10 for size in looks)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "tokens"),
    [
        (16, 8, 128, 64),
        (32, 8, 128, 32),
        (8, 8, 128, 128),
        (64, 1, 128, 2),
        (9, 3, 128, 0),
        (28, 4, 128, 0),
        (16, 8, 64, 0),
    ],
)
def test_heads_whose_groups_divide_a_tile_have_streamed_attention(
    heads: int, kv_heads: int, dim: int, tokens: int
) -> None:
    assert streamed_rows(heads, kv_heads, dim) == tokens


def test_attention_is_streamed_where_products_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """And tiles are then as long as its own."""
    host = torch.device("cpu")
    shape = ModelShape("qwen3", 1024, 1, 16, 8, 128, 3072, 1000, 4096, 1e-6, 1e6)
    assert TritonOps(shape, 4, host).fresh_rows == fresh_rows(16, 8, 128, host) == 32
    monkeypatch.setattr(triton_ops, "can_stream", lambda device: True)
    ops = TritonOps(shape, 4, host)
    assert ops.fresh_rows == 64 and ExactOps(shape, 4, host).fresh_rows == 0
    assert TritonOps(replace(shape, num_heads=24), 4, host).fresh_rows == fresh_rows(24, 8, 128, host)
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(triton_ops, "streamed_attention", lambda *given: calls.append(given))
    out, asked, qkv, offsets, tiles = (torch.full((1,), float(i)) for i in range(5))
    for _ in range(2):
        ops.fresh_attention(out, asked, qkv, offsets, tiles, 0.5)
    (*handed, first), (*_, second) = calls
    assert [float(each) for each in handed] == [0.0, 1.0, 2.0, 3.0, 4.0, 0.5]
    assert first is second and first.programs == 132 and not first.tickets.any()
    assert ops.scratch(256, 8192, last=True).config == last_config(8192) != ops.scratch(256, 8192).config


def test_heads_that_cannot_be_streamed_go_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "can_stream", lambda device: True)
    ways: list[str] = []
    for name in ("fresh_attention", "streamed_attention"):
        monkeypatch.setattr(triton_ops, name, lambda *given, name=name: ways.append(name))
    for heads in (24, 16):
        shape = ModelShape("qwen3", 1024, 1, heads, 8, 128, 3072, 1000, 4096, 1e-6, 1e6)
        rows = torch.zeros(1)
        TritonOps(shape, 4, torch.device("cpu")).fresh_attention(rows, rows, rows, rows, rows, 0.5)
    assert ways == ["fresh_attention", "streamed_attention"]


def test_single_tokens_are_streamed_where_that_was_faster() -> None:
    assert [can_stream_decode(heads, 8, 128) for heads in (8, 16, 128, 136)] == [True, True, True, False]
    assert not can_stream_decode(16, 8, 64)
    assert [rows for rows in range(1, 300) if is_worth_streaming_decode(rows, 8)] == list(range(8, 257))
    assert [is_worth_streaming_decode(rows, 2) for rows in (31, 32, 256, 257)] == [False, True, True, False]
    cells = torch.zeros(2, 8, 16, 128, dtype=torch.bfloat16)
    assert is_streamed_memory(cells) and not is_streamed_memory(cells.float())
    assert not is_streamed_memory(cells.view(1, 8, 32, 128))


@pytest.mark.parametrize(("heads", "kv_heads", "few"), [(16, 8, 8), (64, 8, 8), (72, 8, 16), (16, 1, 16)])
def test_the_kernel_is_told_what_it_asks_for(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, few: int
) -> None:
    launches: list[tuple[tuple[int], tuple[Any, ...], dict[str, Any]]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *given, **known: launches.append((grid, given, known))

    monkeypatch.setattr(streamed_decode_module, "_look_streamed", Kernel())
    scratch = StretchScratch.make(heads, kv_heads, 128, TileQueue.make(10, "cpu"))
    out = torch.zeros(40, heads, 128, dtype=torch.bfloat16)
    qkv = torch.zeros(40, (heads + 2 * kv_heads) * 128, dtype=torch.bfloat16)
    cells, words = torch.zeros(3, kv_heads, 16, 128, dtype=torch.bfloat16), torch.zeros(40, 9, dtype=torch.int32)
    norms, factors = torch.zeros(128), torch.zeros(40)
    context = (cells, cells, words, words[:, 0], words[:, 1], 0.5)
    for norm, given_factors in ((norms, None), (None, factors)):
        streamed_decode_module.streamed_decode(
            out, qkv, norms, norms, norm, norm, 1e-6, *context, scratch, row_factors=given_factors
        )
        grid, given, known = launches.pop()
        assert grid == (20,) and given[14] == pytest.approx(0.5 * 1.4426950408889634)
        assert given[9].shape == [3 * kv_heads * 16, 128] and given[9].block_shape == [16, 128]
        assert given[15:19] == (scratch.sums, scratch.stats, scratch.marks, scratch.queue.tickets)
        assert given[20:] == (qkv.stride(0), heads * 128, 9, 40)
        assert (known["normed"], known["scaled"]) == (norm is not None, given_factors is not None)
        assert not known["turned"]
        assert (known["few"], known["group"], known["kv_heads"]) == (few, heads // kv_heads, kv_heads)
    with pytest.raises(AssertionError):
        streamed_decode_module.streamed_decode(
            out.expand(8, 40, heads, 128).flatten(0, 1)[:257], qkv, norms, norms, norms, norms, 1e-6, *context, scratch
        )
    # A row of queries lies among others.
    queries = torch.zeros(40, 2 * heads, 128, dtype=torch.bfloat16)[:, :heads]
    streamed_decode_module.streamed_decode_turned(out, queries, *context, scratch)
    grid, given, known = launches.pop()
    assert grid == (20,) and given[1].data_ptr() == queries.data_ptr() and given[20] == 2 * heads * 128
    assert (known["turned"], known["normed"], known["scaled"]) == (True, False, False)


class _Looks:
    """In the place of all kernels of single tokens: which was asked, and what for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []
        for name in ("streamed_decode", "turned_attention", "streamed_decode_turned", "decode_attention"):
            monkeypatch.setattr(triton_ops, name, partial(self._note, name))

    def _note(self, name: str, *given: Any, row_factors: Tensor | None = None) -> None:
        self.calls.append((name, given, row_factors))


def test_single_tokens_go_the_way_that_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape("qwen3", 1024, 1, 16, 8, 128, 3072, 1000, 4096, 1e-6, 1e6, qk_norm=True)
    host = torch.device("cpu")
    plain = TritonOps(shape, 4, host)
    assert [plain.turns(rows) for rows in (7, 131, 132, 256)] == [True, True, False, False]
    monkeypatch.setattr(triton_ops, "can_stream", lambda device: True)
    ops, looks = TritonOps(shape, 4, host), _Looks(monkeypatch)
    assert [ops.turns(rows) for rows in (7, 131, 132, 256, 257)] == [True, True, True, True, False]
    assert not ExactOps(shape, 4, host).turns(64)
    narrow = TritonOps(replace(shape, head_dim=64), 4, host)
    cells, scratch = torch.zeros(3, 8, 16, 128, dtype=torch.bfloat16), plain.scratch(4, 100)
    names = []
    for asked, rows, keys in (
        (plain, 64, cells),
        (ops, 64, cells),
        (ops, 7, cells),
        (ops, 64, cells.view(-1, 8, 8, 128)),
        (narrow, 64, cells),
    ):
        out, factors = torch.zeros(rows, 16, 128), torch.ones(rows)
        others = [torch.full((1,), float(each)) for each in range(9)]
        qkv, cos, sin, q_norm, k_norm, values, tables, slots, lengths = others
        context = (keys, values, tables, slots, lengths, 0.5)
        asked.turned_attention(out, qkv, cos, sin, q_norm, k_norm, 1e-6, *context, scratch, row_factors=factors)
        name, given, with_factors = looks.calls.pop()
        names.append(name)
        assert given[:-1] == (out, qkv, cos, sin, q_norm, k_norm, 1e-6, *context) and with_factors is factors
        assert isinstance(given[-1], StretchScratch) == (name == "streamed_decode")
        assert given[-1] is scratch or name == "streamed_decode"
        asked.decode_attention(out, qkv, *context, scratch)
        turned, given, _ = looks.calls.pop()
        assert turned == {"streamed_decode": "streamed_decode_turned"}.get(name, "decode_attention")
        assert given[:-1] == (out, qkv, *context)
        assert given[-1] is (scratch if turned == "decode_attention" else ops._stretches)
    assert names == ["turned_attention", "streamed_decode", *3 * ["turned_attention"]]


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (32, 8), (16, 1), (32, 32)])
def test_there_is_room_for_every_stretch_that_rows_can_have(heads: int, kv_heads: int) -> None:
    """As programs share out the positions of all rows."""
    scratch = StretchScratch.make(heads, kv_heads, 128, TileQueue.make(132, "cpu"))
    room = len(scratch.marks) // kv_heads
    assert len(scratch.stats) == 2 * room * heads and len(scratch.sums) == 128 * room * heads
    assert not scratch.marks.any() and not scratch.queue.tickets.any()
    chance = random.Random(5)
    for longest in (1, 600, 2000, 131072):
        for _ in range(200):
            lengths = [chance.randint(1, longest) for _ in range(chance.choice((1, 9, 200, 256)))]
            share = -(-sum(lengths) * kv_heads // 264)
            stretch = -(-max(share, 512) // 64) * 64
            assert sum(-(-length // stretch) for length in lengths) <= room
