"""`headrace worker`: the process of one replica, as `serve` starts it. The composition root of a worker.

Owns the process's ties: its title, its signals, its parent, its share of the cores. Exit codes: 0 drained, 1 failed,
70 a step hung.
"""

import gc
import os
import signal
import socket
import threading
import time
from typing import Annotated, TypeVar

import msgspec
import typer
from msgspec.structs import replace

from headrace.cli.cores import share_cores
from headrace.cli.model_store import find_or_fetch
from headrace.cli.sweep import THRESHOLDS, Sweep, settle
from headrace.core.config import LOG_LEVELS, PROMISES, RUNNERS, EngineConfig, ModelConfig, TenantConfig
from headrace.core.errors import InvalidInput
from headrace.core.messages import WorkerCard
from headrace.core.parent import die_with_parent
from headrace.telemetry.log import LineWriter, log_to
from headrace.transport.unix import UnixNetwork
from headrace.worker.host import WorkerHost
from headrace.worker.mounting import Mount, MountedModel, Report, mount_fake, mount_torch

T = TypeVar("T")


def worker(
    address: Annotated[str, typer.Option(help="The unix socket to listen on; its folder must be 0700.")],
    model_json: Annotated[str, typer.Option(help="The model's section of the configuration, as JSON.")],
    name: Annotated[str, typer.Option(help="What it is called in logs.")] = "",
    index: Annotated[int, typer.Option(help="Which replica of its model it is.")] = 0,
    epoch: Annotated[int, typer.Option(help="Larger at each start; 0: the time.")] = 0,
    tenants_json: Annotated[str, typer.Option(help="Tenants as the engine sees them, as JSON.")] = "[]",
    engine_json: Annotated[str, typer.Option(help="What the engine promises, as JSON.")] = "{}",
    inject_json: Annotated[str, typer.Option(help="Seconds to add to stages, as JSON, to prove them.")] = "{}",
    log_level: Annotated[str, typer.Option(help=f"Least of what is logged: {', '.join(LOG_LEVELS)}.")] = "info",
    grace_s: Annotated[float, typer.Option(help="What is left this long after SIGTERM is aborted.")] = 30.0,
    parent: Annotated[int, typer.Option(help="The process it dies with; 0: whoever started it.")] = 0,
) -> None:
    """Run one replica until it is told to leave."""
    die_with_parent(parent or os.getppid())
    model = _read(model_json, ModelConfig, "--model-json")
    tenants = _read(tenants_json, tuple[TenantConfig, ...], "--tenants-json")
    inject = _read(inject_json, dict[str, float], "--inject-json")
    engine = _read(engine_json, EngineConfig, "--engine-json")
    if log_level not in LOG_LEVELS:
        raise InvalidInput(f"--log-level must be one of {', '.join(LOG_LEVELS)}", param="--log-level")
    _name_process(model.name, index)
    share_cores()
    gc.set_threshold(*THRESHOLDS)
    card = WorkerCard(name or f"{model.name} {index}", model.name, index, os.getpid(), epoch or time.time_ns())
    with LineWriter() as lines:
        log_to(lines, log_level)

        def die(code: int) -> None:
            lines.close()
            os._exit(code)

        mount = _mount(model, tenants, engine, index)
        host = WorkerHost(card, mount, UnixNetwork(), address, inject=inject, die=die, sweep=Sweep().tick)
        raise typer.Exit(_live(host, grace_s))


def _live(host: WorkerHost, grace_s: float) -> int:
    import uvloop

    # The supervisor decides what a terminal's Ctrl-C means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _drain_on_sigterm(host, grace_s)
    return host.run(uvloop.new_event_loop())


def _drain_on_sigterm(host: WorkerHost, grace_s: float) -> None:
    """By a thread that hears of signals through a socket. A handler runs when the main thread next runs Python, and
    that one may sleep on while another thread got the signal."""
    told, telling = socket.socketpair()
    telling.setblocking(False)
    signal.set_wakeup_fd(telling.detach())
    signal.signal(signal.SIGTERM, lambda *_: None)

    def wait() -> None:
        while True:
            if told.recv(1)[0] == signal.SIGTERM:
                host.drain(grace_s)

    threading.Thread(target=wait, name="signals", daemon=True).start()


def _mount(model: ModelConfig, tenants: tuple[TenantConfig, ...], engine: EngineConfig, index: int) -> Mount:
    def mount(report: Report) -> MountedModel:
        if model.runner == "fake":
            mounted = mount_fake(model, tenants, report)
        else:
            mounted = mount_torch(find_or_fetch(model.source or model.name), model, tenants, report, index)
        mounted.config = replace(mounted.config, **{name: getattr(engine, name) for name in PROMISES})
        settle()
        return mounted

    if model.runner not in RUNNERS:
        raise InvalidInput(f"runner must be one of {', '.join(RUNNERS)}", param="runner")
    return mount


def _read(text: str, kind: type[T], option: str) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"{option}: {error}", param=option) from None


def _name_process(model: str, index: int) -> None:
    from setproctitle import setproctitle

    setproctitle(f"headrace: worker {model} {index}")
