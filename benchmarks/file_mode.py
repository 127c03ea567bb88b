"""Many mixed asks through file mode: does every one end, does anything leak, how fast is it?

Prompts of 30 to 400 tokens, greedy and sampled, with stops, choices, schemas, log-probabilities, some of them invalid.
Where llama.cpp's `llama-bench` is on the PATH its figures for the same file are printed beside ours.
usage: python benchmarks/file_mode.py [--model default] [--count 500] [--dtype auto] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import msgspec

from headrace.cli.local import open_local
from headrace.cli.model_store import find_or_fetch
from headrace.core.proc import peak_resident_bytes, resident_bytes
from headrace.serving.ask import Ask
from headrace.serving.rows import RowRun
from headrace.worker.assembly import LoadSettings

WORDS = (ROOT / "benchmarks" / "data" / "jargon.txt").read_text().split()


def mixed_ask(index: int, chance: random.Random) -> dict[str, Any]:
    start = chance.randrange(len(WORDS) - 500)
    length = chance.choice((5, 20, 60, 120, 250))
    ask: dict[str, Any] = {"id": index, "max_tokens": chance.randint(4, 40), "seed": index}
    ask["prompt"] = "Comment on this: " + " ".join(WORDS[start : start + length])
    extras: list[dict[str, Any]] = [
        {},
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 40, "repetition_penalty": 1.1},
        {"stop": ["\n", ". "]},
        {"n": 2, "temperature": 1.0},
        {"logprobs": 3},
        {"prompt_logprobs": 0},
        {"json_object": True, "temperature": 0.7},
        {"choices": ["yes", "no"]},
        {"ignore_eos": True},
        {"min_tokens": 4},
        {"temperature": -1.0},
        {"max_tokens": 0},
    ]
    return ask | chance.choice(extras)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--count", type=int, default=500)
    # So little that the first part touches all of it: whatever grows after that is a leak.
    parser.add_argument("--kv-tokens", type=int, default=16_384)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    chance = random.Random(0)
    given = [mixed_ask(index, chance) for index in range(arguments.count)]
    with open_local(arguments.model, LoadSettings(dtype=arguments.dtype, kv_tokens=arguments.kv_tokens)) as local:
        memory = local.memory
        allowed_mib = 450 + (1.5 * memory.weights_bytes + memory.kv_bytes) / 2**20
        print(f"ready after {local.ready_s:.1f} s (10 allowed)")
        print(
            f"resident {resident_bytes() / 2**20:,.0f} MiB, at most {peak_resident_bytes() / 2**20:,.0f} so far: 450 + 1.5 x "
            f"{memory.weights_bytes / 2**20:,.0f} of weights + {memory.kv_bytes / 2**20:,.0f} of KV = {allowed_mib:,.0f} allowed",
            flush=True,
        )
        quarters = []
        size = -(-len(given) // 4)
        for part in (given[start : start + size] for start in range(0, len(given), size)):
            run = RowRun(local.service, Ask(), max_open=128)
            started_s = time.perf_counter()
            rows = list(run.rows(msgspec.json.encode(ask) for ask in part))
            seconds = time.perf_counter() - started_s
            assert sorted(row.id for row in rows) == [ask["id"] for ask in part], "a line was lost or doubled"  # type: ignore[type-var]
            load = local.engine.load()
            local.engine.check()
            quarters.append(
                {
                    "rows": len(rows),
                    "refused": run.num_failed,
                    "prompt_tokens": run.num_prompt_tokens,
                    "tokens": run.num_tokens,
                    "seconds": seconds,
                    "tokens_per_s": run.num_tokens / seconds,
                    "used_blocks": load.used_blocks,
                    "resident_mib": resident_bytes() / 2**20,
                }
            )
            print(quarters[-1], flush=True)
        about = local.describe()
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"model": msgspec.to_builtins(about), "quarters": quarters}, indent=1) + "\n"
        )
    if shutil.which("llama-bench"):
        subprocess.run(
            ["llama-bench", "-m", str(find_or_fetch(arguments.model)), "-p", "512", "-n", "128"], check=False
        )
    else:
        print("llama-bench is not installed here: nothing to compare with")


if __name__ == "__main__":
    main()
