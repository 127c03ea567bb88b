"""The whole engine over the fake runner, driven at random: accounts hold after every move, streams are true.

Shared prefixes, tiers, caps and reservations, guaranteed and elastic, scripted ends, masks, replays, faults,
deadlines, with one or two plans in flight and memory that is always too small.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from headrace.core.config import TenantConfig
from headrace.core.errors import InvalidInput, Refused
from headrace.core.event import Outcome
from headrace.core.plan import Masks, Plan
from headrace.core.request import Admission, Request, SamplingParams, Tier
from headrace.runner.faults import Faults
from tests.builders import Rig, engine_config, prompt, request

BLOCK = 4
VOCAB = 1000

CAPS = st.none() | st.integers(0, 8)
CONFIGS = st.fixed_dictionaries(
    {
        "slots": st.integers(1, 5),
        "blocks": st.integers(6, 24),
        "max_step_tokens": st.integers(5, 40),
        "ageing_s": st.sampled_from([0.05, 10.0]),
        "guaranteed_share": st.sampled_from([0.5, 1.0]),
    }
)
TENANT = st.fixed_dictionaries(
    {
        "weight": st.sampled_from([1.0, 3.0]),
        "max_slots": CAPS,
        "max_blocks": CAPS,
        "reserved_slots": st.integers(0, 1),
        "reserved_blocks": st.integers(0, 2),
    }
)
REQUESTS = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from("aabc"),
        "tier": st.sampled_from(Tier),
        "admission": st.sampled_from([Admission.ELASTIC, Admission.ELASTIC, Admission.GUARANTEED]),
        "max_tokens": st.none() | st.integers(1, 24),
        "block_size": st.sampled_from([0, BLOCK, BLOCK, BLOCK]),
        "deadline_s": st.sampled_from([None, None, None, 1.0]),
        "queue_timeout_s": st.sampled_from([None, None, None, 0.2]),
    }
)


def sane(caps: dict[str, Any]) -> dict[str, Any]:
    """No cap below its own reservation: that is refused."""
    for kind in ("slots", "blocks"):
        if caps[f"max_{kind}"] is not None:
            caps[f"max_{kind}"] = max(caps[f"max_{kind}"], caps[f"reserved_{kind}"])
    return caps


class Ask(NamedTuple):
    """A request: a family's prefix and a tail of its own; how it ends, what of it was said before."""

    fields: dict[str, Any]
    family: int
    prefix: int
    tail: int
    output: int | None
    num_replayed: int
    masked: bool


ASKS = st.builds(
    Ask,
    fields=REQUESTS,
    family=st.integers(0, 2),
    prefix=st.sampled_from([0, 8, 13, 16, 20]),
    tail=st.integers(1, 12),
    output=st.none() | st.integers(1, 24),
    num_replayed=st.sampled_from([0, 0, 0, 4]),
    masked=st.sampled_from([False, False, False, True]),
)


def allowed_after(said: Sequence[int]) -> Collection[int]:
    last = said[-1] if said else 0
    return range(1 + (last + len(said)) % 3, VOCAB, 3)


