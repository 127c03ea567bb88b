"""`headrace models profile`: flags, a progress bar, and the order of measuring, drawing and storing."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace import __version__
from headrace.cli.console import ProgressLines, as_text, called_as, check_finite, picture_target, print_json
from headrace.cli.model_store import data_folder
from headrace.core.proc import usable_cores

if TYPE_CHECKING:
    from headrace.cli.local import LocalModel
    from headrace.cli.profile.sweep import Findings, Progress
    from headrace.core.profile import Machine, MemoryUse, ModelProfile
    from headrace.weights.profiles import ProfileStore


def profile(
    model: Annotated[str, typer.Argument(help="A pulled model's name, a .gguf file, a folder, or NAME=one of these.")],
    device: Annotated[str, typer.Option(help="auto, cuda or cpu; auto takes a CUDA card that can be used.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, fp32, int8 or int4; on a card bf16 or fp8.")] = "auto",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="On a card: the same bits alone and in any company, more slowly.")
    ] = False,
    slots: Annotated[int, typer.Option(min=1, max=4096, help="Sequences that run at once.")] = 32,
    patience: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds that one point may take; longer ones are left out.")
    ] = 20.0,
    name: Annotated[str | None, typer.Option("--as", help="What to store it as. Default: the model's name.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where to draw it. [default: profile-NAME.png]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """Measure a model on this machine by batch and prompt length; draw it, and store it for `headrace plan`.

    The knee is where a larger batch begins to cost more latency than it gives tokens/s.
    """
    from headrace.cli.configuration import parse_model
    from headrace.cli.local import open_local
    from headrace.cli.profile.sweep import SweepSetting, sweep
    from headrace.weights.profiles import check_name
    from headrace.worker.assembly import LoadSettings

    check_finite(patience=patience)
    asked = parse_model(model)
    name = asked.name if name is None else name
    check_name(name, "--as")
    target = picture_target(picture, Path(f"profile-{name}.png"))
    settings = LoadSettings(device=device, dtype=dtype, slots=slots, deterministic=deterministic)
    with open_local(asked.source, settings) as local:
        with _bar(name) as progress:
            found = sweep(local.engine, local.clock, local.config, SweepSetting(patience_s=patience), progress)
        measured = assemble(name, local, found, datetime.now(UTC).isoformat(timespec="seconds"))
    path = profile_store().save(measured)
    if target is not None:
        from headrace.cli.profile.picture import draw_profile

        draw_profile(measured, target)
    if as_json:
        print_json({"profile": measured, "stored": as_text(path), "picture": as_text(target)})
        return
    _print(measured, path, target)


def profile_store() -> ProfileStore:
    from headrace.weights.profiles import ProfileStore

    return ProfileStore(data_folder() / "profiles")


def assemble(name: str, local: LocalModel, found: Findings, measured_at: str) -> ModelProfile:
    from headrace.cli.profile.limits import find_knees
    from headrace.core.profile import ModelProfile

    config, cost = local.config, found.cost
    return ModelProfile(
        name=name,
        model=local.name,
        files=local.files,
        fingerprint=local.fingerprint,
        device=local.device,
        dtype=local.dtype,
        measured_at=measured_at,
        machine=_machine(local.device),
        slots=config.slots,
        context_len=config.context_len,
        max_step_tokens=config.max_step_tokens,
        max_step_s=config.max_step_s,
        c0_s=cost.c0_s,
        c_in_s=cost.c_in_s,
        c_out_s=cost.c_out_s,
        c_kv_s=cost.c_kv_s,
        c_att_s=cost.c_att_s,
        fit_error_median=found.fit_error_median,
        fit_error_worst=found.fit_error_worst,
        decode=tuple(found.decode),
        prompts=tuple(found.prompts),
        knees=find_knees(found.decode),
        memory=_memory(local),
        notes=tuple(found.notes),
    )


def _memory(local: LocalModel) -> MemoryUse:
    from headrace.core.profile import MemoryUse

    plan = local.memory
    room = (int(plan.free_bytes * plan.share) - plan.workspace_bytes) // plan.block_bytes
    return MemoryUse(
        weights_bytes=plan.weights_bytes,
        workspace_bytes=plan.workspace_bytes,
        block_bytes=plan.block_bytes,
        block_tokens=plan.block_size,
        blocks=plan.blocks,
        room_blocks=max(plan.blocks, room),
    )


def _machine(device: str) -> Machine:
    import torch

    from headrace.cli.doctor import processor_name
    from headrace.core.profile import Machine

    processor = f"{platform.machine()}, {processor_name()}"
    return Machine(
        device=torch.cuda.get_device_name() if device == "cuda" else processor,
        processor=processor,
        cores=usable_cores(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        headrace=__version__,
    )


def _print(measured: ModelProfile, path: Path, target: Path | None) -> None:
    from rich.console import Console

    from headrace.cli.profile.report import print_profile

    print_profile(measured, Console())
    print(f"stored: {as_text(path)}")
    print(f"  to plan with it: {called_as()} plan --profile {measured.name} --prompt 100 --output 200 --rate 5")
    if target is not None:
        print(f"picture: {as_text(target)}")


@contextmanager
def _bar(name: str) -> Iterator[Progress]:
    """On stderr; what is measured now stands beside it."""
    if not sys.stderr.isatty():
        yield ProgressLines(f"profiling {name}").show
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(file=sys.stderr)) as bars:
        task = bars.add_task(f"profiling {name}")

        def show(done: int, total: int, words: str) -> None:
            bars.update(task, completed=done, total=total, description=f"profiling {name}: {words}")

        yield show
