"""A model in this process, ready to generate: found or fetched, loaded into what memory there is, and timed.

The composition root of every command that needs a model without a service. Owns what must be closed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from headrace.cli.console import note
from headrace.cli.cores import share_cores
from headrace.cli.model_store import find_or_fetch, progress_bar
from headrace.cli.sweep import THRESHOLDS, settled
from headrace.core.clock import SystemClock
from headrace.core.config import EngineConfig
from headrace.core.ports import Runner
from headrace.engine.loop import Engine
from headrace.serving.local import LocalService
from headrace.serving.model_text import ModelText
from headrace.text.lexicon import Lexicon
from headrace.text.limited import LimitedPool
from headrace.text.matchers import Matchers
from headrace.weights.checkpoint import Checkpoint, open_checkpoint
from headrace.worker.assembly import LoadedModel, LoadSettings, load_model
from headrace.worker.timed import StepTimes, TimedRunner

if TYPE_CHECKING:
    from headrace.runner.torch.memory import MemoryPlan


_PATIENCE_S = 1e6


@dataclass(slots=True)
class LocalModel:
    name: str
    # sha256 by file name.
    files: dict[str, str]
    runner: Runner
    engine: Engine
    service: LocalService
    clock: SystemClock
    times: StepTimes
    config: EngineConfig
    device: str
    dtype: str
    fingerprint: str
    memory: MemoryPlan
    ready_s: float

    @property
    def headline(self) -> str:
        return f"{self.name}, {self.dtype} on {self.device}"

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "device": self.device,
            "dtype": self.dtype,
            "fingerprint": self.fingerprint,
            "slots": self.config.slots,
            "kv_tokens": self.config.blocks * self.config.block_size,
            "ready_s": self.ready_s,
            "profile": self.config.profile,
        }


@contextmanager
def open_local(name: str, settings: LoadSettings) -> Iterator[LocalModel]:
    """The model by its name or path, fetched if it is one of ours and not here. Everything is closed at the end."""
    started_s = time.perf_counter()
    share_cores()
    path = find_or_fetch(name)
    with ExitStack() as stack:
        checkpoint = open_checkpoint(path)
        stack.callback(checkpoint.close)
        with progress_bar(f"loading {path.stem}") as progress:
            loaded = load_model(checkpoint, settings, progress)
        stack.callback(loaded.runner.close)
        for line in loaded.notes:
            note(line)
        local = _wire(stack, name, checkpoint, loaded, started_s)
        with settled(*THRESHOLDS):
            yield local


def _wire(stack: ExitStack, name: str, checkpoint: Checkpoint, loaded: LoadedModel, started_s: float) -> LocalModel:
    clock = SystemClock()
    # Local work waits as long as it takes; nobody else could take it.
    config, vocabulary = replace(loaded.config, max_queue_s=_PATIENCE_S), checkpoint.vocabulary
    model = ModelText.build(
        name,
        vocabulary,
        stack.enter_context(LimitedPool()),
        context_len=config.context_len,
        vocab_size=config.vocab_size,
        eos_ids=config.eos_ids,
    )
    stack.callback(model.close)
    matchers = None
    if config.eos_ids:
        matchers = Matchers(Lexicon(model.tokenizer, config.vocab_size, config.eos_ids))
        stack.callback(matchers.close)
    timed = TimedRunner(loaded.runner, clock)
    engine = Engine(config, timed, matchers)
    fingerprint = loaded.runner.fingerprint
    service = LocalService(
        engine,
        model,
        clock=clock,
        version=fingerprint,
        block_size=config.block_size,
        matchers=matchers,
    )
    ready_s = time.perf_counter() - started_s
    return LocalModel(
        name,
        checkpoint.digest(),
        loaded.runner,
        engine,
        service,
        clock,
        timed.times,
        config,
        loaded.device,
        loaded.dtype,
        fingerprint,
        loaded.memory,
        ready_s,
    )
