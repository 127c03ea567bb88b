"""A service over workers that are turned by hand: real engines over fake runners, one virtual clock, no socket."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from msgspec.structs import replace

from headrace.core.caller import Caller
from headrace.core.config import CostProfile, EngineConfig
from headrace.core.errors import HeadraceError, Refused, Unreachable
from headrace.core.event import EngineLoad
from headrace.core.messages import AttachPart, End, Frame, Refusal, ScoreTable, SubmitPart, WorkerCard, WorkerState
from headrace.core.plan import Scores
from headrace.core.ports import FrameSink
from headrace.core.request import Request, Tier
from headrace.core.stages import Stage, StageClock
from headrace.engine.loop import Engine
from headrace.runner.fake import FakeRunner
from headrace.serving.ask import Ask
from headrace.serving.explanation import Explanation
from headrace.serving.model_text import ModelText
from headrace.serving.order import Order
from headrace.serving.service import Service
from headrace.streams.record import Record
from headrace.streams.stream import Stream
from headrace.text.byte_vocabulary import byte_vocabulary
from headrace.text.grammar import Grammar
from headrace.text.lexicon import Lexicon
from headrace.text.limited import LimitedPool
from headrace.text.matchers import Matchers
from headrace.text.tokenizer import Tokenizer
from tests.builders import LOOSE, TestClock

VOCABULARY = byte_vocabulary()
TOKENIZER = Tokenizer(VOCABULARY)
EOS = TOKENIZER.special_ids["<|im_end|>"]
LEXICON = Lexicon(TOKENIZER, 512, (EOS,))
CALLER = Caller("acme", Tier.PLUS)
CONFIG = EngineConfig(
    slots=8,
    blocks=512,
    block_size=4,
    context_len=1024,
    vocab_size=512,
    eos_ids=(EOS,),
    max_step_tokens=256,
    profile=CostProfile(c0_s=1e-2, c_in_s=1e-5, c_out_s=1e-4, c_kv_s=1e-7, c_att_s=1e-10),
    targets=LOOSE,
)


def score_of(position: int, token: int) -> float:
    """A number that single precision holds exactly."""
    return -(position + token / 1024)


def keys_of(parts: Sequence[SubmitPart]) -> tuple[int, ...]:
    return tuple(key for part in parts for key in part.keys)


def requests_of(parts: Sequence[SubmitPart]) -> list[Request]:
    return [
        replace(part.request, choice=part.request.choice + index) for part in parts for index in range(len(part.keys))
    ]


class PlainDialect:
    def bound(self, created_s: float, fingerprint: str) -> "PlainDialect":
        return self

    def frame(self, record: Record) -> bytes:
        return b""


class HandWorker:
    """One replica. `answer` takes in what was sent; `turn` also runs a step and tells of it."""

    def __init__(self, name: str, sink: FrameSink, clock: TestClock, config: EngineConfig = CONFIG) -> None:
        self.name = name
        self.clock = clock
        self.config = config
        self.state = WorkerState.READY
        self.card: WorkerCard | None = WorkerCard(
            name, "m", 0, 1, 1, "m@1", "fp", "fp32", config.slots, config.blocks, config.block_size, config.context_len
        )
        self.runner = FakeRunner(config, clock=clock)
        self.matchers = Matchers(LEXICON)
        self.engine = Engine(config, self.runner, self.matchers)
        self.frames: list[Frame] = []
        self.submitted: list[Request] = []
        self.paused: list[int] = []
        self._sink = sink
        self._inbox: list[tuple[SubmitPart, ...]] = []
        self._number_of: dict[int, int] = {}
        self._key_of: dict[int, int] = {}
        self._request_of: dict[int, Request] = {}
        self._frame_number = 0

    @property
    def is_ready(self) -> bool:
        return self.state is WorkerState.READY

    @property
    def load(self) -> EngineLoad:
        return self.engine.load()

    @property
    def queued_s(self) -> float:
        return self.load.queue_s + self.load.running_s + 0.05 * sum(map(len, map(keys_of, self._inbox)))

    @property
    def keys(self) -> list[int]:
        return [*self._number_of, *(key for parts in self._inbox for key in keys_of(parts))]

    def submit(self, *parts: SubmitPart) -> None:
        if not self.is_ready:
            raise Unreachable(f"{self.name} is not ready")
        self._inbox.append(parts)
        self.submitted += requests_of(parts)

    def attach(self, *parts: AttachPart) -> None:
        raise Unreachable("nothing here outlives its link")

    def abort(self, key: int, used_tokens: int | None = None) -> None:
        self._inbox = [parts for parts in self._inbox if key not in keys_of(parts)]
        if key in self._number_of:
            self.engine.abort(self._number_of[key], self.clock.now_s(), used_tokens=used_tokens)

    def pause(self, key: int) -> None:
        self.paused.append(key)
        if key in self._number_of:
            self.engine.pause(self._number_of[key], self.clock.now_s())

    def resume(self, key: int) -> None:
        self.paused.remove(key)
        self.engine.resume(self._number_of[key], self.clock.now_s())

    def answer(self) -> None:
        accepted: list[int] = []
        refused: list[Refusal] = []
        inbox, self._inbox = self._inbox, []
        for parts in inbox:
            keys, requests = keys_of(parts), requests_of(parts)
            try:
                numbers = self.engine.submit_all(requests, self.clock.now_s())
            except HeadraceError as error:
                retry_after_s = error.retry_after_s if isinstance(error, Refused) else None
                refused.append(Refusal(keys, error.code, error.message, error.param, retry_after_s))
                continue
            grammars = [part.grammar for part in parts for _ in part.keys]
            for key, number, request, grammar in zip(keys, numbers, requests, grammars, strict=True):
                if grammar is not None:
                    rule = Grammar(grammar.kind, grammar.source)  # type: ignore[arg-type]
                    self.matchers.add(number, rule, request.replay_ids).result()
                self._number_of[key] = number
                self._key_of[number] = key
                self._request_of[key] = request
                if key in self.paused:
                    self.engine.pause(number, self.clock.now_s())
            accepted += keys
        if accepted or refused:
            self._send(Frame(0, -1, accepted=tuple(accepted), refused=tuple(refused)))

    def turn(self) -> None:
        self.answer()
        engine, clock = self.engine, self.clock
        while engine.begin(clock.time_s):
            pass
        if engine.in_flight:
            clock.time_s = max(clock.time_s, self.runner.next_ready_s)
            step = engine.end(clock.time_s)
        else:
            step = engine.take_events(clock.time_s)
        keys = [self._key_of[number] for number in step.numbers.tolist()]
        ended = tuple(
            End(self._key_of[event.number], event.outcome, event.reason, event.counters, event.waits)
            for event in step.ended
        )
        scores = self._scores(list(zip(keys, step.indices.tolist(), step.tokens.tolist(), strict=True)))
        for end in ended:
            number = self._number_of.pop(end.key)
            del self._key_of[number]
            self.matchers.remove(number)
        if keys or ended:
            rows = Frame.pack_rows(keys, step.indices, step.tokens, step.counters)
            self._send(Frame(0, step.step, *rows, ended=ended, scores=scores))

    def _scores(self, rows: list[tuple[int, int, int]]) -> ScoreTable | None:
        """The fake has none: log-probabilities made of position and id, prompts' with the first token."""
        entries: list[tuple[int, int, float]] = []
        for key, index, token in rows:
            request = self._request_of[key]
            sampling, ids = request.sampling, request.prompt_ids
            if sampling.prompt_logprobs is not None and index == 0:
                entries += [(key, at, score_of(at, ids[at])) for at in range(1, len(ids))]
            if sampling.logprobs is not None:
                entries.append((key, len(ids) + index, score_of(len(ids) + index, token)))
        if not entries:
            return None
        owners, positions, logprobs = zip(*entries, strict=True)
        top_ids = np.array([(65, -1)] * len(entries), np.int32)
        top = np.full((len(entries), 2), -0.5, np.float32)
        return ScoreTable.pack(
            Scores(
                np.array(owners, np.int64), np.array(positions, np.int32), np.array(logprobs, np.float32), top_ids, top
            )
        )

    def die(self, *, is_dead: bool = True) -> None:
        """The process is gone, and with it all it held; or it lives, and the gateway has broken off with it."""
        keys = self.keys
        self.state = WorkerState.GONE
        self.runner = FakeRunner(self.config, clock=self.clock)
        self.engine = Engine(self.config, self.runner, self.matchers)
        self._number_of.clear()
        self._key_of.clear()
        self._inbox = []
        self._sink.lost(self.name, keys, is_dead=is_dead)

    def _send(self, frame: Frame) -> None:
        self._frame_number += 1
        frame = replace(frame, number=self._frame_number)
        self.frames.append(frame)
        self._sink.take(self.name, frame)