class Grammar:
    """Masks from what was said so far, replayed tokens first."""

    def __init__(self) -> None:
        self.said: dict[int, list[int]] = {}

    def masks(self, rows: Sequence[int], numbers: Sequence[int]) -> Masks:
        bits = np.zeros((len(rows), 1024), np.uint8)
        for place, number in enumerate(numbers):
            bits[place, list(allowed_after(self.said[number]))] = 1
        words = np.packbits(bits, axis=1, bitorder="little").view("<u4").astype(np.uint32)
        return Masks(np.array(rows, np.int32), words)

    def advance(self, number: int, token: int) -> None:
        self.said[number].append(token)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        depth=st.sampled_from([1, 2]),
        sizes=CONFIGS,
        tenants=st.lists(TENANT, max_size=3),
        expecting_little=st.booleans(),
    )
    def start(self, depth: int, sizes: dict[str, Any], tenants: list[dict[str, Any]], expecting_little: bool) -> None:
        made = [TenantConfig(name, **sane(caps)) for name, caps in zip("abc", tenants, strict=False)]
        while sum(one.reserved_slots for one in made) > sizes["slots"]:
            made.pop()
        self.grammar = Grammar()
        self.faults = Faults()
        config = engine_config(tenants=made, block_size=BLOCK, context_len=96, **sizes)
        self.rig = Rig(config, depth=depth, masks=self.grammar, faults=self.faults, checked=False)
        self.rig.on_plan = self.judge
        self.aborted: set[int] = set()
        self.arrivals: dict[int, float] = {}
        if expecting_little:
            # Short outputs were seen, so that more is guaranteed than can be kept.
            for _ in range(99):
                for length in (1, 2, 4, 8, 16, 32):
                    self.rig.engine._state.estimates.learn("a", length, 1)

    def judge(self, plan: Plan) -> None:
        config = self.rig.config
        slots = plan.slots.tolist()
        assert 0 < len(slots) <= config.slots and len(set(slots)) == len(slots)
        assert int(plan.counts.min()) > 0 and int(plan.counts.sum()) <= config.max_step_tokens
        assert plan.predicted_s <= config.max_step_s * 1.001
        begun = [start.slot for start in plan.begun]
        assert set(begun) <= set(slots) and len(set(begun)) == len(begun)

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.rig.requests)))

    @rule(asks=st.lists(ASKS, min_size=1, max_size=4))
    def submit(self, asks: list[Ask]) -> None:
        for ask in asks:
            self.submit_one(ask)

    def submit_one(self, ask: Ask) -> None:
        """Some are refused, with nothing kept."""
        rig = self.rig
        name = f"r{len(rig.requests)}"
        if ask.output is not None:
            rig.runner.script(name, 0, ask.output)
        ids = prompt(20, ask.family)[: ask.prefix] + prompt(ask.tail, 100 + len(rig.requests))
        sampling = SamplingParams(seed=ask.family, masked=ask.masked)
        made = request(name, ids=ids, sampling=sampling, **ask.fields)
        said = self.truth_of(made)[: ask.num_replayed]
        made = replace(made, replay_ids=tuple(said[:-1]))
        before = rig.engine.load()
        try:
            number = rig.submit(made)
        except (InvalidInput, Refused):
            assert rig.engine.load() == before
            rig.runner.lengths.pop((name, 0), None)
        else:
            self.grammar.said[number] = list(made.replay_ids)
            self.arrivals[number] = rig.now_s

    def truth_of(self, made: Request) -> list[int]:
        config = self.rig.config
        room = min(config.context_len, config.blocks * config.block_size) - len(made.prompt_ids)
        most = max(1, room) if made.max_tokens is None else made.max_tokens
        masks = allowed_after if made.sampling.masked else None
        seed = made.sampling.seed
        return self.rig.runner.truth(made.prompt_ids, most, seed=seed, request_id=made.request_id, masks=masks)

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data(), used=st.none() | st.integers(0, 5))
    def abort(self, data: st.DataObject, used: int | None) -> None:
        number = self.pick(data)
        live = number not in self.rig.ended and number not in self.aborted
        assert not self.rig.engine.abort(number, self.rig.now_s, used_tokens=used) or live
        self.aborted.add(number)

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        self.rig.engine.pause(self.pick(data), self.rig.now_s)

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.rig.engine.resume(self.pick(data), self.rig.now_s)

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        number = self.pick(data)
        if self.rig.engine.withdraw(number, self.rig.now_s):
            assert self.rig.tokens[number] == list(self.rig.requests[number].replay_ids)

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data(), kind=st.sampled_from(["fail_row", "nan_row", "bad_id"]), at=st.none() | st.integers(0, 20))
    def fail_row(self, data: st.DataObject, kind: str, at: int | None) -> None:
        getattr(self.faults, kind)(self.pick(data), at=at)

    @rule()
    def clear_cache(self) -> None:
        self.rig.engine.clear_prefix_cache()

    @rule(seconds=st.sampled_from([0.01, 0.1]))
    def wait(self, seconds: float) -> None:
        self.rig.clock.time_s += seconds

    @rule()
    def plan(self) -> None:
        self.rig.plan()

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()
            self.rig.engine.check()

    @invariant()
    def accounts_hold(self) -> None:
        if hasattr(self, "rig"):
            self.rig.engine.check()
            load = self.rig.engine.load()
            assert load.free_blocks + load.used_blocks == load.total_blocks
            assert load.running + load.free_slots == self.rig.config.slots

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        for number in rig.requests:
            rig.engine.resume(number, rig.now_s)
        rig.run(5_000)
        assert rig.ended.keys() == rig.requests.keys()
        for number, ended in rig.ended.items():
            self.compare(number, ended.outcome)
        assert rig.engine.load().used_blocks == 0
        rig.engine.check()

    def compare(self, number: int, outcome: Outcome) -> None:
        made, tokens = self.rig.requests[number], self.rig.tokens[number]
        counters = self.rig.ended[number].counters
        truth = self.truth_of(made)
        assert tokens == truth[: len(tokens)], f"stream {number} differs"
        assert counters.emitted + counters.overrun == len(tokens) - len(made.replay_ids)
        if outcome is Outcome.FINISHED:
            assert len(tokens) == len(truth), f"stream {number} is short"
            assert counters.prompt_computed + counters.prompt_cached == len(made.prompt_ids)
        self.compare_waits(number, outcome)

    def compare_waits(self, number: int, outcome: Outcome) -> None:
        """The parts of a stay sum to it; an end that no step brought is told a little later."""
        waits = self.rig.ended[number].waits
        parts = [getattr(waits, name) for name in waits.__struct_fields__]
        stay_s = self.rig.end_times[number] - self.arrivals[number]
        assert min(parts) >= -1e-9 and math.fsum(parts) <= stay_s + 1e-9
        assert outcome is not Outcome.FINISHED or math.isclose(math.fsum(parts), stay_s, rel_tol=1e-9, abs_tol=1e-12)


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=250, stateful_step_count=50)
