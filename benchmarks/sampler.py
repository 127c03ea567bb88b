"""Prints what sampling a step costs, for usual settings, over logits shaped like a small language model's.

Run from the repository's root: .venv/bin/python benchmarks/sampler.py [rows] [vocabulary] [threads]
"""

import sys
import time

import numpy as np
import torch

from headrace.core.plan import SlotStart
from headrace.core.request import SamplingParams
from headrace.runner.torch.sampler import Sampler

REPEATS = 21
PROMPT = tuple(np.random.default_rng(0).integers(0, 30000, 1000).tolist())
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "temperature 0.7, top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "temperature 1, top-p 0.95": SamplingParams(top_p=0.95),
    "temperature 1.5, top-p 0.95": SamplingParams(temperature=1.5, top_p=0.95),
    "top-k 50": SamplingParams(top_k=50),
    "top-k 50, top-p 0.9": SamplingParams(temperature=0.7, top_k=50, top_p=0.9),
    "top-k 200, top-p 0.9": SamplingParams(temperature=0.7, top_k=200, top_p=0.9),
    "top-k 1000": SamplingParams(top_k=1000),
    "min-p 0.05": SamplingParams(min_p=0.05),
    "greedy, penalties over 1,000 ids": SamplingParams(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.1),
    "greedy, 5 log-probabilities": SamplingParams(temperature=0.0, logprobs=5),
}


def lifelike(rows: int, vocab_size: int) -> torch.Tensor:
    """A broad heap of unlikely ids under a heavy-tailed top: nuclei of a few to some hundreds of ids."""
    generator = torch.Generator().manual_seed(0)
    heap = torch.randn(rows, vocab_size, generator=generator) * 2.0
    tops = torch.rand(rows, 2000, generator=generator).pow_(6) * torch.linspace(8.5, 16.0, rows)[:, None]
    places = torch.randint(0, vocab_size, (rows, 2000), generator=generator)
    return heap.scatter_add_(1, places, tops)


def measure(sampling: SamplingParams, logits: torch.Tensor) -> tuple[float, float]:
    """(median, least) milliseconds of a step."""
    rows, vocab_size = logits.shape
    sampler = Sampler(rows, vocab_size, (0,), torch.device("cpu"))
    for slot in range(rows):
        sampler.begin(SlotStart(slot, slot, f"r{slot}", PROMPT, len(PROMPT), 0, (), sampling, 0))
    slots = np.arange(rows, dtype=np.int32)
    times = []
    for step in range(REPEATS + 2):
        fresh = logits.clone()
        positions = np.full(rows, len(PROMPT) + step, np.int32)
        begin_s = time.perf_counter()
        sampler.sample(fresh, slots, positions, None, slots)
        times.append(1e3 * (time.perf_counter() - begin_s))
    return float(np.median(times[2:])), min(times[2:])


def main() -> None:
    rows, vocab_size, threads = (int(a) for a in [*sys.argv[1:], *("32", "49152", "2")[len(sys.argv) - 1 :]])
    torch.set_num_threads(threads)
    logits = lifelike(rows, vocab_size)
    print(f"{rows} rows, {vocab_size} ids, {threads} threads: median and least milliseconds of a step")
    for name, sampling in SETTINGS.items():
        median, least = measure(sampling, logits)
        print(f"{name:<36} {median:8.2f} {least:8.2f}", flush=True)


if __name__ == "__main__":
    main()
