"""The gateway's figures per CPU-second of its process, over a fake model that costs nothing, and its peers' beside it.

Side by side in one run: the bare upstream, this gateway, and LiteLLM's proxy where `--litellm` names its command.
Run from the repository's root: .venv/bin/python benchmarks/serve_gateway.py [--litellm PATH] [--json FILE]
The frames alone, with the journal in a Redis of its own: --streams --journal redis
With `keep_awake`, processors kept from halting for what is beside the gateway as well: --awake (as root)
"""

import argparse
import json
import math
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from serve_rig import (
    FREE,
    Round,
    Server,
    apart,
    child,
    fake_config,
    fresh_key,
    load,
    ms,
    quiet_rounds,
    redis,
    say,
    server,
    tenant,
    verdict,
)

from headrace.core.stages import Stage

HERE = Path(__file__).resolve().parent
UPSTREAM_PORT, LITELLM_PORT = 8771, 8772
UPSTREAM = [sys.executable, str(HERE / "serve_upstream.py"), "--port", str(UPSTREAM_PORT)]
SHORT = ("--prompt", "20", "--output", "1")
# Of requests each second, where latency is looked at; and of rounds, quiet ones and all.
RATE, ROUNDS, MOST_ROUNDS = 300, 3, 9
# Until one is quiet, of what is counted by the processor's time: neighbours make each second of it worth less.
TRIES = 5
TOO_FEW = f"fewer than {ROUNDS} of {MOST_ROUNDS} rounds were quiet"
# A step every 20 ms gives each of the streams a token: steady streaming, as of a model under load. A stream takes two
# seconds: several generations of them are counted.
PACED = FREE | {"c0_s": 0.020}
OPEN_STREAMS = 5000
STREAMS = ("--prompt", "20", "--output", "100", "--warmup", "3")
# Users whose replies are equally long all end and begin in the same step, again and again: that would time a crowd of
# requests, and not what is between the tokens of streams that are independent of each other.
UNEQUAL_STREAMS = ("--prompt", "20", "--output", "uniform:50:150", "--warmup", "5")
# As many as fill the gateway's core; and a quarter of it, where what it adds to each token can be told from what two
# cores add that client, gateway and worker share.
MANY, SOME = 256, 64
# Of the fake's tokens 256 are bytes: with few others, one in ten is half a character and waits for the next.
WORDS = 60_000


Leg = Callable[[], dict[str, Any]]
Around = Callable[[Leg], Leg]


def as_it_is(leg: Leg) -> Leg:
    return leg


def wish_to_keep_awake() -> int:
    return os.open("/dev/cpu_dma_latency", os.O_WRONLY)


def kept_awake(leg: Leg) -> Leg:
    """As a gateway with `keep_awake` keeps processors while it is asked."""

    def run() -> dict[str, Any]:
        wish = wish_to_keep_awake()
        try:
            os.write(wish, bytes(4))
            return leg()
        finally:
            os.close(wish)

    return run