class NetworkRig:
    def __init__(self, pool: LimitedPool, *, num_workers: int = 1, config: EngineConfig = CONFIG, **options: object):
        self.clock = TestClock()
        self.explained: list[Explanation] = []
        self.model = ModelText.build(
            "m",
            VOCABULARY,
            pool,
            context_len=config.context_len,
            vocab_size=config.vocab_size,
            eos_ids=config.eos_ids,
            aliases=("default",),
        )
        self.workers: list[HandWorker] = []
        self._num_orders = 0

        def table(sink: FrameSink) -> "NetworkRig":
            self.workers = [HandWorker(f"w{index}", sink, self.clock, config) for index in range(num_workers)]
            return self

        self.service = Service(
            [self.model],
            table,
            clock=self.clock,
            wall_s=lambda: 1e9,
            seeds=lambda: 7,
            on_finished=self.explained.append,
            **options,  # type: ignore[arg-type]
        )

    def of(self, model: str) -> Sequence[HandWorker]:
        return self.workers

    def change(self, worker: HandWorker, state: WorkerState = WorkerState.READY) -> None:
        """By default it was started again."""
        worker.state = state
        self.service.replica_changed(worker)

    def wait(self, seconds: float) -> None:
        """Time passes, and what waits for a worker is looked at."""
        self.clock.time_s += seconds
        self.service._recovery.look()

    async def open(self, *asks: Ask, caller: Caller = CALLER, turns: bool = False, counts: bool = False) -> Stream:
        """Until the workers have accepted it; no step runs meanwhile unless `turns`."""
        self._num_orders += 1
        order = Order(f"r{self._num_orders}", "default", asks, PlainDialect(), streamed=True, counts=counts)
        self.stages = StageClock(Stage.RECEIVE, self.clock.now_s())
        task = asyncio.create_task(self.service.open(order, caller, self.stages))
        while not task.done():
            await asyncio.sleep(0)
            for worker in self.workers:
                worker.turn() if turns else worker.answer()
        return await task

    def run(self, most_turns: int = 10_000) -> None:
        """Until no worker has anything to do."""
        for _ in range(most_turns):
            busy = [worker for worker in self.workers if worker.keys]
            if not busy:
                return
            for worker in busy:
                worker.turn()
        raise AssertionError("the workers do not come to an end")

    async def say(self, *asks: Ask, caller: Caller = CALLER) -> Stream:
        """The stream of an order, run to its end."""
        stream = await self.open(*asks, caller=caller)
        self.run()
        assert stream.is_ended
        self.finish(stream)
        return stream

    def finish(self, stream: Stream) -> None:
        self.stages.close(self.clock.now_s())
        self.service.finished(stream, self.stages)

    def assert_nothing_left(self) -> None:
        assert self.service._recovery.num_waiting == 0
        assert (self.service.num_open, self.service.num_sequences) == (0, 0)
        for worker in self.workers:
            worker.turn()
            assert worker.engine.load().used_blocks == 0
            assert not worker.keys
        assert not self.service._lives._parting

    def close(self) -> None:
        for worker in self.workers:
            worker.matchers.close()
        self.model.close()


@contextmanager
def network_rig(pool: LimitedPool, **options: object) -> Iterator[NetworkRig]:
    rig = NetworkRig(pool, **options)  # type: ignore[arg-type]
    try:
        yield rig
    finally:
        rig.close()


def text_of(stream: Stream, choice: int = 0) -> str:
    return "".join(part.text for record in stream.records for part in record.parts if part.choice == choice)


def ids_of(stream: Stream, choice: int = 0) -> list[int]:
    return [
        token
        for record in stream.records
        for part in record.parts
        if part.choice == choice and not part.is_prompt
        for token in part.ids
    ]


def finishes(stream: Stream) -> dict[int, str]:
    return {part.choice: part.finish for record in stream.records for part in record.parts if part.finish is not None}
