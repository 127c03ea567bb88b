"""Small worlds for tests: an engine over the fake runner under a virtual clock, driven step by step."""

from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from headrace.core.config import CostProfile, EngineConfig, TenantConfig, TierTargets
from headrace.core.event import Ended, StepFrame
from headrace.core.hashing import chain_blocks, chain_root
from headrace.core.messages import GrammarText, SubmitPart
from headrace.core.plan import Plan
from headrace.core.ports import MaskSource
from headrace.core.request import Admission, Request, SamplingParams, Tier
from headrace.engine.loop import Engine
from headrace.runner.fake import FakeRunner
from headrace.runner.faults import Faults

LOOSE = {tier: TierTargets(ttft_s=1e3, itl_s=1e3) for tier in ("enterprise", "plus", "free", "batch")}


class TestClock:
    """A clock that tests set."""

    __test__ = False

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s


def engine_config(
    *,
    slots: int = 4,
    blocks: int = 64,
    block_size: int = 4,
    context_len: int = 256,
    profile: CostProfile | None = None,
    targets: dict[str, TierTargets] | None = None,
    tenants: Sequence[TenantConfig] = (),
    **others: object,
) -> EngineConfig:
    """A small engine whose time targets do not bind unless a test sets them."""
    config = EngineConfig(
        slots=slots,
        blocks=blocks,
        block_size=block_size,
        context_len=context_len,
        vocab_size=1000,
        profile=profile or CostProfile(c0_s=1e-2, c_in_s=1e-5, c_out_s=1e-4, c_kv_s=1e-7, c_att_s=1e-10),
        targets=targets or LOOSE,
        tenants=tuple(tenants),
    )
    return replace(config, **others) if others else config


def prompt(length: int, seed: int = 0, vocab_size: int = 1000) -> tuple[int, ...]:
    ids = np.random.default_rng([7, seed]).integers(1, vocab_size, length)
    return tuple(ids.tolist())


def request(
    name: str = "r",
    length: int = 8,
    max_tokens: int | None = 8,
    *,
    tenant: str = "a",
    seed: int | None = None,
    ids: Sequence[int] | None = None,
    block_size: int = 0,
    tier: Tier = Tier.PLUS,
    admission: Admission = Admission.ELASTIC,
    sampling: SamplingParams | None = None,
    **others: object,
) -> Request:
    """A request whose ids follow from `seed` (by default from its name). `block_size` turns the prefix cache on."""
    if seed is None:
        seed = sum(ord(letter) * pow(31, place, 2**31) for place, letter in enumerate(name)) % 2**31
    prompt_ids = prompt(length, seed) if ids is None else tuple(ids)
    root = chain_root(salt=tenant.encode(), version="m@1") if block_size else b""
    made = Request(
        request_id=name,
        tenant=tenant,
        prompt_ids=prompt_ids,
        max_tokens=max_tokens,
        sampling=sampling or SamplingParams(seed=seed),
        tier=tier,
        admission=admission,
        prefix_root=root,
        block_hashes=chain_blocks(root, prompt_ids, block_size) if block_size else (),
    )
    return replace(made, **others) if others else made


def part(key: int, made: Request, grammar: GrammarText | None = None, *, n: int = 1) -> SubmitPart:
    """`n` choices of a request, under keys from `key` on."""
    return SubmitPart(tuple(range(key, key + n)), made, grammar)


class Rig:
    """An engine, its fake runner and everything they said."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        depth: int = 1,
        checked: bool = True,
        masks: MaskSource | None = None,
        faults: Faults | None = None,
        cells: bool = True,
        runner_profile: CostProfile | None = None,
        jitter: float = 0.0,
    ) -> None:
        self.config = config or engine_config()
        self.clock = TestClock()
        self.runner = FakeRunner(
            self.config,
            profile=runner_profile,
            depth=depth,
            clock=self.clock,
            faults=faults,
            cells=cells,
            jitter=jitter,
        )
        self.engine = Engine(self.config, self.runner, masks)
        self.checked = checked
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.token_times: dict[int, list[float]] = {}
        self.ended: dict[int, Ended] = {}
        self.end_times: dict[int, float] = {}
        self.plans: list[Plan] = []
        self.on_plan: Callable[[Plan], None] | None = None

    @property
    def now_s(self) -> float:
        return self.clock.time_s

    def submit(self, made: Request, *, output: int | None = None) -> int:
        """`output`: the runner ends the stream there, unforeseen by the scheduler."""
        if output is not None:
            self.runner.script(made.request_id, made.choice, output)
        return self.submit_all([made])[0]

    def submit_all(self, made: Sequence[Request]) -> list[int]:
        numbers = self.engine.submit_all(made, self.now_s)
        for number, one in zip(numbers, made, strict=True):
            self.requests[number] = one
            self.tokens[number] = list(one.replay_ids)
            self.token_times[number] = []
        return numbers

    def plan(self) -> Plan | None:
        """Launch one plan if there is one."""
        if not self.engine.begin(self.now_s):
            return None
        planned = self.engine.last_plan
        assert planned is not None
        self.plans.append(planned)
        if self.on_plan is not None:
            self.on_plan(planned)
        return planned

    def step(self) -> StepFrame:
        """Fill the pipeline, let the oldest plan run to its end, apply it."""
        while self.plan() is not None:
            pass
        if not self.engine.in_flight:
            return self.take(self.engine.take_events(self.now_s))
        self.clock.time_s = max(self.clock.time_s, self.runner.next_ready_s)
        return self.take(self.engine.end(self.now_s))

    def take(self, frame: StepFrame) -> StepFrame:
        for number, index, token in zip(
            frame.numbers.tolist(), frame.indices.tolist(), frame.tokens.tolist(), strict=True
        ):
            assert len(self.tokens[number]) == index, f"token {index} of {number} came out of turn"
            assert number not in self.ended, f"a token of {number} came after its end"
            self.tokens[number].append(token)
            self.token_times[number].append(self.now_s)
        for event in frame.ended:
            assert event.number not in self.ended, f"{event.number} ended twice"
            self.ended[event.number] = event
            self.end_times[event.number] = self.now_s
        if self.checked:
            self.engine.check()
        return frame

    def run(self, most_steps: int = 100_000) -> None:
        """Until nothing is left to do."""
        for _ in range(most_steps):
            if self.engine.idle:
                return
            self.step()
        raise AssertionError(f"not idle after {most_steps} steps: {self.engine.load()}")

    def truth(self, number: int) -> list[int]:
        made = self.requests[number]
        most = made.max_tokens if made.max_tokens is not None else 10_000
        return self.runner.truth(
            made.prompt_ids, most, seed=made.sampling.seed, choice=made.choice, request_id=made.request_id
        )

    def assert_true(self) -> None:
        """Every finished stream is its truth; every other one is a beginning of it; nothing is held."""
        for number, tokens in self.tokens.items():
            expected = self.truth(number)
            if self.ended[number].outcome == 0:
                assert tokens == expected, f"stream {number} differs"
            else:
                assert tokens == expected[: len(tokens)], f"stream {number} differs before its end"
        assert self.engine.load().used_blocks == 0
        self.engine.check()
