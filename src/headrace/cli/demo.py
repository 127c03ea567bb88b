"""`headrace demo`: the simulator's demonstration, in which nothing listens; others are commands below it.

Owns the demonstration's scenario and how it is shown while it runs. The world is the simulator's;
virtual time is slowed down so that a person can watch it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from headrace.cli.console import as_text, check_finite, note, picture_target, print_json
from headrace.cli.demo_failover import failover
from headrace.core.config import EngineConfig
from headrace.sim.arrivals import Poisson, Together
from headrace.sim.picture import Caption, draw_slots
from headrace.sim.report import Quantiles, Summary, summarise
from headrace.sim.scenario import Scenario, TenantLoad, WorkerDeath, check_scenario
from headrace.sim.spans import SlotRecorder
from headrace.sim.world import World

if TYPE_CHECKING:
    from headrace.sim.replica import Replica

PICTURE = Path("headrace-demo.png")
HEADLINE = "headrace demo: the simulator's demonstration under a virtual clock; nothing listens."

_FLOOD_AT_S, _FLOOD = 4.0, 200
_DEATH_AT_S, _RESTART_S = 7.0, 3.0
_DURATION_S = 16.0
# The last arrivals need a few seconds more.
_END_S = 20.0
# The flood is willing to wait, so that it is queued and not refused.
_PATIENCE_S = 600.0
_REFRESH_S = 0.1
_LINE_EVERY_S = 0.5

demo = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
demo.command()(failover)


@demo.callback()
def scheduler(
    context: typer.Context,
    seconds: Annotated[
        float, typer.Option(min=0, max=3600, help="Wall time it takes; 0 runs as fast as it can.")
    ] = 5.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every random draw.")] = 0,
    picture: Annotated[Path | None, typer.Option(help=f"Where the slots are drawn. [default: {PICTURE}]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """Watch the scheduler at work in the simulator, for a few seconds.

    Two tenants on two workers of 16 slots: one sends short requests with a few very long replies
    among them, the other floods; then a worker dies and its streams go on elsewhere.
    """
    if context.invoked_subcommand is not None:
        return
    check_finite(seconds=seconds)
    target = picture_target(picture, PICTURE)
    scenario = demonstration(seed)
    if as_json:
        note(HEADLINE)
    else:
        print(HEADLINE, flush=True)
    recorder = _Pacer(scenario.engine.slots, seconds / _END_S)
    world = World(scenario, detail=True, recorder=recorder)
    started_s = time.perf_counter()
    with _Watch(world, recorder):
        world.run()
    summary = summarise(world, time.perf_counter() - started_s, world.verify())
    if target is not None:
        draw_slots(recorder.spans(), _caption(summary), target)
    if as_json:
        print_json({"summary": summary, "picture": as_text(target)})
    else:
        _print(summary, target)


def demonstration(seed: int) -> Scenario:
    """A light interactive tenant with stragglers, a flood beside it, and the death of a worker under load."""
    acme = TenantLoad(
        name="acme",
        arrivals=Poisson(14.0),
        prompt="lognormal:120:0.6:16:800",
        output="mix:0.98*lognormal:40:0.6:5:150+0.02*1200",
        stop_share=1.0,
        max_tokens=1200,
    )
    bulk = TenantLoad(
        name="bulk",
        arrivals=Together(_FLOOD),
        start_s=_FLOOD_AT_S,
        prompt="lognormal:600:0.4:100:2000",
        output="lognormal:120:0.4:20:400",
        ttft_target_s=_PATIENCE_S,
    )
    scenario = Scenario(
        name="demonstration",
        seed=seed,
        duration_s=_DURATION_S,
        workers=2,
        engine=EngineConfig(slots=16, blocks=1024, max_queue_s=_PATIENCE_S),
        tenants=(acme, bulk),
        happenings=(WorkerDeath(_DEATH_AT_S, worker=1, restart_s=_RESTART_S),),
    )
    check_scenario(scenario)
    return scenario


class _Pacer(SlotRecorder):
    """Records the slots of worker 0 and, at the end of each of its steps, lets wall time catch up."""

    def __init__(self, num_slots: int, wall_per_virtual: float) -> None:
        super().__init__(num_slots)
        self._wall_per_virtual = wall_per_virtual
        self._started_s = time.perf_counter()
        self.show: Callable[[], None] = lambda: None

    def ended(self, start_ns: int, end_ns: int) -> None:
        super().ended(start_ns, end_ns)
        ahead_s = end_ns / 1e9 * self._wall_per_virtual - (time.perf_counter() - self._started_s)
        if ahead_s > 0.0:
            time.sleep(ahead_s)
        self.show()


class _Watch:
    """What a person sees meanwhile, on stderr: a live table on a terminal, else a line now and then."""

    def __init__(self, world: World, pacer: _Pacer) -> None:
        self._world = world
        self._tally = _Tally(world)
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._every_s = _REFRESH_S if self._console.is_terminal else _LINE_EVERY_S
        self._shown_s = 0.0
        pacer.show = self._show

    def __enter__(self) -> None:
        if self._console.is_terminal:
            self._live.start()

    def __exit__(self, *_: Any) -> None:
        self._live.stop()

    def _show(self) -> None:
        now_s = time.perf_counter()
        if now_s - self._shown_s < self._every_s:
            return
        self._shown_s = now_s
        rows = self._tally.rows()
        if self._console.is_terminal:
            self._live.update(self._table(rows), refresh=True)
            return
        parts = (
            f"{name} {slots} slots, {waiting} waiting, {speed:,.0f} tokens/s" for name, slots, waiting, speed in rows
        )
        note(f"{self._world.clock.now_s():5.1f} s  {' | '.join(parts)}{_happening(self._world)}")

    def _table(self, rows: list[tuple[str, int, int, float]]) -> Table:
        title = f"virtual time {self._world.clock.now_s():.1f} s{_happening(self._world)}"
        table = Table(title=title, title_justify="left", width=72)
        table.add_column("tenant")
        for name in ("slots", "waiting", "tokens/s"):
            table.add_column(name, justify="right")
        for name, slots, waiting, speed in rows:
            table.add_row(name, f"{slots}", f"{waiting}", f"{speed:,.0f}")
        return table


class _Tally:
    """Slots, waiting requests and delivered tokens of each tenant, as they stand."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._delivered = np.zeros(len(world.scenario.tenants), np.int64)
        self._at_s = 0.0

    def rows(self) -> list[tuple[str, int, int, float]]:
        """Name, slots, waiting and tokens/s since last asked."""
        names = [tenant.name for tenant in self._world.scenario.tenants]
        slots, waiting, delivered = (np.zeros(len(names), np.int64) for _ in range(3))
        for replica in self._world.replicas:
            if not replica.dead:
                _count(replica, slots, waiting, delivered)
        records = self._world.book.records
        tokens = records.column("emitted") + records.column("replayed")
        np.add.at(delivered, records.column("tenant"), tokens)
        now_s = self._world.clock.now_s()
        speeds = (delivered - self._delivered) / max(now_s - self._at_s, 1e-9)
        self._delivered, self._at_s = delivered, now_s
        return list(zip(names, slots.tolist(), waiting.tolist(), speeds.tolist(), strict=True))


