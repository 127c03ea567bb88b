"""A service over a worker that says what a test puts into its mouth, byte by byte, in frames of the test's choice."""

import asyncio
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from headrace.core.errors import Unreachable
from headrace.core.event import Counters, EngineLoad, Outcome, Waits
from headrace.core.messages import AttachPart, End, Frame, GrammarText, SubmitPart, WorkerCard, WorkerState
from headrace.core.ports import FrameSink
from headrace.core.request import Request
from headrace.core.stages import Stage, StageClock
from headrace.serving.ask import Ask
from headrace.serving.model_text import ModelText
from headrace.serving.order import Order
from headrace.serving.service import Service
from headrace.streams.stream import Stream
from headrace.text.limited import LimitedPool
from headrace.weights.vocabulary import Vocabulary
from tests.builders import TestClock
from tests.unit.serving.network_rig import CALLER, EOS, VOCABULARY, PlainDialect


class ScriptedWorker:
    name = "w0"
    state = WorkerState.READY
    load = EngineLoad(0.0, 0.0, 0, 0, 8, 100, 0, 100)
    queued_s = 0.0

    def __init__(self, sink: FrameSink) -> None:
        self.card: WorkerCard | None = WorkerCard("w0", "m", 0, 1, 1, fingerprint="fp", block_size=4, context_len=4096)
        self.is_ready = True
        self.requests: dict[int, Request] = {}
        self.grammars: dict[int, GrammarText | None] = {}
        self.aborts: list[tuple[int, int | None]] = []
        self._sink = sink
        self._emitted: dict[int, int] = {}
        self._step = 0

    def submit(self, *parts: SubmitPart) -> None:
        if not self.is_ready:
            raise Unreachable("not ready")
        for part in parts:
            for index, key in enumerate(part.keys):
                self.requests[key] = replace(part.request, choice=part.request.choice + index)
                self.grammars[key] = part.grammar
                self._emitted[key] = len(part.request.replay_ids)
        accepted = tuple(key for part in parts for key in part.keys)
        asyncio.get_running_loop().call_soon(self._sink.take, self.name, Frame(0, -1, accepted=accepted))

    def attach(self, *parts: AttachPart) -> None:
        raise Unreachable("nothing here outlives its link")

    def abort(self, key: int, used_tokens: int | None = None) -> None:
        self.aborts.append((key, used_tokens))

    def pause(self, key: int) -> None: ...

    def resume(self, key: int) -> None: ...

    def say(self, data: bytes, key: int = 0, *, end: str | None = None) -> None:
        """A step for every byte; with the last one the end, if there is one."""
        for place, token in enumerate([*data, *([EOS] if end == "stop" else [])]):
            is_last = place == len(data) - (end != "stop")
            self.step({key: token}, end if is_last else None)

    def step(self, tokens: dict[int, int], end: str | None = None) -> None:
        self._step += 1
        indices = []
        for key in tokens:
            indices.append(self._emitted[key])
            self._emitted[key] += 1
        rows = Frame.pack_rows(
            list(tokens),
            np.array(indices, np.int32),
            np.array(list(tokens.values()), np.int32),
            np.zeros((len(tokens), 6), np.int32),
        )
        ended = tuple(self.ending(key, Outcome.FINISHED, end) for key in tokens) if end else ()
        self._sink.take(self.name, Frame(0, self._step, *rows, ended=ended))

    def ending(self, key: int, outcome: Outcome, reason: str, message: str = "") -> End:
        return End(
            key,
            outcome,
            reason,
            Counters(emitted=self._emitted[key] - len(self.requests[key].replay_ids)),
            Waits(),
            message=message,
        )

    def end(self, key: int, outcome: Outcome, reason: str, message: str = "") -> None:
        self._sink.take(self.name, Frame(0, -1, ended=(self.ending(key, outcome, reason, message),)))

    def die(self) -> None:
        self.is_ready = False
        self.state = WorkerState.GONE
        self._sink.lost(self.name, list(self.requests))


class ScriptedRig:
    def __init__(
        self, pool: LimitedPool, vocabulary: Vocabulary = VOCABULARY, *, aliases: tuple[str, ...] = ()
    ) -> None:
        self.clock = TestClock()
        self.model = ModelText.build(
            "m", vocabulary, pool, context_len=4096, vocab_size=512, eos_ids=(EOS,), aliases=aliases
        )
        self.service = Service([self.model], self._table, clock=self.clock)

    def _table(self, sink: FrameSink) -> "ScriptedRig":
        self.worker = ScriptedWorker(sink)
        return self

    def of(self, model: str) -> Sequence[ScriptedWorker]:
        return [self.worker]

    async def open(self, *asks: Ask) -> Stream:
        order = Order("r", "m", asks, PlainDialect(), streamed=True)
        return await self.service.open(order, CALLER, StageClock(Stage.RECEIVE, self.clock.now_s()))

    def prompt(self, key: int = 0) -> str:
        """The rendered prompt with special tokens written out."""
        table = self.model.tokenizer.table
        return b"".join(table.bytes_of[token] for token in self.worker.requests[key].prompt_ids).decode()
