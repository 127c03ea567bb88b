"""`headrace bench kernels` asks the kernels for what they take: every launch of its card part, in the interpreter."""

from collections.abc import Sequence

import pytest
import torch

from headrace.cli.kernels.card import CardBench, CardSizes
from headrace.cli.kernels.roofline import Launch, Peaks
from headrace.runner.cuda.exact_ops import ExactOps
from headrace.runner.cuda.lane import HostLane
from headrace.runner.cuda.triton_ops import TritonOps
from tests.unit.runner.torch.model_rig import model


def once(launches: Sequence[Launch]) -> float:
    launches[0]()
    return 1.0


@pytest.mark.parametrize("kind", [TritonOps, ExactOps])
def test_every_operation_takes_what_the_bench_gives_it(kind: type[TritonOps]) -> None:
    sizes = CardSizes((1, 3), ((2, 40),), ((20, 0), (5, 17)), (2,), cold_bytes=1, peak_bytes=64, peak_width=4)
    lane, shape = HostLane(), model("qwen3")[1].shape
    bench = CardBench(kind(shape, 4, lane.device), lane, shape, sizes, once, torch.float32)
    figures = list(bench.measure(Peaks(1e9, 1e9)))
    told = {figure.kernel for figure in figures}
    assert {"product", "one row: norm, product, gate", "turn + write", "decode attention", "chunk attention"} <= told
    assert "sample: greedy" in told