def _count(replica: Replica, slots: Any, waiting: Any, delivered: Any) -> None:
    running = set(replica.engine.slot_numbers.tolist())
    for number, client in replica.clients.items():
        (slots if number in running else waiting)[client.tenant] += 1
        delivered[client.tenant] += replica.num_delivered(client)


def _happening(world: World) -> str:
    """What is special about this instant, in words."""
    now_s = world.clock.now_s()
    if _DEATH_AT_S <= now_s < _DEATH_AT_S + _RESTART_S:
        return "  — worker 1 has died; its streams go on at worker 0"
    if _DEATH_AT_S + _RESTART_S <= now_s < _DEATH_AT_S + _RESTART_S + 1:
        return "  — worker 1 is back"
    if _FLOOD_AT_S <= now_s < _FLOOD_AT_S + 2:
        return f"  — bulk floods with {_FLOOD} requests at once"
    return ""


def _caption(summary: Summary) -> Caption:
    acme = summary.tenants[0]
    return Caption(
        f"Demonstration: {summary.slots} slots of worker 0 under two tenants, a colour per request",
        f"bulk floods at {_FLOOD_AT_S:g} s, worker 1 dies at {_DEATH_AT_S:g} s and is back at "
        f"{_DEATH_AT_S + _RESTART_S:g} s · acme's first token: p99 {_ms(acme.ttft_s.p99)} · "
        f"{summary.requests.finished} of {summary.requests.arrived} requests finished, every stream verified",
    )


def _print(summary: Summary, target: Path | None) -> None:
    console = Console()
    table = Table(title="what the tenants got", title_justify="left")
    table.add_column("tenant")
    for name in ("finished", "refused", "tokens/s", "first token p50", "p99"):
        table.add_column(name, justify="right")
    for row in summary.tenants:
        finished = f"{row.requests.finished} of {row.requests.arrived}"
        speed = f"{row.output_tokens_per_s:,.0f}"
        table.add_row(row.tenant, finished, f"{row.requests.refused}", speed, *_first_token(row.ttft_s))
    console.print(table)
    busy = summary.slot_occupancy_while_waiting
    lines = [
        f"{summary.output_tokens:,} tokens in {summary.virtual_s:.1f} virtual seconds; slots occupied "
        f"{'–' if busy is None else f'{busy:.1%}'} while anything waited",
        f"{summary.replays} streams moved when worker 1 died; all {summary.verified} streams are token for token "
        "what their prompts must give",
        f"trace hash {summary.trace_hash} (same seed, same hash)",
    ]
    if target is not None:
        lines.append(f"picture: {as_text(target)}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _first_token(times: Quantiles) -> tuple[str, str]:
    return _ms(times.p50), _ms(times.p99)


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value * 1e3:,.0f} ms"
