"""Whether the default model's rows are exact on this machine: every chunk size, every number of neighbours.

For each dtype, with the kernels that the probe chooses here: a prompt computed in one chunk is the truth. Then for
every size from 1 to 512 a chunk of that size somewhere in the prompt (before it a cached prefix, after it the rest),
and for every number of neighbours from 1 to 32 a step beside that many others. A logit that differs in one bit
counts. Free memory is NaN throughout.

    PYTHONPATH=src:. python benchmarks/exact.py MODEL.gguf [--dtypes int8,int4] [--first 1] [--sizes 512]
"""

import argparse
import platform
import time
from pathlib import Path

import msgspec
import numpy as np
import torch

from headrace.runner.torch.probe import choose
from headrace.weights.checkpoint import open_checkpoint
from headrace.worker.assembly import stored_bits
from tests.unit.runner.torch.model_rig import Desk, same_bits

PROMPT_LEN = 560
BLOCK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtypes", default="int4,int8,fp32")
    parser.add_argument("--sizes", type=int, default=512, help="the largest chunk")
    parser.add_argument("--first", type=int, default=1, help="the smallest chunk")
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    results = []
    for dtype in options.dtypes.split(","):
        recipe = choose(checkpoint.shape, dtype, stored_bits=stored_bits(checkpoint))
        desk = Desk(checkpoint, recipe.recipe, cuts=recipe.cuts)  # type: ignore[arg-type]
        started_s = time.perf_counter()
        tried = range(options.first, options.sizes + 1)
        sizes = wrong_sizes(desk, tried)
        rows = wrong_rows(desk)
        row = {
            "dtype": dtype,
            "kernels": str(recipe.recipe),
            "sizes_tried": len(tried),
            "sizes_wrong": sizes,
            "neighbours_tried": 32,
            "neighbours_wrong": rows,
            "seconds": round(time.perf_counter() - started_s, 1),
        }
        results.append(row)
        print(msgspec.json.encode(row).decode(), flush=True)
        desk.runner.close()
    machine = {"machine": platform.machine(), "torch": str(torch.__version__), "threads": torch.get_num_threads()}
    print(msgspec.json.encode({**machine, "results": results}).decode())


def prompt(seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([7, seed]).integers(20, 40_000, PROMPT_LEN).tolist())


def wrong_sizes(desk: Desk, sizes: range) -> list[int]:
    """The chunk sizes whose logits are not those of the prompt in one chunk."""
    ids = prompt()
    desk.begin(0, ids)
    desk.generate(0, 2)
    truth = desk.logits[0]
    chance = np.random.default_rng(1)
    wrong = []
    for size in sizes:
        # The chunk begins behind a cached prefix and ends up to three blocks before the prompt does.
        cached = (PROMPT_LEN - 1 - size) // BLOCK - int(chance.integers(0, 3))
        cached = max(0, cached)
        desk.begin(1, ids, shared=desk.blocks[0][:cached])
        desk.advance({1: size})
        if desk.logits[1]:
            desk.advance({1: 1})
        else:
            desk.generate(1, 2)
        if not same_bits(desk.logits[1], truth):
            wrong.append(size)
        desk.end(1, keep=cached)
    desk.end(0)
    return wrong


def wrong_rows(desk: Desk) -> list[int]:
    """The numbers of neighbours beside which a row's logits are not its own."""
    ids = prompt(1)
    desk.begin(0, ids)
    desk.generate(0, 3)
    truth = desk.logits[0]
    desk.end(0)
    wrong = []
    for neighbours in range(1, 33):
        for slot in range(1, neighbours + 1):
            desk.begin(slot, prompt(slot)[: 3 + 2 * slot])
        desk.begin(0, ids)
        desk.advance({0: 333, **dict.fromkeys(range(1, neighbours + 1), 100)})
        for count in (100_000, 1, 1):
            desk.advance({**dict.fromkeys(range(1, neighbours + 1), 1), 0: count})
        if not same_bits(desk.logits[0], truth):
            wrong.append(neighbours)
        for slot in range(neighbours + 1):
            desk.end(slot)
    return wrong


if __name__ == "__main__":
    main()
