"""`headrace serve`: the whole server on this machine, with one command. The composition root of the supervisor.

Owns the flags, the listening socket and the order of starting. Models are found first, so that a process is started
only for what is there.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec.structs import replace

from headrace.cli.announcement import LoadingLines, curl_line, exposure, reachable_at, ready_lines, served_models
from headrace.cli.configuration import Flags, resolve_config
from headrace.cli.console import as_text, called_as
from headrace.cli.keys import CLIENT_VARIABLE, VARIABLE, LocalKey, local_key, with_local_tenant
from headrace.cli.model_store import data_folder, find_or_fetch
from headrace.cluster.local import Command, LocalProcesses
from headrace.control.child import Child
from headrace.control.orders import Orders
from headrace.control.reload import Stamp, merge, stamp_file, watch_file
from headrace.control.run_folder import RunFolder
from headrace.control.supervisor import WORKER_GRACE_S, Supervisor
from headrace.core.clock import SystemClock
from headrace.core.config import LOG_LEVELS, RUNNERS, Config, GatewayConfig, ModelConfig, check_config
from headrace.core.errors import HeadraceError, InvalidInput
from headrace.core.proc import usable_cores
from headrace.telemetry.log import LineWriter, log_to
from headrace.transport.unix import UnixNetwork

_LOG = logging.getLogger("headrace.control")
_BACKLOG = 2048


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0 takes a free one. [default: 8080]")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port for gRPC; 0 is none. [default: 0]")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model's name, a path, or NAME=SOURCE; may be repeated. [default: default]"),
    ] = None,
    runner: Annotated[str | None, typer.Option(help=f"What computes: {' or '.join(RUNNERS)}.")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="auto, cuda or cpu; auto takes a CUDA card that can be used. [default: auto]"),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto, fp32, int8 or int4; on a card bf16 or fp8. [default: auto]")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, max=256, help="Processes per model. [default: 1]")] = None,
    gateways: Annotated[
        int | None, typer.Option(min=1, max=64, help="Processes that answer; several need Redis. [default: 1]")
    ] = None,
    journal: Annotated[
        str | None,
        typer.Option(
            help="Where streams are kept: file, memory, or the address of a Redis; one with a password belongs into the file of --config. [default: file]"
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file; flags go over it. Read again when it changes.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its private key, PEM.")] = None,
    log_level: Annotated[
        str | None, typer.Option(help=f"Least of what is logged: {', '.join(LOG_LEVELS)}. [default: info]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout when it is up.")] = False,
) -> None:
    """Start the server: an OpenAI-compatible API, and a chat page, over a model on this machine."""
    started_s = time.perf_counter()
    # Asked for a restart before there is anything to restart, it would be ended by the system.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    flags = Flags(
        host=host,
        port=port,
        models=tuple(model or ()),
        runner=runner,
        device=device,
        dtype=dtype,
        workers=workers,
        tls_cert=tls_cert,
        tls_key=tls_key,
        grpc_port=grpc_port,
        processes=gateways,
        journal=journal,
        log_level=log_level,
    )
    home = data_folder()
    key = local_key(home)

    def read() -> Config:
        wanted = with_local_tenant(resolve_config(config, flags), key.key)
        check_config(wanted)
        check_tls(wanted.gateway)
        return wanted

    # Before it is read: what changes meanwhile is then seen as a change.
    stamp = None if config is None else stamp_file(config)
    tree = read()
    with closing(bind(tree.gateway)) as listener, ExitStack() as stack:
        if tree.gateway.grpc_port:
            stack.enter_context(closing(reserve(tree.gateway)))
        sources = find_models(tree)
        with RunFolder(home) as folder, LineWriter() as lines, LineWriter(fd=1) as results:
            log_to(lines, tree.telemetry.log_level)
            server = Server(
                tree, sources, folder, listener, key, read, config, stamp, started_s, as_json, lines, results
            )
            code = asyncio.run(server.run())
    raise typer.Exit(code)


def find_models(config: Config) -> dict[str, str]:
    """The files of every model that has any, fetched if they are not here; looked at before a process needs them."""
    from headrace.weights.checkpoint import open_checkpoint

    sources = {}
    for model in config.models:
        if model.runner == "torch":
            path = find_or_fetch(model.source or model.name)
            open_checkpoint(path).close()
            sources[model.name] = str(path)
    return sources


def bind(gateway: GatewayConfig) -> socket.socket:
    """Taken before anything is fetched or loaded: a port that is not free must be known at once."""
    listener = _bound(gateway.host, gateway.port, "--port")
    listener.listen(_BACKLOG)
    return listener


def reserve(gateway: GatewayConfig) -> socket.socket:
    """gRPC opens its port by itself, and shares it: to be kept, so that nobody else takes it while no gateway is there."""
    if gateway.grpc_port == gateway.port:
        raise InvalidInput("--grpc-port and --port must be two ports", param="--grpc-port")
    # Whoever shares it too would not be noticed otherwise.
    _bound(gateway.host, gateway.grpc_port, "--grpc-port").close()
    return _bound(gateway.host, gateway.grpc_port, "--grpc-port", is_shared=True)


def _bound(host: str, port: int, flag: str, *, is_shared: bool = False) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise InvalidInput(f"--host {host}: {getattr(error, 'strerror', error)}", param="--host") from None
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        told = "--host" if error.errno == errno.EADDRNOTAVAIL else flag
        raise HeadraceError(f"cannot listen on {host}:{port}: {error.strerror}; {told} takes another") from None
    return found


def check_tls(gateway: GatewayConfig) -> None:
    if gateway.tls_cert is None or gateway.tls_key is None:
        return
    for flag, path in (("--tls-cert", gateway.tls_cert), ("--tls-key", gateway.tls_key)):
        try:
            Path(path).open("rb").close()
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{path}: {getattr(error, 'strerror', None) or error}", param=flag) from None
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(gateway.tls_cert, gateway.tls_key, "")
    except (OSError, ssl.SSLError, ValueError) as error:
        what = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        message = f"{gateway.tls_cert} and {gateway.tls_key} are no certificate with its key: {what}"
        raise InvalidInput(message, param="--tls-cert") from None


@dataclass(slots=True)
class Server:
    """The supervisor's wiring, and what it says to a person who starts or stops it: remarks through `lines`, that it is up
    through `results`. Neither waits for who reads them. What happens in between is logged."""

    config: Config
    sources: dict[str, str]
    folder: RunFolder
    listener: socket.socket
    key: LocalKey
    read: Callable[[], Config]
    file: Path | None
    stamp: Stamp | None
    started_s: float
    as_json: bool
    lines: LineWriter
    results: LineWriter
    version: int = 0
    clock: SystemClock = field(default_factory=SystemClock)
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    workers: list[Child] = field(default_factory=list)
    was_up: bool = False

    async def run(self) -> int:
        _name_process()
        self.folder.write_orders(self._orders())
        models = enumerate(self.config.models)
        self.workers = [self._worker(place, model, index) for place, model in models for index in range(model.workers)]
        loading = LoadingLines(self._tell_loading, self.clock)
        keys = (VARIABLE, CLIENT_VARIABLE)
        environment = {name: value for name, value in os.environ.items() if name not in keys}
        supervisor = Supervisor(
            [self._gateway(index) for index in range(self.config.gateway.processes)],
            self.workers,
            LocalProcesses(environment),
            UnixNetwork(),
            self.clock,
            gateway_s=self.config.gateway.closing_s,
            tell=_LOG.info,
            warn=_LOG.warning,
            heard=lambda child, beat: loading.heard(child.name, beat),
            up=self._announce,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, supervisor)
        loop.add_signal_handler(signal.SIGUSR2, supervisor.roll)
        if self.file is None:
            # Nothing to read again: then it is the terminal that was closed.
            loop.add_signal_handler(signal.SIGHUP, self._stop, supervisor)
            return await supervisor.run()
        loop.add_signal_handler(signal.SIGHUP, self._reload, supervisor)
        watch = asyncio.create_task(watch_file(self.file, self.stamp, lambda: self._reload(supervisor)))
        try:
            return await supervisor.run()
        finally:
            watch.cancel()

    def _stop(self, supervisor: Supervisor) -> None:
        is_second = supervisor.is_stopping
        self.lines.put(
            "ended at once" if is_second else "stopping: open streams may finish; once more ends them at once"
        )
        # Nobody else comes in: with the gateways' copies closed as well, connections are refused.
        self.listener.close()
        supervisor.stop()

    def _reload(self, supervisor: Supervisor) -> None:
        try:
            config, waiting = merge(self.config, self.read())
        except HeadraceError as error:
            _LOG.warning("the configuration stays as it was: %s", error.message)
            return
        if waiting:
            _LOG.warning("these take effect at the next start: %s", ", ".join(waiting))
        if config != self.config:
            self.config = config
            self.version += 1
            self.folder.write_orders(self._orders())
            supervisor.reload_gateways(self.version)

    def _orders(self) -> Orders:
        addresses = {
            model.name: tuple(self.folder.worker_address(place, index) for index in range(model.workers))
            for place, model in enumerate(self.config.models)
        }
        return Orders(self.config, self.sources, addresses, self.secret, self.version)

    def _gateway(self, index: int) -> Child:
        def command() -> Command:
            fd = self.listener.fileno()
            words = {
                "--run": str(self.folder.path),
                "--fd": str(fd),
                "--index": str(index),
                "--parent": str(os.getpid()),
            }
            return Command(("gateway", *(word for pair in words.items() for word in pair)), fds=(fd,), talks=True)

        return Child("gateway" if self.config.gateway.processes == 1 else f"gateway {index}", command)

    def _worker(self, place: int, model: ModelConfig, index: int) -> Child:
        address = self.folder.worker_address(place, index)
        told = replace(model, source=self.sources.get(model.name, ""), threads=model.threads or self._threads())

        def command() -> Command:
            tenants = [entry.in_engine() for entry in self.config.tenants]
            words = {
                "--name": f"{model.name} {index}",
                "--model-json": _json(told),
                "--index": str(index),
                "--address": address,
                "--epoch": str(time.time_ns()),
                "--tenants-json": _json(tenants),
                "--engine-json": _json(self.config.engine),
                "--inject-json": _json(self.config.inject),
                "--log-level": self.config.telemetry.log_level,
                "--grace-s": str(WORKER_GRACE_S - 1.0),
                "--parent": str(os.getpid()),
            }
            return Command(("worker", *(word for pair in words.items() for word in pair)))

        return Child(f"worker {model.name} {index}", command, address)

    def _threads(self) -> int:
        """Several models share the cores; one alone takes what it likes."""
        computing = sum(model.workers for model in self.config.models if model.runner == "torch")
        return max(1, usable_cores() // computing) if computing > 1 else 0

    def _tell_loading(self, line: str) -> None:
        """To who waits for the start; a worker that comes back later is nobody's to wait for."""
        if self.was_up:
            _LOG.info(line)
        else:
            self.lines.put(line)

    def _announce(self) -> None:
        self.was_up = True
        address = reachable_at(self.config.gateway, self.listener.getsockname()[1])
        cards = [child.beat.card for child in self.workers if child.beat is not None]
        models = served_models(self.config.models, cards)
        seconds = time.perf_counter() - self.started_s
        if remark := exposure(self.config.gateway):
            self.lines.put(remark)
        if self.as_json:
            document = {
                "url": address.url,
                "grpc": address.grpc,
                "key_file": as_text(self.key.path),
                "models": models,
                "gateways": self.config.gateway.processes,
                "pid": os.getpid(),
                "ready_s": seconds,
                "curl": curl_line(address, self.key, models[0].name),
            }
            self.results.put(_json(document))
        else:
            show_key = sys.stdout.isatty()
            for line in ready_lines(address, self.key, models, seconds, show_key=show_key, command=called_as()):
                self.results.put(line)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _name_process() -> None:
    from setproctitle import setproctitle

    setproctitle("headrace: supervisor")
