"""A crowd of streams over HTTP beside the engine alone: the same random model, load and card, one after the other.

usage: python benchmarks/gpu/serve_http.py [--shape 8b|tiny] [--device cuda|cpu] [--redis PATH] [--json PATH]
Writes a model's folder, runs `headrace bench engine` on it, starts `headrace serve` with two gateways and its journal in
Redis, and lets all clients, in processes of their own, ask at once. What must hold: tokens/s over HTTP at least 85 % of
the engine's, and ready within 15 s of the process's start, its files in the system's cache: the first time, when no kernel
has been compiled, and the second. With --bytecode packages that have none get theirs first, as if pip had installed them.
Who used how much of a core is told. The whole of it runs on a CPU: --shape tiny --device cpu.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bytecode import make_bytecode
from crowd import MODEL, Started, clients, crowd, tell
from random_folder import SHAPES, first_special_id, write_random_folder

sys.path.append(str(Path(__file__).resolve().parent.parent))
from serve_rig import fresh_key, keep, ms, say, tenant, verdict, with_variable

from headrace.cli.load.process import server_pids, usage_of

HEADRACE = (sys.executable, "-m", "headrace.cli.main")
LEAST_SHARE, MOST_READY_S = 0.85, 15.0
# Requests, prompt and output tokens: of the load, and of what goes before it.
LOADS = {"8b": (256, 128, 256), "tiny": (12, 48, 32)}
WARM = (8, 64, 16)
START_S, STOP_S = 400.0, 90.0


@contextmanager
def redis(programs: list[str]) -> Iterator[tuple[str, int]]:
    """Address and process of the first of these that runs here, its own libraries beside it. It keeps nothing."""
    for program in programs:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        beside = Path(program).resolve().parent / "lib"
        environment = with_variable("LD_LIBRARY_PATH", str(beside)) if beside.is_dir() else None
        argv = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        try:
            process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, env=environment)
        except OSError as error:
            print(f"{program}: {error}", flush=True)
            continue
        try:
            if _answers(process, port):
                yield f"redis://127.0.0.1:{port}", process.pid
                return
            print(f"{program}: ended with {process.poll()}", flush=True)
        finally:
            process.terminate()
            process.wait(10)
    sys.exit("two gateways need a redis-server: name one that runs here with --redis, or ask for --gateways 1")


def _answers(process: "subprocess.Popen[bytes]", port: int) -> bool:
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return True
        if process.poll() is not None:
            return False
        time.sleep(0.05)
    return False


def engine_alone(folder: Path, device: str, load: tuple[int, ...], rounds: int) -> dict[str, Any]:
    argv = [*HEADRACE, "bench", "engine", "--model", str(folder), "--device", device, "--slots", str(load[0]), "--json"]
    for each in (WARM, *[load] * rounds):
        argv += ["--load", ":".join(map(str, each))]
    since_s = time.perf_counter()
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout)
    found = report["loads"][1:]
    rates = [each["output_tokens_per_s"] for each in found]
    say("engine alone: output tokens/s", ", ".join(f"{rate:,.0f}" for rate in rates))
    say(
        "engine alone: time between tokens, p50 and p99",
        f"{ms(found[-1]['itl_s']['p50'])}, {ms(found[-1]['itl_s']['p99'])}",
    )
    say(
        "engine alone: ready after",
        f"{report['model']['ready_s']:.1f} s, kernels compiled in it if there were none yet",
    )
    return {"tokens_per_s": median(rates), "wall_s": time.perf_counter() - since_s, **report}


@contextmanager
def server(folder: Path, home: Path, device: str, slots: int, gateways: int, journal: str) -> Iterator[Started]:
    """`headrace serve`, ready; how long it took from the start of its process, and what it said when. Kernels that it
    compiles are for this home alone."""
    key = fresh_key()
    config = home / "headrace.toml"
    config.write_text(
        f"[gateway]\nprocesses = {gateways}\njournal = {json.dumps(journal)}\n"
        # The tier of the engine's own benchmark: nobody is promised a first token sooner than a crowd's work allows.
        + tenant("crowd", key, 'tier = "batch"\nscopes = ["metrics"]')
        + f"[[models]]\nname = {json.dumps(MODEL)}\nsource = {json.dumps(str(folder))}\n"
        + f"device = {json.dumps(device)}\nslots = {slots}\n"
    )
    argv = [*HEADRACE, "serve", "--config", str(config), "--port", "0", "--json"]
    environment = with_variable("HEADRACE_HOME", str(home)) | {
        "HEADRACE_LOCAL_KEY": fresh_key(),
        "TRITON_CACHE_DIR": str(home / "kernels"),
    }
    since_s = time.perf_counter()
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None and process.stderr is not None
    lines: list[tuple[float, str]] = []
    listening = threading.Thread(target=_listen, args=(process.stderr, since_s, lines), daemon=True)
    listening.start()
    giving_up = threading.Timer(START_S, process.kill)
    giving_up.start()
    try:
        said = process.stdout.readline()
        giving_up.cancel()
        if not said:
            sys.exit("the server did not start:\n" + "\n".join(line for _, line in lines))
        told = json.loads(said)
        _wait_ready(told["url"])
        start = {"ready_s": time.perf_counter() - since_s, "told_s": told["ready_s"], "lines": lines[:]}
        for at_s, line in lines:
            print(f"  {at_s:6.2f} s  {line}", flush=True)
        yield Started(told["url"], key, int(told["url"].rpartition(":")[2]), start)
    finally:
        giving_up.cancel()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
        for at_s, line in lines[len(lines) if process.returncode == 0 else 0 :]:
            print(f"  {at_s:6.2f} s  {line}", flush=True)


def _listen(stream: Any, since_s: float, lines: list[tuple[float, str]]) -> None:
    for line in stream:
        lines.append((round(time.perf_counter() - since_s, 3), line.rstrip()))


def _wait_ready(url: str) -> None:
    while True:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()
            return
        except urllib.error.HTTPError:
            time.sleep(0.01)


def measure(options: argparse.Namespace, folder: Path, home: Path, found: dict[str, Any]) -> None:
    """Puts every figure into `found` as soon as there is one."""
    shape, load = SHAPES[options.shape], load_of(options)
    found |= {"shape": options.shape, "load": dict(zip(("requests", "prompt", "output"), load, strict=True))}
    found |= {"gateways": options.gateways, "clients": options.clients}
    with ExitStack() as stack:
        # First what may not be there.
        journal, redis_pids = "file", []
        if options.gateways > 1:
            programs = options.redis or [program for program in [shutil.which("redis-server")] if program]
            journal, pid = stack.enter_context(redis(programs))
            redis_pids = [pid]
        if options.bytecode:
            made = found["bytecode"] = make_bytecode()
            say("packages that had no bytecode", f"{len(made['made_for'])}, made in {made['seconds']:.1f} s")
            if made["not_made_for"]:
                say("packages that have none still", ", ".join(made["not_made_for"]))
        since_s = time.perf_counter()
        size = write_random_folder(folder, shape, options.shards)
        written_s = time.perf_counter() - since_s
        found["folder"] = {"bytes": size, "shards": options.shards, "written_s": written_s}
        say(f"{size / 1e9:.2f} GB of weights in {options.shards} shards written in", f"{written_s:.1f} s")
        found["engine"] = engine_alone(folder, options.device, load, options.rounds)
        found["journal"] = journal.partition(":")[0]
        with server(folder, home, options.device, load[0], options.gateways, journal) as one:
            found["first_start"] = tell_start("first start, nothing compiled", one)
        one = stack.enter_context(server(folder, home, options.device, load[0], options.gateways, journal))
        found["start"] = tell_start("second start", one)
        watched = [*filter(_is_ours, server_pids(one.port)), *redis_pids]
        ids_below = first_special_id(shape)
        with clients(one, 1, WARM, ids_below) as asking:
            crowd(asking, 0, watched)
        rounds = found["rounds"] = []
        with clients(one, options.clients, load, ids_below) as asking:
            for number in range(1, options.rounds + 1):
                rounds.append(crowd(asking, number, watched))
                tell(rounds[-1], number)
    found["tokens_per_s"] = median(round_["tokens_per_s"] for round_ in rounds)


def tell_start(name: str, one: Started) -> dict[str, Any]:
    ready_s, told_s = one.start["ready_s"], one.start["told_s"]
    say(f"server, {name}: ready after", f"{ready_s:.2f} s from its process's start, by its own clock {told_s:.2f} s")
    return one.start


def load_of(options: argparse.Namespace) -> tuple[int, ...]:
    given = (options.requests, options.prompt, options.output)
    return tuple(asked or usual for asked, usual in zip(given, LOADS[options.shape], strict=True))


def _is_ours(pid: int) -> bool:
    usage = usage_of(pid)
    return usage is not None and usage.title.startswith("headrace: ")


def about() -> dict[str, Any]:
    found: dict[str, Any] = {"python": sys.version.split()[0], "cores": len(os.sched_getaffinity(0))}
    try:
        import torch

        found |= {
            "torch": torch.__version__,
            "card": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        }
    except ImportError:
        pass
    return found


def judge(found: dict[str, Any]) -> bool:
    share = found["share_of_engine"] = found["tokens_per_s"] / found["engine"]["tokens_per_s"]
    first_s, ready_s = found["first_start"]["ready_s"], found["start"]["ready_s"]
    made = len(found.get("bytecode", {}).get("made_for", ()))
    of = f", bytecode of {made} packages made before" if made else ""
    worst = found["rounds"][-1]["itl_s"]["p99"]
    say("time between pieces over HTTP, p99 of the last round", ms(worst))
    met = [
        verdict(not any(round_["num_bad"] for round_ in found["rounds"]), "every stream finished", "all"),
        verdict(share >= LEAST_SHARE, f"over HTTP {share:.1%} of the engine's output tokens/s", f"{LEAST_SHARE:.0%}"),
        verdict(
            first_s <= MOST_READY_S,
            f"first ready {first_s:.1f} s after its process started{of}",
            f"{MOST_READY_S:g} s",
        ),
        verdict(ready_s <= MOST_READY_S, f"ready {ready_s:.1f} s after its process started{of}", f"{MOST_READY_S:g} s"),
    ]
    return all(met)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--redis", action="append", help="a redis-server; given again, the first that runs is taken")
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--clients", type=int, default=6, help="processes that ask")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--prompt", type=int)
    parser.add_argument("--output", type=int)
    parser.add_argument("--shards", type=int, default=4, help="as Llama-3-8B comes in")
    parser.add_argument("--folder", type=Path, help="where the model goes; a temporary folder if not said")
    parser.add_argument("--bytecode", action="store_true", help="make what packages lack of it, as pip does; it stays")
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"commit": options.commit}
    with tempfile.TemporaryDirectory(prefix="headrace-http-") as scratch:
        home = Path(scratch, "home")
        home.mkdir()
        try:
            measure(options, options.folder or Path(scratch, "model"), home, found)
        finally:
            # Last: asking for a card's name takes memory of it.
            found |= about()
            keep(options.json, found)
    met = judge(found)
    keep(options.json, found)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
