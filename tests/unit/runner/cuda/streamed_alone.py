# mypy: disable-error-code="import-not-found,import-untyped"
"""Streamed products and attention compiled ahead for a card that is not here: a program of its own, for Triton's interpreter
must be off.

usage: python -m tests.unit.runner.cuda.streamed_alone
Writes as JSON, for each kernel that a card would have been given, its shared memory and what its threads leave in others'
memory for want of registers; in which order each product waits and fetches in its loop, and attention multiplies and lets
go; and what this process had to compile itself.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from headrace.runner.cuda.compilers import Compilers
from tests.unit.runner.cuda.compile_alone import Card, put_in


class _Tray(Card):
    """Keeps what it is given."""

    def __init__(self, target: Any) -> None:
        super().__init__(target)
        self.given: list[tuple[str, int, bytes]] = []

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        self.given.append((name, shared, binary))
        return super().load_binary(name, binary, shared, device)


def _stack_bytes(binary: bytes) -> int:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return sum(int(size) for size in re.findall(r"STACK:(\d+)", told))


def _loops() -> list[list[str]]:
    """Of each kernel, from where it waits for a tile to where it fetches the next. Compilers put in where warps meet."""
    from triton import knobs

    words = re.compile(r"mbarrier\.try_wait|wgmma\.wait_group|bar\.sync|barrier\.cta\.sync|cp\.async\.bulk\.tensor")
    found = [words.findall(path.read_text()) for path in Path(knobs.cache.dir).rglob("_streamed.ptx")]
    loops = [order[order.index("mbarrier.try_wait") :] for order in found]
    return [loop[: loop.index("cp.async.bulk.tensor") + 1] for loop in loops]


def _releases(kernel: str) -> list[list[str]]:
    """Of each kernel of attention, in order: waits for products, where warps meet, and words that a tile may be overwritten;
    what barriers count, where it waits for the launch before and counts what others see, what tensor cores are shown, and
    registers."""
    from triton import knobs

    words = re.compile(
        r"wgmma\.wait_group\.sync\.aligned\s+\d|\bbar\.\w*\.?sync|barrier\.cta\.sync|mbarrier\.arrive\.shared"
        r"|mbarrier\.init[^,]*, \d|griddepcontrol\.wait|fence\.proxy\.async|atom\.global\.gpu\.\w+|\.maxnreg \d+"
    )
    address = re.compile(r"init.*, ")
    texts = (path.read_text() for path in Path(knobs.cache.dir).rglob(f"{kernel}.ptx"))
    return [[address.sub("init ", word) for word in words.findall(text)] for text in texts]


def main() -> dict[str, object]:
    compilers = Compilers()
    from triton.backends.compiler import GPUTarget

    from headrace.runner.cuda.kernels import ahead
    from headrace.runner.cuda.kernels.streamed_attention import TileQueue, streamed_attention
    from headrace.runner.cuda.kernels.streamed_decode import StretchScratch, streamed_decode, streamed_decode_turned
    from headrace.runner.cuda.kernels.streamed_product import streamed_config, streamed_product
    from headrace.runner.cuda.squares import Squares

    card = _Tray(GPUTarget("cuda", 90, 32))
    compiled = put_in(card)

    def empty(*dims: int) -> torch.Tensor:
        return torch.empty(dims, dtype=torch.bfloat16)

    def work() -> None:
        host = torch.device("cpu")
        for count in (64, 128):
            hidden, inner, squares = 4096, 14336, Squares.make(4096, count, host)
            squares.parts = 128
            x, norm, wide = empty(count, hidden), empty(hidden), empty(count, inner)
            settings: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]] = [
                (x, empty(6144, hidden), empty(count, 6144), {"squares": squares, "bias": empty(6144)}),
                (x, empty(2 * inner, hidden), wide, {"squares": squares, "gated": True}),
                (wide, empty(hidden, inner), x, {"norm": norm, "scaled": empty(count, hidden), "left": squares}),
            ]
            for read, weight, out, joined in settings:
                config = streamed_config(count, out.shape[1], read.shape[1], gated="gated" in joined)
                streamed_product(read, weight, out, config, eps=1e-5, **joined)

        rows, weight = (torch.empty(dims, dtype=torch.float8_e4m3fn) for dims in ((64, 4096), (6144, 4096)))
        config = streamed_config(64, 6144, 4096, gated=False, itemsize=1)
        streamed_product(rows, weight, empty(64, 6144), config, scale=torch.ones(1))

        offsets, tiles = (torch.zeros(dims, dtype=torch.int32) for dims in (9, (40, 4)))
        for heads, kv_heads in ((16, 8), (32, 8)):
            asked, all_heads = empty(1024, heads, 128), empty(1024, (heads + 2 * kv_heads) * 128)
            queue = TileQueue.make(132, host)
            streamed_attention(empty(1024, heads, 128), asked, all_heads, offsets, tiles, 0.1, queue)
            # With norms, and with factors; groups of two, and of sixteen.
            head_norm = empty(128) if heads == 16 else None
            factors = None if heads == 16 else torch.ones(256)
            kv_heads = 8 if heads == 16 else 2
            angles, cells, slots = torch.empty(9, 64), empty(9, kv_heads, 16, 128), torch.zeros(256, dtype=torch.int32)
            scratch, tables = StretchScratch.make(heads, kv_heads, 128, queue), torch.zeros(256, 9, dtype=torch.int32)
            qkv, context = empty(256, (heads + 2 * kv_heads) * 128), (cells, cells, tables, slots, slots, 0.1)
            turns = (qkv, angles, angles, head_norm, head_norm, 1e-5)
            streamed_decode(empty(256, heads, 128), *turns, *context, scratch, row_factors=factors)
            streamed_decode_turned(empty(256, heads, 128), empty(256, heads, 128), *context, scratch)

    with ahead.compiling(work, torch.device("cpu"), compilers):
        pass
    work()
    kernels = [{"name": name, "shared": shared, "stack": _stack_bytes(binary)} for name, shared, binary in card.given]
    orders = {"loops": _loops(), "releases": _releases("_attend_streamed"), "looks": _releases("_look_streamed")}
    return {"compiled": compiled, "kernels": kernels, "launched": len(card.launched), **orders}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main()))
