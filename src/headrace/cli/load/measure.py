"""One measurement: ask the server about itself, run the load once or in alternating pairs, check, count.

Owns the order of these. Returns a report and the raw outcomes for the picture; prints nothing.
"""

import asyncio
import os
import platform
import resource
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from msgspec import Struct, structs

from headrace import __version__
from headrace.cli.load.check import TruthReport, Vocabulary, check_truth
from headrace.cli.load.drive import Driver, RunRecord
from headrace.cli.load.facts import Facts, ask_facts, is_ready, need_vocabulary
from headrace.cli.load.figures import RunFigures, Slo, figures_of
from headrace.cli.load.http import Endpoint, Pool
from headrace.cli.load.plan import LoadPlan
from headrace.cli.load.process import server_pids
from headrace.cli.load.wording import Asked, Wording
from headrace.core.errors import HeadraceError
from headrace.core.proc import usable_cores

_PROGRESS_S = 0.5
_AGAIN_S = 0.2
# A server that starts may take a connection long before it answers.
_ANSWER_S = 1.0

# Called now and then with what the run is called and the run.
Progress = Callable[[str, Driver], None]


class Settings(Struct, frozen=True):
    """Everything that a measurement depends on besides the server."""

    endpoint: Endpoint
    plan: LoadPlan
    model: str = ""
    api: str = "chat"
    streamed: bool = True
    # Runs by whether they stream: a pair of both, again and again, to compare them.
    pairs: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True
    choices: int = 1
    truth: bool = False
    vocab_size: int | None = None
    eos_ids: tuple[int, ...] = ()
    slo: Slo | None = None
    patience_s: float = 600.0
    # For a server that is only starting.
    wait_s: float = 15.0
    connections: int = 20_000
    pids: tuple[int, ...] = ()
    extra: dict[str, object] = {}

    @property
    def order(self) -> list[bool]:
        """Whether each run streams. The second of a pair is the first of the next, so that drift cancels."""
        pairs = [(True, False) if pair % 2 == 0 else (False, True) for pair in range(self.pairs)]
        return [streamed for pair in pairs for streamed in pair] or [self.streamed]


class LoadReport(Struct, frozen=True):
    version: str
    url: str
    model: str
    api: str
    machine: str
    python: str
    cores: int
    # Of the last minute, before the load: more than the cores means that others were measured as well.
    load_average: float
    seed: int
    warmup_s: float
    runs: list[RunFigures]
    truth: TruthReport | None
    picture: str | None = None

    @property
    def is_sound(self) -> bool:
        return not (any(run.without_end for run in self.runs) or (self.truth is not None and self.truth.wrong))


class Measured(NamedTuple):
    report: LoadReport
    records: list[RunRecord]


async def measure(settings: Settings, progress: Progress, tell: Callable[[str], None]) -> Measured:
    """`tell` is given remarks for a person."""
    busy = os.getloadavg()[0]
    _allow_descriptors(settings.connections)
    facts = await _facts(settings, tell)
    asked = _asked(settings, facts)
    pids = settings.pids or tuple(server_pids(settings.endpoint.port))
    runs, records, truths = [], [], []
    order = settings.order
    for number, streamed in enumerate(order):
        name = "streamed" if streamed else "not streamed"
        label = name if len(order) == 1 else f"run {number + 1}/{len(order)}, {name}"
        wording = Wording(settings.endpoint, settings.plan, structs.replace(asked, streamed=streamed), run=number)
        record = await _run(settings, wording, pids, streamed, partial(progress, label))
        runs.append(figures_of(record, settings.plan, settings.slo, streamed=streamed))
        records.append(record)
        if settings.truth:
            vocabulary = _vocabulary(settings, facts)
            truths.append(
                check_truth(
                    record.outcomes,
                    wording,
                    vocabulary,
                    choices=settings.choices,
                    ignore_eos=settings.ignore_eos,
                )
            )
    report = LoadReport(
        version=__version__,
        url=f"{settings.endpoint.scheme}://{settings.endpoint.authority}{settings.endpoint.path}",
        model=asked.model,
        api=settings.api,
        machine=platform.machine(),
        python=platform.python_version(),
        cores=usable_cores(),
        load_average=busy,
        seed=settings.plan.seed,
        warmup_s=settings.plan.warmup_s,
        runs=runs,
        truth=_together(truths),
    )
    return Measured(report, records)


async def _facts(settings: Settings, tell: Callable[[str], None]) -> Facts:
    pool = Pool(asyncio.get_running_loop(), settings.endpoint)
    await pool.start()
    try:
        await _wait(settings, pool, tell)
        return await ask_facts(pool, settings.endpoint, settings.plan.tenants[0].key, settings.model)
    except HeadraceError as error:
        if "no connection" not in error.message:
            raise
        raise HeadraceError(f"{settings.endpoint.authority}: {error.message}; is the server running?") from None
    finally:
        await pool.close()


async def _wait(settings: Settings, pool: Pool, tell: Callable[[str], None]) -> None:
    """Until the server is ready. One that is not after its time is asked all the same, and what it says then counts."""
    loop, is_told = asyncio.get_running_loop(), False
    until_s = loop.time() + settings.wait_s
    while (left_s := until_s - loop.time()) > 0 and not await is_ready(pool, settings.endpoint, min(left_s, _ANSWER_S)):
        if not is_told:
            tell(f"waiting for {settings.endpoint.authority}, up to {settings.wait_s:g} s")
            is_told = True
        await asyncio.sleep(_AGAIN_S)


async def _run(
    settings: Settings, wording: Wording, pids: tuple[int, ...], streamed: bool, progress: Callable[[Driver], None]
) -> RunRecord:
    pool = Pool(asyncio.get_running_loop(), settings.endpoint, settings.connections)
    await pool.start()
    driver = Driver(
        pool,
        settings.plan,
        wording,
        streamed=streamed,
        choices=settings.choices,
        patience_s=settings.patience_s,
        pids=pids,
    )
    ticking = asyncio.create_task(_tick(driver, progress))
    try:
        return await driver.run()
    finally:
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        await pool.close()


async def _tick(driver: Driver, progress: Callable[[Driver], None]) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_S)
        driver.watch()
        progress(driver)


def _asked(settings: Settings, facts: Facts) -> Asked:
    vocabulary = _vocabulary(settings, facts) if settings.truth else None
    # Ids that end a sequence mean something to a template or a stop; the others are as good.
    least_eos = min(vocabulary.eos_ids, default=vocabulary.size) if vocabulary is not None else 0
    return Asked(
        model=facts.model,
        api="completions" if settings.truth else settings.api,
        temperature=settings.temperature,
        ignore_eos=settings.ignore_eos,
        choices=settings.choices,
        with_ids=settings.truth,
        ids_below=max(1, least_eos),
        tokens_per_word=facts.tokens_per_word,
        extra=settings.extra,
    )


def _vocabulary(settings: Settings, facts: Facts) -> Vocabulary:
    if settings.vocab_size is not None:
        return Vocabulary(settings.vocab_size, settings.eos_ids)
    return need_vocabulary(facts)


def _together(truths: list[TruthReport]) -> TruthReport | None:
    if not truths:
        return None
    first = next((report.first for report in truths if report.first), "")
    requests, tokens, wrong = (
        sum(getattr(report, name) for report in truths) for name in ("requests", "tokens", "wrong")
    )
    return TruthReport(requests, tokens, wrong, first)


def _allow_descriptors(connections: int) -> None:
    """As many sockets as the system lets us have, up to what is asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 256
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(hard, wanted), hard))