@contextmanager
def process(argv: list[str], url: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers at `url`."""
    started = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/v1/models", timeout=2).close()
                break
            except urllib.error.HTTPError:
                break
            except OSError:
                time.sleep(0.1)
        yield started
    finally:
        started.terminate()
        started.wait(30)


def whole(name: str, url: str, key: str, *flags: str, seconds: float) -> dict[str, Any]:
    """Requests/s with 64 at once."""
    run = load(url, key, *SHORT, "--no-stream", "--duration", str(seconds), *flags, "--users", "64")["runs"][0]
    per_cpu_s = run["gateway"]["requests_per_cpu_s"] if run["gateway"] else None
    say(f"{name}: requests/s with 64 at once", f"{run['overall']['finished_per_s']:,.0f}")
    say(f"{name}: requests per CPU-second", "–" if per_cpu_s is None else f"{per_cpu_s:,.0f}")
    return {"run": run, "per_cpu_s": per_cpu_s}


def calm(url: str, key: str, *flags: str, seconds: float) -> dict[str, Any]:
    """The latency at 300/s; endless where not all of them got their answer."""
    paced = ("--duration", str(seconds), "--rate", str(RATE), "--constant")
    found = load(url, key, *SHORT, "--no-stream", *paced, *flags)["runs"][0]["overall"]
    return _latency(found["service_s"], found)


def _latency(measured: dict[str, float] | None, found: dict[str, Any]) -> dict[str, Any]:
    kept = {name: found[name] for name in ("requests", "states", "finished_per_s")}
    if measured is None or found["states"] != {"finished": found["requests"]}:
        return kept | {"p50_s": math.inf, "p99_s": math.inf}
    return kept | {"p50_s": measured["p50"], "p99_s": measured["p99"]}


def streamed(name: str, url: str, key: str, *flags: str, seconds: float, users: int = MANY) -> dict[str, Any]:
    name = f"{name}, {users} streams"
    lengths = STREAMS if users == MANY else UNEQUAL_STREAMS
    run = load(url, key, *lengths, "--users", str(users), "--duration", str(seconds), *flags)["runs"][0]
    per_cpu_s = run["gateway"]["frames_per_cpu_s"] if run["gateway"] else None
    say(f"{name}: frames/s", f"{run['frames_per_s']:,.0f}")
    say(f"{name}: frames per CPU-second", "–" if per_cpu_s is None else f"{per_cpu_s:,.0f}")
    gaps = run["overall"]["itl_s"]
    told = "–, no stream was over" if gaps is None else f"{ms(gaps['p50'])}, {ms(gaps['p99'])}"
    say(f"{name}: time between tokens, p50 and p99", told)
    return {"run": run, "per_cpu_s": per_cpu_s}


def measure_upstream(seconds: float) -> dict[str, Any]:
    url = f"http://127.0.0.1:{UPSTREAM_PORT}"
    with process(UPSTREAM, url):
        found = {"whole": whole("bare upstream", url, "none", seconds=seconds)}
    with process([*UPSTREAM, "--gap-ms", "20"], url):
        found["streamed"] = streamed("bare upstream", url, "none", seconds=seconds)
    return found


def measure_headrace(seconds: float, more: str) -> dict[str, Any]:
    with server(fake_config(FREE, more=more)) as one:
        found = {"whole": first_quiet(partial(whole, "headrace", one.url, one.key, seconds=seconds))}
    with server(fake_config(PACED, more=more, vocab_size=WORDS)) as one:
        found["streamed"] = first_quiet(partial(streamed, "headrace", one.url, one.key, seconds=seconds))
    return found


def first_quiet(leg: Leg) -> dict[str, Any]:
    """The first that the host left alone; where none was there is no figure. The others are kept beside it."""
    quiet, disturbed = quiet_rounds(lambda _: {"leg": leg}, 1, TRIES)
    found = quiet[0]["leg"] if quiet else {"per_cpu_s": None}
    return {**found, "disturbed": [{"stolen": one["stolen"], **one["leg"]} for one in disturbed]}


def measure_apart(seconds: float) -> dict[str, Any]:
    """The latency at 300/s with the gateway alone on a core, and everything else, its client as well, on the others."""
    with apart() as place, server(fake_config(FREE)) as one:
        place(one)
        found = calm(one.url, one.key, seconds=seconds)
        stages = mean_stages(one)
    say("headrace, mean stages at 300/s", ", ".join(f"{name} {ms(mean_s)}" for name, mean_s in stages.items()))
    say("headrace, its gateway alone on a core: p50 and p99", f"{ms(found['p50_s'])}, {ms(found['p99_s'])}")
    return found


def measure_latency(seconds: float, more: str, around: Around) -> dict[str, Any]:
    """At 300/s, by turns: the bare upstream, the worker asked at its socket, and through the gateway, which stands before that
    worker. These machines change by the minute: what one adds to another is found in each round, and the median kept. What
    has no gateway runs within `around`."""
    url = f"http://127.0.0.1:{UPSTREAM_PORT}"
    with process(UPSTREAM, url), server(fake_config(FREE, more=more)) as one:
        legs = {
            "upstream": around(partial(calm, url, "none", seconds=seconds)),
            "worker": around(partial(ask_worker, one, seconds)),
            "gateway": partial(calm, one.url, one.key, seconds=seconds),
        }
        return added("latency at 300/s", *quiet_rounds(lambda _: legs, ROUNDS, MOST_ROUNDS), ("worker", "upstream"))


def measure_gaps(seconds: float, more: str, around: Around) -> dict[str, Any]:
    """The same of the time between tokens, with streams that leave the gateway idle for most of it."""
    url = f"http://127.0.0.1:{UPSTREAM_PORT}"
    with (
        process([*UPSTREAM, "--gap-ms", "20"], url),
        server(fake_config(PACED, more=more, vocab_size=WORDS)) as one,
    ):
        legs = {
            "upstream": around(partial(between_tokens, url, "none", seconds=seconds)),
            "gateway": partial(between_tokens, one.url, one.key, seconds=seconds),
        }
        return added("between tokens", *quiet_rounds(lambda _: legs, ROUNDS, MOST_ROUNDS), ("upstream",))


def between_tokens(url: str, key: str, *, seconds: float) -> dict[str, Any]:
    flags = (*UNEQUAL_STREAMS, "--users", str(SOME), "--duration", str(seconds))
    found = load(url, key, *flags)["runs"][0]["overall"]
    return _latency(found["itl_s"], found)


def added(what: str, quiet: list[Round], disturbed: list[Round], unders: tuple[str, ...]) -> dict[str, Any]:
    """What the gateway adds: the median of the quiet rounds; where they are too few there is none, for nobody can say."""
    found: dict[str, Any] = {"rounds": quiet, "disturbed": disturbed}
    for kind, rounds in (("quiet", quiet), ("disturbed", disturbed)):
        for one in rounds:
            legs = (f"{name} {ms(leg['p50_s'])} {ms(leg['p99_s'])}" for name, leg in one.items() if name != "stolen")
            say(f"{what}, p50 and p99, {kind} ({one['stolen']:.1%} stolen)", ", ".join(legs))
        for under in unders:
            for at in ("p50", "p99"):
                each = [one["gateway"][f"{at}_s"] - one[under][f"{at}_s"] for one in rounds]
                if kind == "quiet":
                    found[f"{at}_over_{under}_s"] = statistics.median(each) if len(each) == ROUNDS else None
                if each:
                    say(f"{at} over the {under}'s in {kind} rounds", ", ".join(ms(seconds) for seconds in each))
    return found


def ask_worker(one: Server, seconds: float) -> dict[str, Any]:
    argv = [sys.executable, str(HERE / "serve_worker.py"), str(worker_socket(one))]
    argv += ["--rate", str(RATE), "--seconds", str(seconds)]
    found: dict[str, Any] = json.loads(subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return found


def worker_socket(one: Server) -> Path:
    """Where its worker listens, by what the system knows of open sockets."""
    worker = child(one.pid, "headrace: worker")
    open_files = {os.readlink(each) for each in Path(f"/proc/{worker}/fd").iterdir() if each.is_symlink()}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and f"socket:[{fields[6]}]" in open_files and "worker-" in fields[7]:
            return Path(fields[7])
    sys.exit("the worker's socket was not found")


def mean_stages(one: Server) -> dict[str, float]:
    """Of all requests so far, those of the warm-up as well, where the server says that their time went."""
    requests = one.gauge("headrace_request_seconds_count") or 1.0
    sums = {
        stage.value: one.gauge(f'headrace_stage_seconds_sum{{model="fake",stage="{stage.value}"}}') for stage in Stage
    }
    return {name: seconds / requests for name, seconds in sums.items() if seconds}


def measure_open_streams() -> float:
    """Bytes of the gateway for each of many streams that are open at once, most of the time silent."""
    key = fresh_key()
    slow = FREE | {"c0_s": 0.5}
    config = fake_config(slow, slots=4096, blocks=65_536, workers=2, more=tenant("crowd", key, 'tier = "batch"'))
    with server(config) as one:
        # They come within 20 seconds and last 30: all are open at once.
        lengths = ("--prompt", "16", "--output", "60", "--warmup", "0")
        run = load(one.url, key, *lengths, "--rate", "250", "--constant", "--requests", str(OPEN_STREAMS))["runs"][0]
    gateway = run["gateway"]
    finished = run["overall"]["states"].get("finished", 0)
    each = (gateway["peak_rss_bytes"] - gateway["rss_bytes"][0]) / OPEN_STREAMS
    say(f"headrace: {finished:,} of {OPEN_STREAMS:,} open streams finished, memory for each", f"{each / 1024:,.1f} KiB")
    return each if finished == OPEN_STREAMS else float("inf")


def measure_litellm(command: str, seconds: float) -> dict[str, Any]:
    url, upstream = f"http://127.0.0.1:{LITELLM_PORT}", f"http://127.0.0.1:{UPSTREAM_PORT}"
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "litellm.yaml")
        entry = {"model": "openai/m", "api_base": f"{upstream}/v1", "api_key": "none"}
        # It does not start without a key of its own, and would compare badly with one that asks for keys.
        key = "sk-" + secrets.token_hex(16)
        models = [{"model_name": "m", "litellm_params": entry}]
        config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": key}}))
        argv = [command, "--config", str(config), "--port", str(LITELLM_PORT), "--num_workers", "1"]
        for more in ([], ["--gap-ms", "20"]):
            with process([*UPSTREAM, *more], upstream), process(argv, url) as proxy:
                flags = ("--no-ignore-eos", "--model", "m", "--pid", str(proxy.pid))
                if more:
                    found["streamed"] = streamed("LiteLLM", url, key, *flags, seconds=seconds)
                    continue
                found["whole"] = whole("LiteLLM", url, key, *flags, seconds=seconds)
                found["calm"] = calm(url, key, *flags, seconds=seconds)
                say(
                    "LiteLLM: latency at 300/s, p50 and p99",
                    f"{ms(found['calm']['p50_s'])}, {ms(found['calm']['p99_s'])}",
                )
    return found


def judge_frames(frames: float, journal: str) -> bool:
    least = 8_000 if journal.startswith("redis") else 15_000
    told = f"{frames:,.0f} frames per CPU-second of the gateway, journal {journal.partition(':')[0]}"
    return verdict(frames >= least, told, f"{least:,}")


def judge_added(latency: dict[str, Any], at: str, most_s: float) -> bool:
    """By what a client waits longer than for a bare upstream. What of it the gateway adds to its worker is told beside it
    (decision 22)."""
    over, beside = (latency[f"{at}_over_{under}_s"] for under in ("upstream", "worker"))
    if over is None:
        return verdict(False, f"at 300/s {at} over the bare upstream's: {TOO_FEW}", ms(most_s))
    told = f"at 300/s {at} over the bare upstream's: {ms(over)}, over its worker's {ms(beside)}"
    return verdict(over <= most_s, told, ms(most_s))


def judge_gaps(over: float | None, most_s: float = 5e-3) -> bool:
    told = f"p99 between tokens over the bare upstream's, {SOME} streams: {TOO_FEW if over is None else ms(over)}"
    return verdict(over is not None and over <= most_s, told, ms(most_s))


def gateway_settings(journal: str, *, awake: bool) -> str:
    return f'[gateway]\njournal = "{journal}"\nkeep_awake = {"true" if awake else "false"}'


def main_streams(seconds: float, journal: str) -> tuple[bool, dict[str, Any]]:
    with server(fake_config(PACED, more=gateway_settings(journal, awake=False), vocab_size=WORDS)) as one:
        found = {
            f"{users}": first_quiet(partial(streamed, "headrace", one.url, one.key, seconds=seconds, users=users))
            for users in (MANY, SOME)
        }
    return judge_frames(found[f"{MANY}"]["per_cpu_s"] or 0.0, journal), found


def main(litellm: str | None, seconds: float, journal: str, *, awake: bool) -> tuple[bool, dict[str, Any]]:
    more, around = gateway_settings(journal, awake=awake), kept_awake if awake else as_it_is
    found: dict[str, Any] = {"awake": awake, "upstream": measure_upstream(seconds)}
    found["headrace"] = measure_headrace(seconds, more)
    found["headrace"]["apart"] = measure_apart(seconds)
    latency = found["latency"] = measure_latency(seconds, more, around)
    gaps = found["gaps"] = measure_gaps(seconds, more, around)
    each = found["headrace"]["open_stream_bytes"] = measure_open_streams()
    if litellm is not None:
        found["litellm"] = measure_litellm(litellm, seconds)
    ours = found["headrace"]
    rate, frames = ours["whole"]["per_cpu_s"] or 0.0, ours["streamed"]["per_cpu_s"] or 0.0
    met = [
        verdict(rate >= 1000, f"{rate:,.0f} requests per CPU-second of the gateway", "1,000"),
        *(judge_added(latency, at, most_s) for at, most_s in (("p50", 1.5e-3), ("p99", 5e-3))),
        judge_frames(frames, journal),
        verdict(each <= 50 << 10, f"{each / 1024:,.1f} KiB for each of {OPEN_STREAMS:,} open streams", "50 KiB"),
        judge_gaps(gaps["p99_over_upstream_s"]),
    ]
    return all(met), found


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--litellm", help="the litellm command of an environment that has its proxy")
    flags.add_argument("--seconds", type=float, default=10.0)
    flags.add_argument("--journal", default="file", choices=("file", "memory", "redis"))
    flags.add_argument("--streams", action="store_true", help="only the frames per CPU-second")
    flags.add_argument("--awake", action="store_true", help="keep_awake, and processors kept so for what is beside it")
    flags.add_argument("--json", type=Path, help="where to keep every figure")
    given = flags.parse_args()
    if given.awake:
        if given.streams:
            flags.error("--streams are measured as the machine is, and so without --awake")
        try:
            os.close(wish_to_keep_awake())
        except OSError as error:
            flags.error(f"--awake: {error}")
        if not Path("/sys/devices/system/cpu/cpu0/cpuidle/state0").exists():
            flags.error(
                "--awake: this kernel has no driver for how processors wait, and nothing would be other than without"
            )
    with redis() if given.journal == "redis" else nullcontext(given.journal) as kept:
        if given.streams:
            ok, figures = main_streams(given.seconds, kept)
        else:
            ok, figures = main(given.litellm, given.seconds, kept, awake=given.awake)
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    sys.exit(0 if ok else 1)
