"""Which configuration of the one-row product is the fastest in fp8, for each matrix of a layer; bf16 as it is chosen.

usage: PYTHONPATH=src python benchmarks/gpu/row_sweep.py [--shape 8b]. Prints microseconds and the share of the memory's
bandwidth, best first, beside what `row_config` chooses. Takes about two minutes, most of them to compile.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product

import torch
from kernel_rig import BANDWIDTH, seconds
from throughput import SHAPES

from headrace.runner.cuda.fp8_weights import quantise_matrix
from headrace.runner.cuda.kernels.row_product import RowConfig, row_config, row_product

# As many copies of a matrix as no cache holds.
_COLD_BYTES = 256 << 20
_SHOWN = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    shape = SHAPES[parser.parse_args().shape]
    hidden, inner, heads = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim
    for name, height, width, gated in (
        ("qkv", heads + 2 * shape.num_kv_heads * shape.head_dim, hidden, False),
        ("out", hidden, heads, False),
        ("gate_up", inner, hidden, True),
        ("down", hidden, inner, False),
    ):
        for fp8 in (False, True):
            sweep(f"{name} {'fp8' if fp8 else 'bf16'}", height, width, gated=gated, fp8=fp8)


def sweep(name: str, height: int, width: int, *, gated: bool, fp8: bool) -> None:
    lines = height * (2 if gated else 1)
    size = lines * width * (1 if fp8 else 2)
    matrices = []
    for _ in range(max(2, -(-_COLD_BYTES // size))):
        matrix = (torch.randn(lines, width, device="cuda") * 0.02).bfloat16()
        matrices.append(quantise_matrix(matrix) if fp8 else (matrix, None))
    row, norm = (torch.randn(1, width, device="cuda").bfloat16() for _ in range(2))
    out = torch.zeros(1, height, device="cuda", dtype=torch.bfloat16)
    usual = row_config(height, width, gated=gated)
    found = []
    tried = {RowConfig(*each) for each in product((4, 8), (1024, 2048), (4, 8))} if fp8 else set()
    for config in tried | {usual}:
        does = {"norm": norm[0] if gated else None, "eps": 1e-6, "gated": gated, "config": config}
        took_s = seconds([partial(row_product, row, weight, out, scale=scale, **does) for weight, scale in matrices])
        found.append((took_s, config))
    found.sort(key=lambda each: each[0])
    for took_s, config in [*found[:_SHOWN], *(each for each in found if each[1] == usual)]:
        mark = " (as chosen)" if config == usual else ""
        print(f"{name:12s} {1e6 * took_s:7.1f} us {size / took_s / BANDWIDTH:5.0%}  {config}{mark}", flush=True)


if __name__ == "__main__":
    main()
