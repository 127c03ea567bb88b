"""What odd rows - with penalties, biases, limits, log-probabilities - cost the rows beside them, which have none.

usage: PYTHONPATH=src python benchmarks/gpu/odd_rows.py [--shape 0.6b] [--deterministic] [--json PATH]
Such rows need more than the graph of a step does, in a second launch. One of 64 may cost a step a tenth of it, and 64 may
make it 1.6 times as long; what takes longer is said as `MISSED`. `--profile` says where the device's time went.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace
from throughput import SHAPES, measure, open_runner, trace

from headrace.cli import engine_bench
from headrace.core.request import Request

_ROWS = 64
_LOAD = engine_bench.Load("odd rows", _ROWS, (128, 128), (160, 160))
_DRAWN = {"temperature": 0.8, "top_p": 0.95}
_KINDS: dict[str, dict[str, Any]] = {
    "a penalty": {"frequency_penalty": 0.5},
    "a bias": {"logit_bias": ((5, 2.0),)},
    "no end yet": {"min_tokens": 160, "stop_ids": (1, 2, 3)},
    "log-probabilities": {"logprobs": 5},
    "a penalty, drawn": {"repetition_penalty": 1.1, **_DRAWN},
    "everything": {"logprobs": 20, "logit_bias": ((5, 2.0),), "presence_penalty": 0.5, **_DRAWN},
}
# Times as long a step may take with so many odd rows.
_MOST = {1: 1.1, _ROWS: 1.6}
_make_requests = engine_bench.make_requests


def with_odd(count: int, asked: dict[str, Any], *args: Any) -> list[Request]:
    """The usual requests, the first `count` of which ask for more."""
    return [
        replace(request, sampling=replace(request.sampling, **asked)) if index < count else request
        for index, request in enumerate(_make_requests(*args))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="0.6b", choices=SHAPES)
    parser.add_argument("--deterministic", action="store_true", help="row-exact")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    say = partial(print, flush=True)
    runner, config, _ = open_runner(SHAPES[given.shape], say, given.deterministic)
    rows: list[dict[str, Any]] = []
    kinds = [(name, count, asked) for name, asked in _KINDS.items() for count in _MOST]
    for what, count, asked in [("nothing odd", 0, {}), *kinds]:
        with patch.object(engine_bench, "make_requests", partial(with_odd, count, asked)):
            tried = [measure(given.shape, _LOAD, runner, config) for _ in range(4)][1:]
            row = sorted(tried, key=lambda each: each["tokens_per_s"])[1]
            if given.profile:
                trace(given.shape, _LOAD, runner, config, say)
        kept = ("tokens_per_s", "steps", "decode_step_ms", "host_ms_per_step")
        rows.append({"odd": what, "rows": count, **{name: row[name] for name in kept}})
        times = rows[0]["tokens_per_s"] / row["tokens_per_s"]
        host = {name: round(value, 3) for name, value in row["host_ms_per_step"].items()}
        missed = f" MISSED {_MOST[count]}" if times > _MOST.get(count, times) else ""
        say(
            f"{count:2d} of {_ROWS} rows with {what}: {row['tokens_per_s']:,.0f} tokens/s, {times:.2f} times as long a step"
            f" (device {row['decode_step_ms']:.3f} ms, host {host}){missed}"
        )
    runner.close()
    if given.json:
        given.json.write_text(json.dumps({"shape": given.shape, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
