"""Whether kernels compile, and find room, on cards that are not here: shared memory, registers and spills. JSON lines.

usage: PYTHONPATH=src python benchmarks/gpu/compiled.py [--cards 80,86,90]
Needs Triton and no card. A program that wants more shared memory than its card has cannot be launched at all; one that
spills is slow. Also counts the arithmetic of the two loops of prefill attention: where they differ, a row's bits depend
on how its prompt was cut. Takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headrace.runner.cuda.kernels import (
    activation,
    decode_attention,
    eights,
    exact_product,
    fresh_attention,
    norms,
    prefill_attention,
    row_product,
    turned_attention,
)

# Most shared memory of a program by compute capability: A100, graphics cards before Blackwell, H200.
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
HALF, WIDE, WORD, INT, FLOAT, EIGHT = "*bf16", "*fp32", "*i32", "i32", "fp32", "*fp8e4nv"
_PAGES = {"keys": HALF, "values": HALF, "tables": WORD, "slots": WORD, "scale": FLOAT, "table_stride": INT}
_STRETCHES = {
    "lengths": WORD,
    "sums": WIDE,
    "stats": WIDE,
    "tickets": WORD,
    "shortest": INT,
    "splits": INT,
    "least": INT,
}
_ALIGNED = ("q_stride", "qkv_stride", "out_stride", "rows_stride")
# Of the two loops, and the same in both.
_ARITHMETIC = ("FFMA", "FMUL", "FADD", "MUFU", "FMNMX", "HGMMA")


def build(kernel: Any, types: dict[str, str], constants: dict[str, Any], card: int, warps: int, stages: int) -> Any:
    """Pointers and strides are aligned, as the runner's are."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = [name for name, kind in types.items() if kind[0] == "*" or name in _ALIGNED]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", card, 32), options={"num_warps": warps, "num_stages": stages}
    )


def prefill(card: int, dim: int, group: int) -> Any:
    config = prefill_attention.prefill_config(dim, SHARED[card])
    types = _PAGES | {"out": HALF, "q": HALF, "offsets": WORD, "prior": WORD, "tiles": WORD}
    types |= {"q_stride": INT, "out_stride": INT, "sums": WIDE, "stats": WIDE, "tickets": WORD}
    constants = {"kv_heads": 8, "group": group, "dim": dim, "block_size": 16, "rows": config.rows}
    constants |= {"tokens": config.tokens(8 * group, 8), "tile": config.tile, "cut": True}
    return build(prefill_attention._prefill, types, constants, card, config.num_warps, config.num_stages)


