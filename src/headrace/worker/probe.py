"""The golden probe: a short greedy generation, run twice through an engine before anything is let in.

A device that computes twice differently, or no numbers at all, must not serve. Owns the probe's prompt and verdict.
"""

import hashlib

import numpy as np

from headrace.core.config import EngineConfig
from headrace.core.errors import RunnerFailed
from headrace.core.event import Ended, Outcome
from headrace.core.ports import Clock, Runner
from headrace.core.request import Request, SamplingParams
from headrace.engine.loop import Engine

_PROMPT = 16
_OUTPUT = 8
_PATIENCE_S = 1e6


def golden_probe(runner: Runner, config: EngineConfig, clock: Clock) -> str:
    """A digest of what the model said, the same on every worker of one fingerprint. RunnerFailed if it is unsound."""
    first, second = (_generate(runner, config, clock, attempt) for attempt in range(2))
    if first != second:
        raise RunnerFailed("the golden probe gave two different answers: this device cannot be trusted")
    return hashlib.sha256(np.array(first, "<i4").tobytes()).hexdigest()[:12]


def _generate(runner: Runner, config: EngineConfig, clock: Clock, attempt: int) -> list[int]:
    room = min(config.context_len, config.blocks * config.block_size)
    num_prompt = max(1, min(_PROMPT, room // 2))
    prompt_ids = tuple(np.random.default_rng(1).integers(0, config.vocab_size, num_prompt).tolist())
    engine = Engine(config, runner)
    request = Request(
        request_id=f"golden probe {attempt}",
        tenant="golden probe",
        prompt_ids=prompt_ids,
        max_tokens=max(1, min(_OUTPUT, room - num_prompt)),
        sampling=SamplingParams(temperature=0.0, ignore_eos=True),
        ttft_target_s=_PATIENCE_S,
        queue_timeout_s=_PATIENCE_S,
    )
    engine.submit(request, clock.now_s())
    tokens: list[int] = []
    ended: list[Ended] = []
    while not ended:
        frame = engine.turn(clock.now_s())
        tokens.extend(frame.tokens.tolist())
        ended.extend(frame.ended)
    if ended[0].outcome is not Outcome.FINISHED:
        raise RunnerFailed(f"the golden probe failed: {ended[0].message or ended[0].reason}")
    return tokens
