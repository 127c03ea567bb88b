"""Quantised paths against fp32 on a fixed text: perplexity and how often the likeliest next token is the same.

Feeds the text in windows through the runner itself (prompt log-probabilities), one dtype after another, and
prints ratios. usage: python benchmarks/quality.py [--model default] [--tokens 20480] [--json FILE]
       python benchmarks/quality.py --dtype bf16,fp8 [--device cuda]
bf16 and fp8 are the CUDA runner's: over its kernels on a card, over their plain reference on a CPU, where what fp8 leaves
in bf16 is in float32. fp32 is always computed on the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from headrace.cli.cores import share_cores
from headrace.cli.model_store import find_or_fetch

TEXT = ROOT / "benchmarks" / "data" / "jargon.txt"
WINDOW = 512
# dtype: (most that perplexity may grow, least share of equal likeliest tokens)
BOUNDS = {"int8": (0.01, 0.97), "int4": (0.03, 0.93), "bf16": (0.01, 0.95), "fp8": (0.04, 0.88)}


def open_runner(config: Any, checkpoint: Any, dtype: str, device: str) -> Any:
    import torch

    from headrace.runner.torch.probe import choose
    from headrace.runner.torch.runner import TorchRunner

    if dtype not in ("bf16", "fp8"):
        choice = choose(checkpoint.shape, dtype)
        assert choice.recipe.dtype == dtype, f"{dtype} is not available here: {choice.reasons}"
        return TorchRunner(config, checkpoint, choice.recipe, cuts=choice.cuts)
    from headrace.runner.cuda.lane import CudaLane, HostLane
    from headrace.runner.cuda.reference_ops import ReferenceOps
    from headrace.runner.cuda.runner import CudaRunner
    from headrace.runner.cuda.weights import from_checkpoint

    lane, ops = HostLane(), ReferenceOps()
    # A CPU without products in bf16 takes hours over the head's.
    kind = torch.float32 if device == "cpu" and dtype == "fp8" else torch.bfloat16
    if device == "cuda":
        from headrace.runner.cuda.triton_ops import TritonOps

        lane = CudaLane()
        ops = TritonOps(checkpoint.shape, config.slots, lane.device)
    source = from_checkpoint(checkpoint)
    return CudaRunner(config, checkpoint.shape, source, ops, lane, dtype=kind, fp8=dtype == "fp8")


def measure(path: Path, dtype: str, num_tokens: int, device: str) -> tuple[np.ndarray, np.ndarray, float]:
    """Log-probability of every token after its window's first, the likeliest token there, and seconds taken."""
    from headrace.core.config import EngineConfig
    from headrace.core.request import Request, SamplingParams
    from headrace.engine.loop import Engine
    from headrace.text.tokenizer import Tokenizer
    from headrace.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(path)
    ids = Tokenizer(checkpoint.vocabulary).encode_text(TEXT.read_text())[:num_tokens]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids) - 1, WINDOW)]
    config = EngineConfig(
        slots=1,
        blocks=64,
        block_size=16,
        context_len=1024,
        vocab_size=checkpoint.shape.vocab_size,
        eos_ids=checkpoint.shape.eos_ids,
        max_step_tokens=WINDOW,
        max_queue_s=1e6,
        max_step_s=1e3,
    )
    runner = open_runner(config, checkpoint, dtype, device)
    runner.load()
    engine = Engine(config, runner)
    started_s = time.perf_counter()
    logprobs: list[float] = []
    likeliest: list[int] = []
    for number, window in enumerate(windows):
        sampling = SamplingParams(temperature=0.0, prompt_logprobs=1)
        request = Request(f"{number}", "bench", tuple(window), max_tokens=1, sampling=sampling, ttft_target_s=1e6)
        engine.submit(request, time.monotonic())
        scored: dict[int, tuple[float, int]] = {}
        while not engine.idle:
            scores = engine.turn(time.monotonic()).scores
            if scores is None:
                continue
            for position, logprob, top in zip(scores.positions, scores.logprobs, scores.top_ids, strict=True):
                if position < len(window):
                    scored[int(position)] = (float(logprob), int(top[0]))
        missing = set(range(1, len(window))) - set(scored)
        assert not missing, f"positions were not scored: {sorted(missing)[:10]} of {len(missing)}"
        logprobs += [scored[place][0] for place in sorted(scored)]
        likeliest += [scored[place][1] for place in sorted(scored)]
        print(f"\r{dtype}: {number + 1} of {len(windows)} windows", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    runner.close()
    checkpoint.close()
    return np.array(logprobs), np.array(likeliest), time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--dtype", default="int8,int4")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    share_cores()
    path = find_or_fetch(arguments.model)
    results = {}
    truth, best, seconds = measure(path, "fp32", arguments.tokens, arguments.device)
    perplexity = math.exp(-truth.mean())
    results["fp32"] = {"perplexity": perplexity, "tokens": len(truth), "tokens_per_s": len(truth) / seconds}
    print(f"fp32  perplexity {perplexity:.4f} over {len(truth):,} tokens, {len(truth) / seconds:.0f} tokens/s")
    met = True
    for dtype in arguments.dtype.split(","):
        most, least = BOUNDS[dtype]
        logprobs, likeliest, seconds = measure(path, dtype, arguments.tokens, arguments.device)
        own = math.exp(-logprobs.mean())
        growth, agreement = own / perplexity - 1.0, float((likeliest == best).mean())
        met = met and abs(growth) <= most and agreement >= least
        results[dtype] = {
            "perplexity": own,
            "growth": growth,
            "agreement": agreement,
            "tokens_per_s": len(truth) / seconds,
        }
        print(
            f"{dtype}  perplexity {own:.4f} ({growth:+.2%}, at most ±{most:.0%}), "
            f"same likeliest token {agreement:.2%} (at least {least:.0%}), {len(truth) / seconds:.0f} tokens/s"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
