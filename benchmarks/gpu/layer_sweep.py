"""Which configurations make a step of one row the fastest: of its products and its attention, timed in whole layers.

usage: PYTHONPATH=src python benchmarks/gpu/layer_sweep.py [--shape 0.6b]
A kernel that is the fastest alone need not be so beside others: where each starts while the one before it ends, what
counts is how soon the next can begin. Each kind of kernel is tried in turn while the others stay, twice around. Takes
about half a minute; kernels are compiled by several processes first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from kernel_rig import seconds
from throughput import SHAPES

from headrace.runner.cuda.kernels.decode_attention import DecodeConfig, DecodeScratch, decode_config
from headrace.runner.cuda.kernels.row_product import RowConfig, row_config, row_product
from headrace.runner.cuda.kernels.turned_attention import turned_attention
from headrace.weights.shape import ModelShape

_COMPILERS = 12
_CONTEXTS = (140, 256, 380, 1000)
_BLOCK = 16
_EPS = 1e-6
_KINDS = ("attention", "down", "gate_up", "qkv", "out")
Configs = dict[str, Any]


class Layers:
    """A model's layers with random weights, and one row at the end of `context` positions."""

    def __init__(self, shape: ModelShape, num_layers: int, context: int) -> None:
        hidden, dim, kv_heads = shape.hidden_size, shape.head_dim, shape.num_kv_heads
        self.shape, self.num_layers = shape, num_layers
        self.sizes = sizes_of(shape)
        self.matrices = {
            kind: [_random((2 if gated else 1) * height, width) * 0.02 for _ in range(num_layers)]
            for kind, (height, width, gated) in self.sizes.items()
        }
        blocks = -(-context // _BLOCK)
        self.keys, self.values = ([_random(blocks, kv_heads, _BLOCK, dim) for _ in range(num_layers)] for _ in range(2))
        self.tables = torch.randperm(blocks, device="cuda").int()[None]
        self.slots = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.lengths = torch.full((1,), context, dtype=torch.int32, device="cuda")
        angles = torch.rand(context + 1, dim // 2, device="cuda")
        self.cosines, self.sines = angles.cos(), angles.sin()
        self.norm, self.head_norm = _random(hidden), _random(dim) if shape.qk_norm else None
        self.row, self.inner = _random(1, hidden), _random(1, shape.intermediate_size)
        self.qkv, self.attended = _random(1, self.sizes["qkv"][0]), _random(1, shape.num_heads, dim)
        self.scratches: dict[DecodeConfig, DecodeScratch] = {}

    def run(self, kind: str, layer: int, config: Any) -> None:
        if kind == "attention":
            self._attend(layer, config)
            return
        matrix, by_norm = self.matrices[kind][layer], {"norm": self.norm, "eps": _EPS, "config": config}
        if kind == "qkv":
            row_product(self.row, matrix, self.qkv, **by_norm)
        elif kind == "gate_up":
            row_product(self.row, matrix, self.inner, gated=True, **by_norm)
        else:
            read = self.inner if kind == "down" else self.attended.view(1, -1)
            row_product(read, matrix, self.row, adds=True, config=config)

    def _attend(self, layer: int, config: DecodeConfig) -> None:
        shape = self.shape
        if config not in self.scratches:
            self.scratches[config] = DecodeScratch.make(
                1, shape.num_heads, shape.num_kv_heads, shape.head_dim, config, "cuda"
            )
        turned_attention(
            self.attended,
            self.qkv,
            self.cosines,
            self.sines,
            self.head_norm,
            self.head_norm,
            _EPS,
            self.keys[layer],
            self.values[layer],
            self.tables,
            self.slots,
            self.lengths,
            shape.head_dim**-0.5,
            self.scratches[config],
        )

    def layer_us(self, configs: Configs) -> float:
        def layer(index: int) -> None:
            for kind in ("qkv", "attention", "out", "gate_up", "down"):
                self.run(kind, index, configs[kind])

        return 1e6 * seconds([lambda index=index: layer(index) for index in range(self.num_layers)])


def _random(*dims: int) -> torch.Tensor:
    return torch.randn(dims, device="cuda", dtype=torch.bfloat16)


def sizes_of(shape: ModelShape) -> dict[str, tuple[int, int, bool]]:
    """Height and width of each matrix, and whether it is gated."""
    hidden, heads = shape.hidden_size, shape.num_heads * shape.head_dim
    return {
        "qkv": (heads + 2 * shape.num_kv_heads * shape.head_dim, hidden, False),
        "out": (hidden, heads, False),
        "gate_up": (shape.intermediate_size, hidden, True),
        "down": (hidden, shape.intermediate_size, False),
    }


def chosen(shape: ModelShape) -> Configs:
    found: Configs = {kind: row_config(h, w, gated=gated) for kind, (h, w, gated) in sizes_of(shape).items()}
    return found | {"attention": decode_config(1, shape.num_kv_heads, 8192)}


def candidates(shape: ModelShape, kind: str) -> Iterator[Any]:
    if kind == "attention":
        for splits, least, tile, warps, stages in product((8, 16), (4, 8, 16), (16, 32, 64), (1, 2, 4), (2, 3)):
            yield DecodeConfig(splits, least, tile=tile, num_warps=warps, num_stages=stages, ahead=True)
        return
    height, width, gated = sizes_of(shape)[kind]
    for lines, span, warps in product((1, 2, 4, 8), (256, 512, 1024, 2048, 4096), (1, 2, 4, 8)):
        each = lines * span // (32 * warps)
        if span <= 2 * width and 8 <= each <= (64 if gated else 128) and 100 <= height // lines <= 3100:
            yield RowConfig(lines, span, warps)


def compile_share(shape: ModelShape, share: int) -> None:
    layers = Layers(shape, 1, 64)
    everything = [(kind, config) for kind in _KINDS for config in candidates(shape, kind)]
    for kind, config in everything[share::_COMPILERS]:
        layers.run(kind, 0, config)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="0.6b", choices=SHAPES)
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    if given.compile is not None:
        compile_share(shape, given.compile)
        return
    argv = [sys.executable, __file__, "--shape", given.shape, "--compile"]
    for process in [subprocess.Popen([*argv, str(share)]) for share in range(_COMPILERS)]:
        process.wait()
    layers, best = Layers(shape, shape.num_layers, _CONTEXTS[1]), chosen(shape)
    print(f"as chosen: {layers.layer_us(best):.2f} us a layer", flush=True)
    for _ in range(2):
        for kind in _KINDS:
            timed = [(layers.layer_us(best | {kind: config}), config) for config in candidates(shape, kind)]
            took_us, best[kind] = min(timed, key=lambda each: each[0])
            print(f"{kind:9s} {took_us:6.2f} us a layer with {best[kind]}", flush=True)
    for context in _CONTEXTS:
        others = Layers(shape, shape.num_layers, context)
        print(
            f"{context:5d} positions: {others.layer_us(chosen(shape)):.2f} us as chosen, {others.layer_us(best):.2f} at best"
        )


if __name__ == "__main__":
    main()
