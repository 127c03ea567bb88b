"""One of several processes that are a crowd of clients together: the load tool's own client, told when to begin.

usage: python crowd_client.py URL MODEL REQUESTS PROMPT OUTPUT IDS_BELOW SEED    (the key is in HEADRACE_API_KEY)
Says `ready`, then for each line `RUN AT_S` on stdin sends all its requests at that moment and answers with the name of
a file of JSON. Times are of the system's monotonic clock, which all processes share.
"""

import asyncio
import json
import os
import sys
import time
from tempfile import NamedTemporaryFile
from typing import Any

import uvloop

from headrace.cli.load.drive import Driver
from headrace.cli.load.http import Endpoint, Pool, parse_url
from headrace.cli.load.outcome import Outcome
from headrace.cli.load.plan import LoadPlan, TenantLoad
from headrace.cli.load.wording import Asked, Wording
from headrace.sim.arrivals import Together
from headrace.sim.lengths import parse_lengths

PATIENCE_S = 300.0


async def run(endpoint: Endpoint, plan: LoadPlan, asked: Asked, number: int, at_s: float) -> dict[str, Any]:
    wording = Wording(endpoint, plan, asked, run=number)
    pool = Pool(asyncio.get_running_loop(), endpoint)
    await pool.start()
    driver = Driver(pool, plan, wording, streamed=True, patience_s=PATIENCE_S)
    await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
    try:
        record = await driver.run()
    finally:
        await pool.close()
    return {
        "pid": os.getpid(),
        "started_s": record.started_s,
        "ended_s": record.ended.at_s,
        "cpu_s": record.ended.client_cpu_s - record.began.client_cpu_s,
        "frames": record.ended.frames,
        "outcomes": [tell(outcome) for outcome in record.outcomes],
    }


def tell(outcome: Outcome) -> dict[str, Any]:
    return {
        "state": str(outcome.state),
        "told": outcome.violation or outcome.message or outcome.code,
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": outcome.output_tokens,
        "ended_s": outcome.ended_s,
        "pieces_s": [round(at_s, 6) for at_s in outcome.pieces_s],
    }


def main(url: str, model: str, requests: str, prompt: str, output: str, ids_below: str, seed: str) -> None:
    endpoint = parse_url(url)
    load = TenantLoad(
        name="crowd",
        key=os.environ["HEADRACE_API_KEY"],  # noqa: TID251 (this is the composition root)
        prompt=parse_lengths(prompt, "prompt"),
        output=parse_lengths(output, "output"),
        arrivals=Together(int(requests)),
    )
    plan = LoadPlan((load,), seed=int(seed))
    # Prompts are ids, as the engine's own benchmark has them; replies are text, as clients want them.
    extra: dict[str, object] = {"return_token_ids": False}
    asked = Asked(model, api="completions", with_ids=True, ids_below=int(ids_below), extra=extra)
    print("ready", flush=True)
    for line in sys.stdin:
        number, at_s = line.split()
        told = json.dumps(uvloop.run(run(endpoint, plan, asked, int(number), float(at_s))))
        # By a file: what a pipe holds is less than thousands of times.
        with NamedTemporaryFile("w", suffix=".json", delete=False) as file:
            file.write(told)
        print(file.name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
