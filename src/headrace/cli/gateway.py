"""`headrace gateway`: the process that speaks HTTP, as `serve` starts it. The composition root of a gateway.

Owns the process's ties: its title, its signals, its parent. Its orders are a file in the run folder, read again
when told so. What it has to say goes to stdout, a line of JSON each.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from headrace.accounts.keys import KeyRing
from headrace.cli.sweep import THRESHOLDS, Sweep, settle
from headrace.cluster.replica import Replica
from headrace.cluster.replicas import Replicas
from headrace.control.orders import REPORT_S, Orders, Report, Step
from headrace.control.run_folder import read_orders
from headrace.core.clock import SystemClock
from headrace.core.config import Config, GatewayConfig, ModelConfig, TenantConfig
from headrace.core.errors import HeadraceError
from headrace.core.parent import die_with_parent
from headrace.core.ports import FrameSink
from headrace.core.redis_address import is_redis, redis_place
from headrace.gateway.app import Gateway, build_app
from headrace.gateway.dialects.spec import JournalDialects
from headrace.gateway.server import Face, serve
from headrace.serving.model_text import ModelText
from headrace.serving.service import Service
from headrace.streams.file_journal import FileJournal
from headrace.streams.journal import Journal
from headrace.streams.segment import segments_in
from headrace.telemetry.log import LineWriter, log_to
from headrace.telemetry.metrics import Metrics
from headrace.text.byte_vocabulary import byte_vocabulary
from headrace.text.limited import LimitedPool
from headrace.transport.unix import UnixNetwork
from headrace.weights.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from headrace.streams.redis_journal import RedisJournal

_LOG = logging.getLogger("headrace.gateway")
_MOST_DESCRIPTORS = 1 << 16
# A thread that hashes or tokenises a large prompt in Python keeps the interpreter for so long while the loop, back from the system,
# waits for it. Python's own choice is five times as long.
_SWITCH_S = 0.001
# An idle gateway writes nothing either: no longer than this was it away. And what it takes from here to the first answer.
_MOST_AWAY_S = 60.0
_START_S = 5.0


def gateway(
    run: Annotated[Path, typer.Option(help="The folder that holds the orders.")],
    fd: Annotated[int, typer.Option(help="The listening socket.")],
    index: Annotated[int, typer.Option(help="Which of the gateways it is.")],
    parent: Annotated[int, typer.Option(help="The process it dies with.")],
) -> None:
    """Answer requests until told to leave."""
    die_with_parent(parent)
    with LineWriter() as lines, LineWriter(fd=1) as reports:
        orders = read_orders(run)
        log_to(lines, orders.config.telemetry.log_level)
        _settle_in(f"gateway {index}" if orders.config.gateway.processes > 1 else "gateway")
        listener = socket.socket(fileno=fd)
        listener.set_inheritable(False)
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if runner.run(_answer(orders, run, index, listener, reports)):
                # Whatever is still open here would be ended in an orderly way, and is to go on elsewhere.
                lines.close()
                reports.close()
                os._exit(0)


async def _answer(orders: Orders, folder: Path, index: int, listener: socket.socket, reports: LineWriter) -> bool:
    """Whether it was replaced: another gateway speaks for what it has not finished."""
    stop, started, retire, hurry = (asyncio.Event() for _ in range(4))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, retire.set)
    loop.add_signal_handler(signal.SIGUSR2, _end_now, stop, hurry)
    with ExitStack() as stack:
        front = _Front(orders, folder, index, stack, reports)
        loop.add_signal_handler(signal.SIGHUP, front.reload, folder)
        await front.replicas.start()
        await front.service.warm_up()
        await front.recover()
        tasks = [asyncio.create_task(front.report(started)), asyncio.create_task(front.app.context.finding.run())]
        try:
            config = orders.config.gateway
            faces = _faces(front.app, config)
            await serve(front.app, [listener], config, stop, retire=retire, hurry=hurry, started=started, faces=faces)
        finally:
            for task in tasks:
                task.cancel()
            await front.app.context.finding.close()
            is_replaced = retire.is_set() and not stop.is_set()
            await front.replicas.close(goodbye=not is_replaced)
            await front.close()
        return is_replaced


def _end_now(stop: asyncio.Event, hurry: asyncio.Event) -> None:
    """Both: of signals that came together, that to stop is heard last."""
    hurry.set()
    stop.set()


def _faces(app: Gateway, config: GatewayConfig) -> list[Face]:
    """Besides HTTP. What a face needs is imported where there is one: gRPC takes time and memory."""
    if not config.grpc_port:
        return []
    # It would write of what strangers send, straight to stderr, and wait for who reads that; and it would follow every
    # process that is started here into its first moments.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from headrace.gateway.grpc.face import GrpcFace

    return [GrpcFace(app, config)]


class _Front:
    """What a reload reaches, wired; and what is reported of it."""

    def __init__(self, orders: Orders, folder: Path, index: int, stack: ExitStack, reports: LineWriter) -> None:
        config, clock = orders.config, SystemClock()
        self._journal: Journal | None
        self._shared: RedisJournal | None = None
        self._journal_at = ""
        if is_redis(config.gateway.journal):
            # The client takes an eighth of a gateway's start: only where it is used.
            from headrace.cli.redis import open_redis

            self._journal = self._shared = open_redis(orders, index)
            self._journal_at = redis_place(config.gateway.journal)
        else:
            self._journal = _journal(orders, folder)
        self._reports = reports
        self._version = orders.version
        self._is_listening = self._has_served = self._is_whole = False
        limited = stack.enter_context(LimitedPool())
        limited.start()
        models = [stack.enter_context(_text(model, orders, limited)) for model in config.models]

        def replicas(sink: FrameSink) -> Replicas:
            tenants = _tenants(config)
            self.replicas = Replicas(UnixNetwork(), orders.addresses, sink, clock, tenants, self._see)
            return self.replicas

        self.service = Service(
            models,
            replicas,
            clock=clock,
            secret=orders.secret,
            inject=config.inject,
            journal=self._journal,
            dialects=JournalDialects(),
        )
        self._metrics = Metrics(index=index)
        if self._journal is not None:
            self._metrics.watch_journal(lambda: self._journal is None or self._journal.is_keeping)
        self._metrics.watch_replicas(lambda: self.replicas)
        self._keys = KeyRing(config.tenants)
        self.app: Gateway = build_app(
            self.service,
            self._keys,
            config.gateway,
            self._metrics,
            clock,
            inject=config.inject,
            journal=self._shared,
            own_journal=self._journal if self._shared is None else None,
        )
        self._know(config)

    async def recover(self) -> None:
        """Go on with what an earlier life of this gateway was telling when it died, before others take it over. What
        lies in a journal of its own nobody else takes: it is looked for when this gateway answers."""
        if self._shared is None:
            return
        try:
            found = await self._shared.recover()
        except HeadraceError as error:
            told = "%s: %s: until it does, streams of an earlier life cannot be read on and new ones outlive no gateway"
            _LOG.error(told, self._journal_at, error.message)
            return
        num_streams = 0
        for kept in found:
            stream = self.service.revive(kept)
            if stream is not None:
                self.app.adopt(stream, kept.birth.grace_s)
                num_streams += 1
        if num_streams:
            _LOG.info("%d streams of an earlier life can be read on", num_streams)

    async def close(self) -> None:
        """What this gateway still speaks for may be taken over at once."""
        if self._journal is not None:
            await self._journal.close()

    async def report(self, started: asyncio.Event) -> None:
        """From when it listens on; that this loop turns is what each report proves."""
        await started.wait()
        settle()
        self._is_listening = True
        sweep = Sweep()
        while True:
            self._say()
            sweep.tick(not self.app.num_open)
            await asyncio.sleep(REPORT_S)

    def reload(self, folder: Path) -> None:
        """Asked again about orders that it follows already, it says so and nothing else happens."""
        try:
            orders = read_orders(folder)
            config = orders.config
            if orders.version == self._version:
                return self._say()
            self._keys.replace(config.tenants)
        except HeadraceError as error:
            _LOG.error("not reloaded: %s", error.message)
            return
        self.app.reconfigure(config.gateway)
        self.replicas.set_tenants(_tenants(config))
        self._know(config)
        self._version = orders.version
        self._say("the configuration was read again")

    def _see(self, replica: Replica) -> None:
        self._look()
        self.service.replica_changed(replica)

    def _look(self) -> None:
        """Whether every worker is ready."""
        is_whole = all(replica.is_ready for replica in self.replicas)
        if is_whole is not self._is_whole:
            self._is_whole = is_whole
            self._has_served = self._has_served or is_whole
            self._say()

    def _say(self, note: str = "") -> None:
        """Nothing before it listens: the first report then says it all."""
        if self._is_listening:
            step = Step.SERVING if self._has_served else Step.LISTENING
            self._reports.put(msgspec.json.encode(Report(step, self._version, note, self._is_whole)).decode())

    def _know(self, config: Config) -> None:
        self._metrics.know((model.name for model in config.models), (tenant.name for tenant in config.tenants))


def _journal(orders: Orders, folder: Path) -> Journal | None:
    config = orders.config.gateway
    if config.journal == "memory":
        return None
    place = folder / "journal"
    window_s = config.resume_s + _away_s(place)
    return FileJournal(place, orders.secret, window_s=window_s, max_bytes=config.resume_bytes)


def _away_s(journal: Path) -> float:
    """How long nobody spoke for what lies there, until this gateway answers: whoever wanted to read it could not, so that
    the time does not count."""
    written_s = [path.stat().st_mtime for _, path in segments_in(journal)]
    return min(max(0.0, time.time() - max(written_s)), _MOST_AWAY_S) + _START_S if written_s else 0.0


@contextmanager
def _text(model: ModelConfig, orders: Orders, limited: LimitedPool) -> Iterator[ModelText]:
    """The text side of a model, from its files without the weights."""
    text = _fake_text(model, limited) if model.runner == "fake" else _file_text(model, orders, limited)
    try:
        yield text
    finally:
        text.close()


def _fake_text(model: ModelConfig, limited: LimitedPool) -> ModelText:
    vocabulary = byte_vocabulary(model.fake.vocab_size)
    return ModelText.build(
        model.name,
        vocabulary,
        limited,
        context_len=model.fake.context_len,
        vocab_size=model.fake.vocab_size,
        eos_ids=() if vocabulary.eos_id is None else (vocabulary.eos_id,),
        aliases=model.aliases,
        created_s=time.time(),
    )


def _file_text(model: ModelConfig, orders: Orders, limited: LimitedPool) -> ModelText:
    checkpoint = open_checkpoint(Path(orders.sources[model.name]))
    try:
        shape = checkpoint.shape
        return ModelText.build(
            model.name,
            checkpoint.vocabulary,
            limited,
            context_len=model.context_len or shape.context_len,
            vocab_size=shape.vocab_size,
            eos_ids=shape.eos_ids,
            aliases=model.aliases,
            architecture=shape.architecture,
            created_s=time.time(),
        )
    finally:
        checkpoint.close()


def _tenants(config: Config) -> tuple[TenantConfig, ...]:
    return tuple(entry.in_engine() for entry in config.tenants)


def _settle_in(name: str) -> None:
    from setproctitle import setproctitle

    setproctitle(f"headrace: {name}")
    # What a terminal's Ctrl-C means is the supervisor's to decide; before there is a loop, told to reload is nothing.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    gc.set_threshold(*THRESHOLDS)
    sys.setswitchinterval(_SWITCH_S)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(_MOST_DESCRIPTORS, hard) if hard != resource.RLIM_INFINITY else _MOST_DESCRIPTORS
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
