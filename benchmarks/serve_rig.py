"""What the serve_*.py benchmarks share: a server of their own, the load tool, and words for what must hold.

A server is started by `headrace serve` on a free port with a configuration given here, in a folder that is thrown
away; a load is one `headrace bench serve --json` in a process of its own, so that neither disturbs the other's loop.
Whoever imports this can import what tests share as well.
"""

import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parent.parent))

HEADRACE = str(Path(sys.executable).with_name("headrace"))
# Steps that take no time worth speaking of: what is left is everything but the model.
FREE = {"c0_s": 1e-5, "c_in_s": 0.0, "c_out_s": 1e-7, "c_kv_s": 0.0, "c_att_s": 0.0}


# Of the processors' time, that others may have in a leg that is quiet: a p99 knows of one in a hundred requests.
_QUIET = 0.005


class Server(NamedTuple):
    url: str
    key: str
    pid: int

    def get(self, path: str) -> str:
        request = urllib.request.Request(self.url + path, headers={"authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.read().decode()

    def gauge(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.get("/metrics").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def fake_config(
    profile: dict[str, float],
    *,
    slots: int = 256,
    blocks: int = 32_768,
    workers: int = 1,
    more: str = "",
    vocab_size: int | None = None,
    context_len: int | None = None,
) -> str:
    costs = "\n".join(f"{name} = {value!r}" for name, value in profile.items())
    sizes = {"vocab_size": vocab_size, "context_len": context_len}
    given = "\n".join(f"{name} = {size}" for name, size in sizes.items() if size is not None)
    return f"""{more}
[[models]]
name = "fake"
runner = "fake"
workers = {workers}
[models.fake]
slots = {slots}
blocks = {blocks}
{given}
[models.fake.profile]
{costs}
"""


def tenant(name: str, key: str, more: str = "") -> str:
    return f'[[tenants]]\nname = "{name}"\nkeys = ["{hashlib.sha256(key.encode()).hexdigest()}"]\n{more}\n'


def fresh_key() -> str:
    return f"hr-{secrets.token_urlsafe(24)}"


def with_variable(name: str, value: str) -> dict[str, str]:
    return os.environ | {name: value}  # noqa: TID251 (this is the composition root)


@contextmanager
def server(config: str) -> Iterator[Server]:
    """A server that is ready. Raises CalledProcessError if it does not stop cleanly."""
    key = fresh_key()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        path = Path(folder, "headrace.toml")
        path.write_text(config)
        argv = [HEADRACE, "serve", "--config", str(path), "--port", "0", "--json"]
        environment = with_variable("HEADRACE_LOCAL_KEY", key)
        with Path(folder, "log").open("w+") as log:
            process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
            assert process.stdout is not None
            try:
                line = process.stdout.readline()
                if not line:
                    sys.exit(f"the server did not start: {Path(log.name).read_text()}")
                yield Server(json.loads(line)["url"], key, process.pid)
            finally:
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=60)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, argv)


@contextmanager
def redis() -> Iterator[str]:
    """The address of a Redis of its own, on a free port of this machine; it keeps nothing when it stops."""
    program = shutil.which("redis-server")
    if program is None:
        sys.exit("this needs redis-server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        argv = [
            program,
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            folder,
        ]
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        try:
            for _ in range(200):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(10)


@contextmanager
def apart() -> Iterator[Callable[[Server], None]]:
    """Whatever is started meanwhile keeps off one core; the function that is given puts a server's gateway there, alone.
    So its figures are its own, and not those of whoever computes beside it."""
    cores = os.sched_getaffinity(0)
    own = min(cores)
    os.sched_setaffinity(0, cores - {own} or cores)
    try:
        yield lambda one: _pin(child(one.pid, "headrace: gateway"), own)
    finally:
        os.sched_setaffinity(0, cores)


def child(parent_pid: int, title: str) -> int:
    """The process of that title which the parent started."""
    for task in Path(f"/proc/{parent_pid}/task").iterdir():
        for pid in (task / "children").read_text().split():
            if Path(f"/proc/{pid}/cmdline").read_text().startswith(title):
                return int(pid)
    sys.exit(f"{parent_pid} has no child {title!r}")


def _pin(pid: int, core: int) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def load(url: str, key: str, *flags: str) -> dict[str, Any]:
    """The report of one load. A broken promise (exit code 1) is told and kept: the caller judges."""
    argv = [HEADRACE, "bench", "serve", "--url", url, "--json", *flags]
    done = subprocess.run(
        argv, stdout=subprocess.PIPE, text=True, env=with_variable("HEADRACE_API_KEY", key), check=False
    )
    report: dict[str, Any] = json.loads(done.stdout)
    if "error" in report:
        sys.exit(f"the load failed: {report['error']['message']}")
    return report


Round = dict[str, Any]


def quiet_rounds(
    legs: Callable[[int], dict[str, Callable[[], Any]]], count: int, most: int
) -> tuple[list[Round], list[Round]]:
    """Play rounds of all legs, until so many were quiet or `most` were played: the quiet ones, and the others. Quiet is one
    in none of whose legs the host gave more than next to none of the processors' time to others; what a leg measured is
    not looked at. Each round has what was `stolen` in its worst leg."""
    quiet: list[Round] = []
    disturbed: list[Round] = []
    while len(quiet) < count and len(quiet) + len(disturbed) < most:
        played, shares = {}, []
        for name, leg in legs(len(quiet) + len(disturbed)).items():
            stolen, ticks = _ticks()
            played[name] = leg()
            stolen_later, ticks_later = _ticks()
            shares.append((stolen_later - stolen) / (ticks_later - ticks))
        is_quiet = max(shares) <= _QUIET
        (quiet if is_quiet else disturbed).append(played | {"stolen": max(shares)})
        if not is_quiet:
            say("the host took so much of the processors: it does not count", f"{max(shares):.1%}")
    return quiet, disturbed


def _ticks() -> tuple[int, int]:
    """Of all processors since they started: those that were others', and all."""
    ticks = [int(each) for each in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    return ticks[7], sum(ticks)


def say(what: str, figure: str) -> None:
    print(f"{what:<64} {figure}", flush=True)


def verdict(met: bool, told: str, target: str) -> bool:
    print(f"{'met    ' if met else 'NOT met'} {told} (target: {target})", flush=True)
    return met


def keep(path: Path | None, figures: dict[str, Any]) -> None:
    """As JSON, where it was asked for."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1, default=str) + "\n")


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"
