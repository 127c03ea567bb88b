"""`headrace bench engine --profile`: a load once more under the trace and once under torch's profiler; files and tables.

Owns where the files go and how the tables look. Spans are `step_trace`'s, operators `operators`'.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from headrace.cli.engine_bench import EngineFigures, Load, make_requests, run_load
from headrace.cli.operators import OperatorTimes, watch_operators
from headrace.cli.step_trace import PARTS, StepTrace, TracedRunner
from headrace.core.errors import InvalidInput
from headrace.engine.loop import Engine

if TYPE_CHECKING:
    from rich.console import Console

    from headrace.cli.local import LocalModel


class LoadProfile(Struct, frozen=True):
    """Seconds of all turns by part, in the order of `PARTS`; the traces' file names."""

    load: str
    turns: int
    parts_s: dict[str, float]
    operators: OperatorTimes
    steps_trace: str
    operators_trace: str


def open_folder(folder: Path) -> None:
    """Before a model is loaded."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".probe").touch()
        (folder / ".probe").unlink()
    except OSError as error:
        raise InvalidInput(f"--profile: {folder}: {error.strerror or error}", param="--profile") from None


def profile_load(local: LocalModel, load: Load, seed: int, folder: Path) -> tuple[EngineFigures, LoadProfile]:
    """The figures are those of the traced run, which costs a few clock reads a step."""
    runner = TracedRunner(local.runner, local.clock)
    trace = StepTrace(runner)
    traced = replace(local, engine=Engine(local.config, runner), times=runner.times)
    figures = run_load(traced, load, seed, trace)
    name = re.sub(r"[^A-Za-z0-9_-]+", "x", load.name)
    steps, operators = folder / f"steps-{name}.json", folder / f"operators-{name}.json"
    trace.write(steps, f"{local.headline}: {load.name}")
    requests = make_requests(load, local.config.vocab_size, local.config.context_len, seed)
    times = watch_operators(local, requests, operators)
    found = LoadProfile(load.name, trace.num_turns, trace.totals_s, times, steps.name, operators.name)
    return figures, found


def print_load_profile(found: LoadProfile, folder: Path, console: Console) -> None:
    from rich import box
    from rich.table import Table

    whole_s = sum(found.parts_s.values())
    console.print(f"{found.load}: where {found.turns:,} turns of the loop went, {whole_s:,.2f} s", highlight=False)
    table = Table(box=box.SIMPLE)
    table.add_column("part")
    for name in ("ms a turn", "share"):
        table.add_column(name, justify="right")
    for part in PARTS:
        seconds = found.parts_s[part]
        table.add_row(part, f"{1e3 * seconds / max(1, found.turns):,.3f}", f"{seconds / max(whole_s, 1e-12):.1%}")
    console.print(table)
    times = found.operators
    watched = f"{times.turns} turns that torch's profiler watched and slowed, {times.seconds * 1e3:,.1f} ms"
    console.print(f"{found.load}: operators by their own time in {watched}", highlight=False)
    table = Table(box=box.SIMPLE)
    table.add_column("operator")
    for name in ("calls a turn", "ms a turn", f"of {times.of}"):
        table.add_column(name, justify="right")
    for each in times.operators:
        per_turn = (f"{each.calls / max(1, times.turns):,.1f}", f"{1e3 * each.self_s / max(1, times.turns):,.3f}")
        table.add_row(each.name[:70], *per_turn, f"{each.share:.1%}")
    console.print(table)
    console.print(
        f"traces (ui.perfetto.dev): {folder / found.steps_trace}, {folder / found.operators_trace}", soft_wrap=True
    )