def fresh(card: int, group: int) -> Any:
    config, dim = fresh_attention.FreshConfig(), 128
    tiles = f"tensordesc<bf16[{config.tile}, {dim}]>"
    types = {"out": HALF, "q": HALF, "keys": tiles, "values": tiles, "offsets": WORD, "tiles": WORD, "scale": FLOAT}
    types |= {"q_stride": INT, "out_stride": INT}
    constants = {"group": group, "dim": dim, "rows": config.rows, "tokens": config.rows // group, "tile": config.tile}
    return build(fresh_attention._fresh, types, constants, card, config.num_warps, config.num_stages)


def decode(card: int, dim: int, group: int, rows: int, *, turned: bool, scaled: bool = False) -> Any:
    config = decode_attention.decode_config(rows, 8, 8192)
    few = triton.next_power_of_2(group)
    types = _PAGES | _STRETCHES | {"out": HALF, "out_stride": INT}
    constants = {"kv_heads": 8, "group": group, "few": few, "rows": max(16, few), "dim": dim, "block_size": 16}
    constants |= {"tile": config.tile, "together": max(1, 4096 // (few * dim)), "early": card >= 90}
    kernel = decode_attention._decode
    if turned:
        kernel = turned_attention._turned
        types |= {
            "qkv": HALF,
            "cos": WIDE,
            "sin": WIDE,
            "q_norm": HALF,
            "k_norm": HALF,
            "eps": FLOAT,
            "qkv_stride": INT,
            "row_factors": WIDE,
        }
        constants |= {"normed": True, "scaled": scaled, "ahead": config.ahead}
    else:
        types |= {"q": HALF, "q_stride": INT}
    return build(kernel, types, constants, card, config.num_warps, config.num_stages)


def product(card: int, height: int) -> Any:
    config = exact_product.exact_config(height)
    types = {"rows": HALF, "weight": HALF, "bias": HALF, "out": HALF}
    types |= {"count": INT, "rows_stride": INT, "out_stride": INT}
    constants = {"height": height, "width": 4096, "biased": False, "tall": config.rows, "wide": config.lines}
    constants |= {"span": config.span, "together": config.together}
    return build(exact_product._product, types, constants, card, config.num_warps, config.num_stages)


def in_eights(card: int) -> Iterator[tuple[str, Any]]:
    """Kernels that leave rows in eight bits or read matrices of them, for the 8B shape and an odd one."""
    early = {"early": card >= 90}
    factors = {"row_factors": WIDE, "out_factors": WIDE, "out": EIGHT, "out_stride": INT}
    for width in (4096, 576):
        padded = triton.next_power_of_2(width)
        sizes, warps = {"width": width, "padded": padded} | early, min(16, max(1, padded // 512))
        types = factors | {"x": HALF, "residual": HALF, "weight": HALF, "eps": FLOAT}
        types |= {"x_stride": INT, "residual_stride": INT}
        constants = sizes | {"add": True, "scaled": True, "eights": True}
        yield f"add+norm in eights {width}", build(norms._norm, types, constants, card, warps, 3)
        types = {"rows": HALF, "out": EIGHT, "out_factors": WIDE, "row_stride": INT, "out_stride": INT}
        yield f"quantise {width}", build(eights._quantise, types, sizes, card, warps, 3)
        types = {"rows": HALF, "row_factors": WIDE, "bias": HALF, "row_stride": INT}
        yield f"rescale {width}", build(eights._rescale, types, sizes, card, warps, 3)
    for width in (14336, 1536):
        padded = triton.next_power_of_2(width)
        types = factors | {"gate_up": HALF, "gate_stride": INT}
        sizes, warps = {"width": width, "padded": padded} | early, min(32, max(1, padded // 512))
        yield f"silu*mul in eights {width}", build(activation._silu_mul_eights, types, sizes, card, warps, 3)
    types = {"row": HALF, "norm": HALF, "weight": EIGHT, "bias": HALF, "out": HALF, "matrix_scale": WIDE, "eps": FLOAT}
    for height, width, gated in ((6144, 4096, False), (14336, 4096, True), (4096, 14336, False), (960, 576, False)):
        config = row_product.row_config(height, width, gated=gated)
        constants = {"width": width, "height": height, "lines": config.lines, "span": config.span, "normed": True}
        constants |= {"biased": False, "adds": False, "gated": gated, "scaled": True} | early
        found = build(row_product._row_product, types, constants, card, config.num_warps, 3)
        yield f"row product in eights {height} x {width}", found
    yield "turned 128, with factors", decode(card, 128, 4, 64, turned=True, scaled=True)


def tool(name: str, binary: bytes, *options: str) -> str:
    place = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary)
        return subprocess.run([place, *options, file], capture_output=True, text=True, check=True).stdout


def needs(name: str, card: int, kernel: Any) -> dict[str, Any]:
    found = re.search(r"REG:(\d+) STACK:(\d+)", tool("cuobjdump", kernel.asm["cubin"], "-res-usage"))
    registers, spilled = (int(number) for number in found.groups()) if found else (0, 0)
    shared = kernel.metadata.shared
    return {"kernel": name, "card": card, "ok": shared <= SHARED[card], "shared": shared, "registers": registers} | {
        "spilled": spilled
    }


def loops(card: int, dim: int) -> dict[str, Any]:
    """The clear loop and the one at the edge, in machine code: those two that multiply and raise to a power many times."""
    text = tool("nvdisasm", prefill(card, dim, 4).asm["cubin"], "-c")
    counts = [
        {name: len(re.findall(rf"\b{name}\b", block)) for name in _ARITHMETIC}
        for block in re.split(r"\.L_x_\d+:", text)
    ]
    busy = [count for count in counts if count["MUFU"] > 16 and count["HGMMA"]]
    return {
        "kernel": f"prefill {dim}: its loops",
        "card": card,
        "ok": len(busy) == 2 and busy[0] == busy[1],
        "arithmetic": busy,
    }


def checks(cards: list[int]) -> Iterator[dict[str, Any]]:
    for card in cards:
        for dim in (16, 64, 128, 256):
            yield needs(f"prefill {dim}", card, prefill(card, dim, 4))
            yield needs(f"decode {dim}", card, decode(card, dim, 4, 256, turned=False))
            for rows in (1, 64):
                yield needs(f"turned {dim}, {rows} rows", card, decode(card, dim, 4, rows, turned=True))
        for group in (1, 7, 16):
            yield needs(f"prefill 128, {group} heads to a key", card, prefill(card, 128, group))
        for height in (1024, 8192, 32768):
            yield needs(f"exact product to {height}", card, product(card, height))
        if card >= 89:
            yield from (needs(name, card, kernel) for name, kernel in in_eights(card))
        if card >= 90:
            yield from (loops(card, dim) for dim in (64, 128))
            for group in (1, 2, 4, 7):
                row = needs(f"fresh 128, {group} heads to a key", card, fresh(card, group))
                # Two share a multiprocessor, each with a KiB of the system's.
                yield row | {"ok": 2 * (row["shared"] + 1024) <= SHARED[card] + 1024 and not row["spilled"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cards", default="80,86,90")
    options = parser.parse_args()
    failed = 0
    for row in checks([int(card) for card in options.cards.split(",")]):
        print(json.dumps(row), flush=True)
        failed += not row["ok"]
    print("every kernel finds room" if not failed else f"{failed} FAILED")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
