"""Minutes of requests with random lengths, wishes and tenants, some given up, in too few blocks: every one ends once and well.

Afterwards every account adds up, every block is free, and the card holds no more than was stated.
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Any

import numpy as np
import torch
from load_rig import PATIENT_S, Bench, Drive, Stream, hashed
from msgspec import Struct
from msgspec.structs import replace

from headrace.core.config import TenantConfig
from headrace.core.event import Outcome
from headrace.core.request import Admission, Request, SamplingParams, Tier
from headrace.engine.loop import Engine
from headrace.runner.cuda.memory import look_bytes

Row = dict[str, Any]
_MIB = 1 << 20
# What the allocator may keep beyond what the runner states.
_SLACK_BYTES = 64 * _MIB


class Crowd(Struct, frozen=True):
    """Sizes of the random load: few long requests among many short ones, and fewer blocks than the slots would fill."""

    slots: int = 192
    blocks: int = 2400
    prompt: int = 400
    output: int = 120
    long: int = 3000
    levels: tuple[int, ...] = (0, 20, 150, 300, 500)
    tide_s: float = 4.0
    abort_s: float = 0.4
    told_every_s: float = 10.0


_QUICK_CROWD = Crowd(12, 26, 30, 40, 60, (0, 3, 12, 24), 1.0, 0.2, 1.0)
_ABORTED = 0.14
_TENANTS = (
    TenantConfig("heavy", weight=4.0),
    TenantConfig("light"),
    TenantConfig("capped", max_slots=8),
    TenantConfig("reserved", reserved_slots=2, reserved_blocks=16),
    TenantConfig("batch", weight=0.5, tier="batch"),
)


def check_random(bench: Bench, shape: str, seconds: float, least: int) -> list[Row]:
    """The crowd swells and ebbs; between tides the engine may fall idle and prove its accounts."""
    crowd = _QUICK_CROWD if bench.quick else Crowd()
    with bench.open(shape) as (runner, config):
        bound = look_bytes(runner.config)
        before = _card_bytes(bench)
        settings = replace(config, slots=crowd.slots, blocks=crowd.blocks, tenants=_TENANTS)
        load = RandomLoad(crowd, Engine(settings, runner), settings.vocab_size)
        load.run(seconds, least, bench)
        wrong = load.wrong + load.prove_idle()
        grown = [now - then for now, then in zip(_card_bytes(bench), before, strict=True)]
    for what, growth in zip(("card memory in use", "torch's own count"), grown, strict=True):
        if growth > bound + _SLACK_BYTES:
            wrong.append(f"{what} grew by {growth / _MIB:.0f} MiB; {(bound + _SLACK_BYTES) / _MIB:.0f} MiB were stated")
    ends = {outcome.name.lower(): load.ends[outcome] for outcome in Outcome}
    row: Row = {
        "shape": shape,
        "seconds": load.seconds,
        "requests": load.submitted,
        **ends,
        "tokens": load.tokens,
        "preemptions": load.drive.engine.num_preemptions,
        "cached_tokens": load.cached_tokens,
        "look_bytes": bound,
        "grown_card_bytes": grown[0],
        "grown_torch_bytes": grown[1],
        "progress": load.progress,
        "wrong": wrong,
        "met": load.submitted >= least and load.seconds >= seconds,
        "text": f"{shape}: {load.submitted} requests in {load.seconds:.0f} s (at least {least} in {seconds:.0f}), each ended once: {ends};"
        f" {load.drive.engine.num_preemptions} preemptions, {load.tokens} tokens, all blocks free; card memory"
        f" {grown[0] / _MIB:+.0f} MiB, torch's {grown[1] / _MIB:+.0f} MiB, stated {bound / _MIB:.0f}",
    }
    return [row]


def _card_bytes(bench: Bench) -> tuple[int, int]:
    """Of the whole card in use, and what torch has given out of it."""
    if bench.quick:
        return 0, 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free, torch.cuda.memory_allocated()


class RandomLoad:
    """Clients with random wishes, who give up at random: submits, aborts, and looks at every end."""

    def __init__(self, crowd: Crowd, engine: Engine, vocab: int) -> None:
        self.drive = Drive(engine)
        self.wrong = self.drive.wrong
        self.submitted = self.tokens = self.cached_tokens = 0
        self.seconds = 0.0
        self.ends: Counter[Outcome] = Counter()
        self.progress: list[Row] = []
        self._crowd = crowd
        self._vocab = vocab
        self._chance = np.random.default_rng(9)
        self._given_up: list[tuple[float, int]] = []
        self._aborted: set[int] = set()
        self._begins = [self._ids(crowd.prompt // 2) for _ in range(4)]

    def run(self, seconds: float, least: int, bench: Bench) -> None:
        """For so long and until so many came, at most twice as long; then until all have ended."""
        drive, crowd, chance = self.drive, self._crowd, self._chance
        began_s = drive.now_s()
        tide_s, told_s, level = 0.0, crowd.told_every_s, 0
        while (passed_s := drive.now_s() - began_s) < seconds or (self.submitted < least and passed_s < 2 * seconds):
            if passed_s >= tide_s:
                tide_s, level = passed_s + chance.uniform(0.1, crowd.tide_s), int(chance.choice(crowd.levels))
            # A few at a time, as they would come; an empty engine is filled until the tide turns.
            for _ in range(min(8, level - len(drive.streams))):
                self._submit()
            self._turn()
            if passed_s >= told_s:
                told_s += crowd.told_every_s
                self._tell(passed_s, bench)
        while not drive.engine.idle:
            self._turn()
        self.seconds = drive.now_s() - began_s

    def prove_idle(self) -> list[str]:
        """What does not add up now that nothing runs."""
        engine, wrong = self.drive.engine, []
        engine.check()
        load = engine.load()
        if load.free_blocks != load.total_blocks:
            wrong.append(f"{load.total_blocks - load.free_blocks} blocks are not free at the end")
        if self.drive.streams or sum(self.ends.values()) != self.submitted:
            wrong.append(f"{sum(self.ends.values())} ends for {self.submitted} requests")
        if not engine.num_preemptions or not self.ends[Outcome.ABORTED]:
            wrong.append("nothing was preempted, or nothing aborted: blocks are not short enough for a proof")
        if self.drive.num_refused:
            wrong.append(f"{self.drive.num_refused} requests were refused")
        return wrong

    def _submit(self) -> None:
        now_s, chance = self.drive.now_s(), self._chance
        number = self.drive.submit(self._request())
        self.submitted += number is not None
        if number is not None and chance.random() < _ABORTED:
            heapq.heappush(self._given_up, (now_s + chance.exponential(self._crowd.abort_s), number))

    def _turn(self) -> None:
        drive, now_s = self.drive, self.drive.now_s()
        while self._given_up and self._given_up[0][0] <= now_s:
            number = heapq.heappop(self._given_up)[1]
            stream = drive.streams.get(number)
            if stream is not None:
                used = int(self._chance.integers(0, len(stream.tokens) + 1)) if self._chance.random() < 0.5 else None
                if drive.engine.abort(number, now_s, used_tokens=used):
                    self._aborted.add(number)
        for ended in drive.turn().ended:
            # Of a second end the drive has told.
            over = drive.streams.pop(ended.number, None)
            if over is not None:
                self._judge(over, aborted=ended.number in self._aborted)

    def _judge(self, stream: Stream, *, aborted: bool) -> None:
        ended, asked = stream.ended, stream.request.sampling
        assert ended is not None
        self.ends[ended.outcome] += 1
        self.tokens += len(stream.tokens)
        self.cached_tokens += ended.counters.prompt_cached
        problems = []
        if ended.counters.emitted + ended.counters.overrun != len(stream.tokens):
            problems.append("counters are not its tokens")
        if (ended.outcome is Outcome.ABORTED) != aborted:
            problems.append("aborted and not so ended, or the other way round")
        if ended.outcome is Outcome.FINISHED:
            stopped = ended.reason == "stop" and stream.tokens[-1] in asked.stop_ids
            if not (stream.is_whole or (stopped and len(stream.tokens) >= asked.min_tokens)):
                problems.append(f"{len(stream.tokens)} tokens of {stream.request.max_tokens}, {ended.reason}")
            if asked.logprobs is not None and stream.num_scores != len(stream.tokens):
                problems.append(f"{stream.num_scores} scores of {len(stream.tokens)} tokens")
            if asked.prompt_logprobs is not None and stream.num_prompt_scores != len(stream.request.prompt_ids) - 1:
                problems.append(f"{stream.num_prompt_scores} scores of the prompt")
            if asked.allowed_ids and not set(stream.tokens) <= set(asked.allowed_ids):
                problems.append("a token that was not allowed")
        self.wrong += [f"{stream.request.request_id}: {problem}" for problem in problems]

    def _tell(self, passed_s: float, bench: Bench) -> None:
        engine, (used, given) = self.drive.engine, _card_bytes(bench)
        row: Row = {
            "at_s": round(passed_s, 1),
            "requests": self.submitted,
            "ended": sum(self.ends.values()),
            "aborted": self.ends[Outcome.ABORTED],
            "preemptions": engine.num_preemptions,
            "running": engine.num_running,
            "waiting": engine.num_waiting,
            "tokens": self.tokens,
            "card_mib": used // _MIB,
            "torch_mib": given // _MIB,
        }
        self.progress.append(row)
        bench.say("  " + ", ".join(f"{key} {value}" for key, value in row.items()))

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._chance.integers(0, self._vocab, count).tolist())

    def _request(self) -> Request:
        chance, crowd = self._chance, self._crowd
        most = crowd.long if chance.random() < 0.02 else crowd.prompt
        begin = self._begins[int(chance.integers(0, 4))] if chance.random() < 0.3 else ()
        prompt = begin + self._ids(int(chance.integers(1, most + 1)))
        output = int(chance.integers(1, crowd.output + 1))
        tenant = _TENANTS[int(chance.integers(0, len(_TENANTS)))].name
        request = Request(
            f"random {self.submitted}",
            tenant,
            prompt,
            max_tokens=output,
            sampling=self._sampling(output),
            tier=Tier(int(chance.integers(0, 4))),
            admission=Admission(int(chance.random() < 0.1)),
            ttft_target_s=PATIENT_S,
            queue_timeout_s=PATIENT_S,
        )
        return hashed(request, tenant.encode()) if chance.random() < 0.7 else request

    def _sampling(self, output: int) -> SamplingParams:
        """A third greedy, and each other wish of a part of them."""
        chance = self._chance

        def one_in(count: int) -> bool:
            return bool(chance.integers(0, count) == 0)

        return SamplingParams(
            temperature=0.0 if one_in(3) else float(chance.uniform(0.1, 1.5)),
            top_k=int(chance.integers(1, 100)) if one_in(3) else 0,
            top_p=float(chance.uniform(0.5, 1.0)) if one_in(3) else 1.0,
            min_p=float(chance.uniform(0.0, 0.2)) if one_in(6) else 0.0,
            repetition_penalty=float(chance.uniform(0.8, 1.5)) if one_in(8) else 1.0,
            presence_penalty=float(chance.uniform(-1.0, 1.5)) if one_in(8) else 0.0,
            frequency_penalty=float(chance.uniform(-1.0, 1.5)) if one_in(8) else 0.0,
            seed=int(chance.integers(0, 2**62)),
            logprobs=int(chance.integers(0, 6)) if one_in(10) else None,
            prompt_logprobs=int(chance.integers(0, 3)) if one_in(50) else None,
            min_tokens=int(chance.integers(0, output + 1)) if one_in(10) else 0,
            stop_ids=self._ids(int(chance.integers(1, 40))) if one_in(5) else (),
            ignore_eos=one_in(2),
            logit_bias=tuple((token, float(chance.uniform(-5, 5))) for token in self._ids(4)) if one_in(20) else (),
            allowed_ids=self._ids(50) if one_in(30) else (),
        )
