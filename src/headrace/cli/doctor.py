"""`headrace doctor`: what this machine has, which kernels and dtypes are chosen on it, and why.

Owns what is asked of the system and how it is shown. The choice itself is the runner's probe.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import struct
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace import __version__
from headrace.cli.console import as_text, called_as, print_json
from headrace.cli.model_store import data_folder, model_store
from headrace.core.errors import NotFound
from headrace.core.proc import free_memory_bytes, usable_cores

_DEFAULT_MODEL = "default"
# Where there is a card that a driver of NVIDIA's knows, one of these is there: on Linux, and on Linux under Windows.
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
_PACKAGES = ("torch", "numpy", "tokenizers", "llguidance", "gguf", "msgspec")


def doctor(
    model: Annotated[str, typer.Option("--model", "-m", help="Whose sizes the kernels are tried at.")] = _DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="auto, fp32, int8 or int4.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """Say what this machine has and what Headrace makes of it. Loads no weights; takes a few seconds."""
    from headrace.cli.cores import share_cores
    from headrace.runner.torch.threads import take_threads

    share_cores()
    take_threads()
    findings = {"machine": _machine(), "software": _software(), "models": _models(), "kernels": _kernels(model, dtype)}
    if as_json:
        print_json(findings)
        return
    for title, section in findings.items():
        print(title)
        for name, value in section.items():
            for line in value if isinstance(value, list) else [value]:
                print(f"  {name:<14} {line}")


def _machine() -> dict[str, Any]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": f"{platform.machine()}, {processor_name()}",
        "cores": f"{usable_cores()} usable of {os.cpu_count()}",
        "instructions": ", ".join(_instructions()) or "unknown",
        "memory": f"{total / 2**30:.1f} GiB, {free_memory_bytes() / 2**30:.1f} GiB free to this process",
        "disk": f"{shutil.disk_usage(_existing(data_folder())).free / 2**30:.1f} GiB free for models",
        "gpu": _gpu(),
        "nvml": _nvml(),
    }


def _software() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"headrace": __version__, "python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    found["bytecode"] = bytecode_words(torch.__file__)
    found["torch threads"] = torch.get_num_threads()
    found["torch cpu"] = torch.backends.cpu.get_cpu_capability()
    return found


def bytecode_words(module: str) -> str:
    """Of torch, which takes longest to import. Asked after it was: where Python may write it, it is there now."""
    if _has_bytecode(Path(module)):
        return "torch has it"
    mend = shlex.join([sys.executable, "-m", "compileall", "-q", str(as_text(Path(module).parent))])
    return f"torch has none and is compiled at every start, which takes seconds: {mend}"


def _has_bytecode(module: Path) -> bool:
    """Whether Python would take it: made for this source, or said not to be held against it."""
    try:
        head, source = Path(cache_from_source(str(module))).read_bytes()[:16], module.stat()
    except OSError:
        return False
    if len(head) < 16 or head[:4] != MAGIC_NUMBER:
        return False
    flags, changed, size = struct.unpack("<III", head[4:])
    return flags != 0 or (changed, size) == (int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)


def _models() -> dict[str, Any]:
    store = model_store()
    pulled = {manifest.name: as_text(store.resolve(manifest.name)) for manifest in store.models()}
    return {"folder": as_text(store.folder), **(pulled or {"pulled": f"none yet: {called_as()} models pull default"})}


def _kernels(model: str, dtype: str) -> dict[str, Any]:
    from headrace.runner.torch.probe import choose
    from headrace.weights.checkpoint import open_checkpoint
    from headrace.worker.assembly import stored_bits

    try:
        checkpoint = open_checkpoint(model_store().resolve(model))
    except NotFound as error:
        if model != _DEFAULT_MODEL:
            raise
        # A machine without any model is one to ask about, too.
        return {"not tried": error.message}
    try:
        choice = choose(checkpoint.shape, dtype, stored_bits=stored_bits(checkpoint))
    finally:
        checkpoint.close()
    exact = (
        "rows are exact: alone or in any batch, the same bits" if choice.row_exact else "rows may differ in last bits"
    )
    return {
        "chosen": f"{choice.recipe.dtype}; {exact}",
        "integer kernel": choice.recipe.kernel,
        "attention": f"{'tokens share products' if choice.cuts.wide else 'token by token'}, read in steps of {choice.cuts.coarse}",
        "because": list(choice.reasons) or "it was asked for",
        **{
            figure.name: f"{'exact' if figure.exact else 'not exact'}; "
            + (_by_rows(figure.micros) if figure.micros else "absent")
            for figure in choice.figures
            if figure.micros or not figure.exact
        },
    }


def _by_rows(micros: tuple[float, ...]) -> str:
    from headrace.runner.torch.probe import ROWS

    return ", ".join(f"{each:,.0f} µs at {rows}" for rows, each in zip(ROWS, micros, strict=True))


def _gpu() -> str:
    """Every card by name, and what `device = "auto"` makes of them."""
    import torch

    from headrace.runner.cuda.presence import look_for_card

    look = look_for_card()
    if not look.usable:
        return f"none that can be used: {look.words}; models run on the CPU"
    cards = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    more = f"; {len(cards)} cards: {', '.join(cards)}" if len(cards) > 1 else ""
    return f"models run on it in bf16{'' if look.no_fp8 else ' or fp8'}: {look.words}{more}"


def _nvml() -> list[str] | str:
    """What the driver says of every card; workers watch theirs through it."""
    from headrace.worker.nvml import all_devices, words

    if not any(path.exists() for path in _DRIVERS):
        return "no card"
    try:
        return [words(device.read()) for device in all_devices()] or "no card"
    except NotFound as error:
        return f"cards are not watched: {error.message}"


def processor_name() -> str:
    for line in _cpuinfo():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or "name unknown"


def _instructions() -> list[str]:
    """Of all that the processor lists, what our kernels could care about."""
    wanted = (
        "asimd",
        "asimddp",
        "i8mm",
        "bf16",
        "sve",
        "sve2",
        "avx2",
        "avx512f",
        "avx512_vnni",
        "avx_vnni",
        "amx_int8",
    )
    for line in _cpuinfo():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags = set(value.split())
            return [word for word in wanted if word in flags]
    return []


def _cpuinfo() -> list[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []


def _existing(folder: Any) -> Any:
    while not folder.exists():
        folder = folder.parent
    return folder
