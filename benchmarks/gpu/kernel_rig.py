"""Paged sequences on a card, and the time of what can be captured in a graph."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.runner.cuda.packet import list_tiles

BANDWIDTH = 4.2e12
FLOPS = 790e12
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Pages:
    """`layers` of keys and values [layers, blocks, kv heads, block size, dim]. Free blocks and the places behind a
    sequence's end hold NaN; a table goes on with numbers of no block."""

    keys: Tensor
    values: Tensor
    tables: Tensor
    lengths: Tensor

    @classmethod
    def make(cls, lengths: list[int], kv_heads: int, dim: int, *, layers: int = 1) -> "Pages":
        needed = [-(-length // BLOCK_SIZE) for length in lengths]
        blocks = sum(needed) + 8
        shape = (layers, blocks, kv_heads, BLOCK_SIZE, dim)
        keys = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        order = torch.randperm(blocks)
        tables = torch.full((len(lengths), max(needed) + 3), -(2**30), dtype=torch.int32)
        at = 0
        for slot, count in enumerate(needed):
            tables[slot, :count] = order[at : at + count]
            at += count
            spare = lengths[slot] % BLOCK_SIZE
            if spare:
                for cells in (keys, values):
                    cells[:, order[at - 1], :, spare:] = torch.nan
        for cells in (keys, values):
            cells[:, order[at:]] = torch.nan
        return cls(keys, values, tables.cuda(), torch.tensor(lengths, dtype=torch.int32).cuda())


def tiles_of(counts: list[int], prior: list[int], tokens: int, spread: int = 0) -> Tensor:
    """As a step lists them, and one that is padding."""
    listed = list_tiles(np.array(counts), np.array(prior), tokens, spread)
    return torch.tensor([*listed.tolist(), (-1, -1, -1, -1)], dtype=torch.int32, device="cuda")


def offsets_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device="cuda")


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, torch.nan, device="cuda", dtype=dtype)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def worst_row_error(got: Tensor, want: Tensor) -> float:
    """Each row by itself: what one of many says may be small beside the others'. NaN where any is."""
    off, size = ((each.double().flatten(1).norm(dim=1)) for each in (got.double() - want.double(), want))
    return float((off / size.clamp(min=1e-30)).max())


def seconds(launches: list[Callable[[], None]], *, budget_s: float = 0.03) -> float:
    """Per launch, by replays of one graph that holds all of them, several times over if they are few."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    repeats = max(1, 24 // len(launches))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for launch in launches:
                launch()
    count = repeats * len(launches)
    times = []
    spent = 0.0
    while len(times) < 3 or (spent < budget_s and len(times) < 30):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
        spent += times[-1]
    return statistics.median(times[1:]) / count
