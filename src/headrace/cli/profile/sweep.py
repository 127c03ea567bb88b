"""Sweeps prompt length and decode rows over an engine, and fits the cost model to what they took.

Owns which points are measured, how long one may take, and what is left out. The engine is the real one over whatever
runner it has; time is the clock's. Knows nothing of files or pictures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import Struct

from headrace.cli.profile.driver import Driver, TimedStep
from headrace.core.config import CostProfile, EngineConfig
from headrace.core.errors import InvalidInput
from headrace.core.hashing import chain_blocks, chain_root
from headrace.core.plan import Work
from headrace.core.ports import Clock
from headrace.core.profile import DecodePoint, PromptPoint
from headrace.core.request import Request, SamplingParams, Tier
from headrace.engine.cost import fit_profile
from headrace.engine.loop import Engine

# Points done, points at most, and a few words.
Progress = Callable[[int, int, str], None]

_SHORTEST_PROMPT = 32
_ROUND = 16
# Short prompts are tried again until they took this long together, or so often.
_TRIED_S = 0.3
_MOST_TRIES = 5
# Decode steps behind a prompt. The first step of a kind is often slow and is not counted.
_AFTER = 6
_SLOW_STEPS = 2
_LEAST_STEPS = 4
# A longer context is worth a second curve only with a few rows to it.
_FEW_ROWS = 8
# So many steps of decode rows alone, fewer than asked for: the others do not fit.
_STUCK_STEPS = 8
_LONG_S = 1e6
_NO_MEMORY = "KV memory does not hold them"
_NOT_TOGETHER = "they never ran all at once"


class SweepSetting(Struct, frozen=True):
    """`patience_s`: the longest that one point may be expected to take. `steps` are timed for each number of rows."""

    patience_s: float = 20.0
    steps: int = 24
    prompt_tokens: int = 128
    seed: int = 0


@dataclass(slots=True)
class Findings:
    """`seen` is what the cost model was fitted to: steps of every shape, each once."""

    prompts: list[PromptPoint] = field(default_factory=list)
    decode: list[DecodePoint] = field(default_factory=list)
    seen: list[tuple[Work, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    cost: CostProfile = field(default_factory=CostProfile)
    fit_error_median: float = 0.0
    fit_error_worst: float = 0.0


def sweep(engine: Engine, clock: Clock, config: EngineConfig, setting: SweepSetting, progress: Progress) -> Findings:
    """Prompts first: how long they take decides what rows are worth. The engine must be idle, and is afterwards."""
    room = min(config.context_len, config.blocks * config.block_size)
    if room <= 2 * (_SLOW_STEPS + _LEAST_STEPS):
        raise InvalidInput(f"a context of {room} tokens is too short to measure anything", param="model")
    bench = _Bench(Driver(engine, clock), config, setting)
    found = Findings()
    lengths, rows = prompt_lengths(room), row_counts(config.slots)
    most = len(lengths) + 2 * len(rows)
    for length in lengths:
        if found.prompts and not _is_worth(found.prompts[-1], length, setting.patience_s):
            found.notes.append(
                f"prompts longer than {found.prompts[-1].tokens:,} tokens were left out: one would take more than"
                f" {setting.patience_s:g} s (--patience)"
            )
            break
        progress(len(found.prompts), most, f"a prompt of {length:,} tokens")
        point, chunks = bench.prompt(length)
        found.prompts.append(point)
        found.seen += chunks
    for context in contexts(found.prompts, config.slots, room, setting):
        told = len(found.notes)
        for count in reversed(_rows_worth(found, rows, context, setting.patience_s)):
            progress(len(found.prompts) + len(found.decode), most, f"{count} rows behind {context:,} tokens")
            measured = bench.decode(count, context)
            if isinstance(measured, str):
                found.notes.append(f"{count} rows behind {context:,} tokens were left out: {measured}")
                continue
            found.decode.append(measured)
            found.seen.append((Work(0, count, measured.kv_tokens, 0), measured.itl_p50_s))
        # Measured from the most rows down, told from the fewest up.
        found.notes[told:] = reversed(found.notes[told:])
    if not found.decode:
        raise InvalidInput("KV memory does not hold one sequence for as long as it takes to time it", param="model")
    found.decode.sort(key=lambda point: (point.prompt_tokens, point.rows))
    _fit(found, config.profile)
    progress(most, most, "fitted")
    return found


def prompt_lengths(room: int) -> list[int]:
    """Doubling, up to the longest that leaves room for the decode steps behind it."""
    longest = room - _AFTER - 1
    lengths = [_SHORTEST_PROMPT << power for power in range(32) if _SHORTEST_PROMPT << power < longest]
    return [*lengths, longest]


def row_counts(slots: int) -> list[int]:
    """1, 2, 4 and so on up to the slots, which are the last whatever they are."""
    return [*(1 << power for power in range(32) if 1 << power < slots), slots]


def contexts(prompts: Sequence[PromptPoint], slots: int, room: int, setting: SweepSetting) -> list[int]:
    """The prompts behind which rows are measured: a short one, for which every slot can be filled in good time, and the
    longest for which at least a few can, where that is twice as long or more. Half of the room is for what follows."""
    token_s = min(point.ttft_s / point.tokens for point in prompts)
    in_time = setting.patience_s / max(token_s * slots, 1e-12)
    short = int(max(1, min(setting.prompt_tokens, room // 2, in_time)))
    short -= short % _ROUND if short > _ROUND else 0
    few = min(slots, _FEW_ROWS)
    long = [
        point.tokens
        for point in prompts
        if 2 * short <= point.tokens <= room // 2 and few * point.ttft_s <= setting.patience_s
    ]
    return [short, *long[-1:]]


def _is_worth(last: PromptPoint, length: int, patience_s: float) -> bool:
    """Time grows with the length, and a little faster."""
    return last.ttft_s * length / last.tokens <= patience_s


def _rows_worth(found: Findings, rows: Sequence[int], context: int, patience_s: float) -> list[int]:
    """As many rows as can be filled in good time; one at least."""
    near = min(found.prompts, key=lambda point: abs(point.tokens - context))
    row_s = near.ttft_s * context / near.tokens
    worth = [count for count in rows if count * row_s <= patience_s] or [1]
    if worth[-1] < rows[-1]:
        found.notes.append(
            f"more than {worth[-1]} rows behind {context:,} tokens were left out: to fill them would take more than"
            f" {patience_s:g} s (--patience)"
        )
    return worth


class _Bench:
    """One point at a time. Rows have prompts of their own, the same for every number of rows: all but the first such
    point finds them in the prefix cache."""

    def __init__(self, driver: Driver, config: EngineConfig, setting: SweepSetting) -> None:
        self._driver = driver
        self._config = config
        self._setting = setting
        self._root = chain_root(salt=b"profile", version="profile")

    def prompt(self, tokens: int) -> tuple[PromptPoint, list[tuple[Work, float]]]:
        """The middle one of several tries, and its steps."""
        tries: list[tuple[float, list[TimedStep], list[float]]] = []
        while len(tries) < _MOST_TRIES and sum(ttft_s for ttft_s, _, _ in tries) < _TRIED_S:
            tries.append(self._try_prompt(tokens, len(tries)))
        ttft_s, chunks, after_s = sorted(tries, key=lambda each: each[0])[len(tries) // 2]
        itl_s = float(np.median(after_s)) if after_s else None
        point = PromptPoint(tokens, len(tries), ttft_s, tokens / max(ttft_s, 1e-12), itl_s)
        seen = [(step.work, step.seconds) for step in chunks]
        if itl_s is not None:
            seen.append((Work(0, 1, tokens + _AFTER // 2, 0), itl_s))
        return point, seen

    def _try_prompt(self, tokens: int, attempt: int) -> tuple[float, list[TimedStep], list[float]]:
        (number,) = self._driver.submit([self._request(attempt, tokens, _AFTER + 1)])
        chunks: list[TimedStep] = []
        while not chunks or not len(chunks[-1].frame.numbers):
            step = self._driver.step()
            assert step is not None, "a prompt that fits was not planned"
            chunks.append(step)
        after_s = []
        while (step := self._driver.step()) is not None and step.work.decode_rows == 1:
            after_s.append(step.seconds)
        self._driver.clear([number])
        return sum(step.seconds for step in chunks), chunks, after_s[_SLOW_STEPS:] or after_s

    def decode(self, rows: int, context: int) -> DecodePoint | str:
        """Or why not all of these rows can be decoded at once."""
        needed = -(-(context + self._setting.steps + _SLOW_STEPS) // self._config.block_size)
        if rows * needed > self._config.blocks:
            return _NO_MEMORY
        preemptions = self._driver.num_preemptions
        numbers = self._driver.submit([self._request(index, context, None, shared=True) for index in range(rows)])
        full: list[TimedStep] = []
        stuck = 0
        while not self._is_enough(full):
            step = self._driver.step()
            if step is None or step.frame.ended or stuck > _STUCK_STEPS:
                break
            if not step.work.prefill_tokens and step.work.decode_rows == rows:
                full.append(step)
            else:
                stuck = 0 if step.work.prefill_tokens else stuck + 1
        self._driver.clear(numbers)
        counted = full[_SLOW_STEPS:]
        if self._driver.num_preemptions != preemptions:
            return _NO_MEMORY
        if len(counted) < _LEAST_STEPS:
            return _NOT_TOGETHER
        times_s = np.array([step.seconds for step in counted])
        return DecodePoint(
            rows=rows,
            prompt_tokens=context,
            kv_tokens=round(float(np.mean([step.work.kv_tokens for step in counted]))),
            steps=len(counted),
            itl_p50_s=float(np.percentile(times_s, 50)),
            itl_p95_s=float(np.percentile(times_s, 95)),
            tokens_per_s=rows * len(counted) / max(float(times_s.sum()), 1e-12),
        )

    def _is_enough(self, full: Sequence[TimedStep]) -> bool:
        count = len(full) - _SLOW_STEPS
        if count >= self._setting.steps:
            return True
        return count >= _LEAST_STEPS and sum(step.seconds for step in full) > self._setting.patience_s

    def _request(self, index: int, tokens: int, max_tokens: int | None, *, shared: bool = False) -> Request:
        """A longer prompt of a row begins with its shorter ones."""
        rng = np.random.default_rng([self._setting.seed, int(shared), index])
        ids = tuple(rng.integers(0, self._config.vocab_size, tokens).tolist())
        return Request(
            request_id=f"profile-{index}",
            tenant="profile",
            prompt_ids=ids,
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
            tier=Tier.BATCH,
            ttft_target_s=_LONG_S,
            queue_timeout_s=_LONG_S,
            prefix_root=self._root if shared else b"",
            block_hashes=chain_blocks(self._root, ids, self._config.block_size) if shared else (),
        )


def _fit(found: Findings, prior: CostProfile) -> None:
    found.cost = fit_profile(found.seen, prior)
    errors = [abs(predict_s(found.cost, work) / max(seconds, 1e-12) - 1.0) for work, seconds in found.seen]
    found.fit_error_median, found.fit_error_worst = float(np.median(errors)), max(errors)


def predict_s(cost: CostProfile, work: Work) -> float:
    tokens_s = cost.c_in_s * work.prefill_tokens + cost.c_out_s * work.decode_rows
    return cost.c0_s + tokens_s + cost.c_kv_s * work.kv_tokens + cost.c_att_s * work.attended
