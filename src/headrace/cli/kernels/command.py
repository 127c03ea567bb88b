"""`headrace bench kernels`: on a CUDA card its operations, elsewhere the CPU's; flags and the table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.console import note, print_json
from headrace.core.errors import InvalidInput

if TYPE_CHECKING:
    from headrace.cli.kernels.roofline import KernelFigure, KernelReport
    from headrace.weights.shape import ModelShape


def kernels(
    shape: Annotated[
        str, typer.Option(help="Whose sizes: 135m, 0.6b or 8b. Default: 8b on a card, 135m elsewhere.")
    ] = "",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu; auto takes a CUDA card that can be used.")] = "auto",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="On a card: the row-exact operations.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """Time of each kernel against the roofline: what memory and arithmetic, measured first, would allow.

    Loads no model. What is computed is not checked here: that is what tests are for.
    """
    from headrace.cli.cores import share_cores
    from headrace.cli.kernels.roofline import SHAPES

    if shape and shape not in SHAPES:
        raise InvalidInput(f"--shape must be one of {', '.join(SHAPES)}", param="--shape")
    share_cores()
    from headrace.runner.cuda.presence import choose_device, look_for_card

    look = look_for_card()
    chosen = SHAPES[shape or "8b"]
    if choose_device(device, "auto", chosen, look) == "cuda":
        report = _on_card(shape or "8b", chosen, look.words, deterministic)
    else:
        if deterministic:
            raise InvalidInput(
                "--deterministic is for a card: here rows are exact as they are", param="--deterministic"
            )
        note("measuring the CPU's kernels" if look.usable else f"measuring the CPU's kernels: {look.words}")
        report = _on_processor(shape or "135m", SHAPES[shape or "135m"])
    if as_json:
        print_json(report)
    else:
        _print(report)


def _on_processor(name: str, shape: ModelShape) -> KernelReport:
    import platform

    import torch

    from headrace.cli.doctor import processor_name
    from headrace.cli.kernels.processor import ProcessorSizes, measure_peaks, measure_processor
    from headrace.cli.kernels.roofline import KernelReport, host_seconds
    from headrace.runner.torch.probe import choose
    from headrace.runner.torch.threads import take_threads

    take_threads()
    sizes, choice = ProcessorSizes(), choose(shape)
    peaks = measure_peaks(choice, sizes, host_seconds)
    figures = _told(measure_processor(shape, choice, sizes, peaks, host_seconds))
    remarks = (
        f"weights and KV are taken in turn from {sizes.cold_bytes >> 20} MiB: a larger cache flatters",
        "linear layers take and give float32: int8 and int4 also pay for making integers of their rows",
    )
    machine = f"{platform.machine()}, {processor_name()}, {torch.get_num_threads()} threads"
    return KernelReport(machine, name, peaks, figures, remarks)


def _on_card(name: str, shape: ModelShape, words: str, deterministic: bool) -> KernelReport:
    import torch

    from headrace.cli.kernels.card import CardBench, CardSizes, lane_timer
    from headrace.cli.kernels.roofline import KernelReport
    from headrace.runner.cuda.exact_ops import ExactOps
    from headrace.runner.cuda.lane import CudaLane
    from headrace.runner.cuda.triton_ops import TritonOps

    lane, sizes = CudaLane(), CardSizes()
    slots = max(*sizes.samples, *(rows for rows, _ in sizes.decodes))
    ops = (ExactOps if deterministic else TritonOps)(shape, slots, lane.device)
    bench = CardBench(ops, lane, shape, sizes, lane_timer(lane))
    with torch.inference_mode():
        peaks = bench.peaks()
        figures = _told(bench.measure(peaks))
    remarks = (f"{ops.name} operations; each alone, in one graph, its data in turn from {sizes.cold_bytes >> 20} MiB",)
    return KernelReport(words, name, peaks, figures, remarks)


def _told(figures: Iterable[KernelFigure]) -> tuple[KernelFigure, ...]:
    """All of them, each noted as it comes: a sweep takes a while."""
    kept = []
    for figure in figures:
        note(f"{figure.kernel}, {figure.size}: {figure.seconds * 1e6:,.1f} µs, {figure.share:.0%}")
        kept.append(figure)
    return tuple(kept)


def _print(report: KernelReport) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    peaks = report.peaks
    told = f"memory {peaks.bytes_per_s / 1e9:,.1f} GB/s, products {peaks.flops_per_s / 1e9:,.1f} GFLOP/s"
    if peaks.integer_per_s is not None:
        told += f", of 8-bit integers {peaks.integer_per_s / 1e9:,.1f} GOP/s"
    table = Table(box=box.SIMPLE)
    table.add_column("kernel")
    for name in ("size", "µs", "GB/s", "GFLOP/s", "bound by", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in report.figures:
        table.add_row(each.kernel, each.size, *_cells(each))
    console = Console()
    console.print(f"{report.machine}; sizes of {report.shape}", highlight=False)
    console.print(f"peaks, measured: {told}; share: of what the nearer of them allows", highlight=False)
    console.print(table)
    for line in report.remarks:
        console.print(line, highlight=False)


def _cells(figure: KernelFigure) -> Sequence[str]:
    moved, products = figure.moved_bytes / figure.seconds / 1e9, figure.flops / figure.seconds / 1e9
    times = (f"{figure.seconds * 1e6:,.1f}", f"{moved:,.1f}", f"{products:,.1f}" if figure.flops else "–")
    return (*times, figure.bound, f"{figure.share:.0%}")
