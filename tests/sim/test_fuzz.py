"""Long random runs: every account adds up after every step, every stream is its truth, every promise is kept."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from headrace.core.config import CostProfile, EngineConfig, TenantConfig, TierTargets
from headrace.core.errors import HeadraceError
from headrace.core.event import Outcome
from headrace.core.plan import Plan
from headrace.core.request import Admission, Tier
from headrace.runner.faults import Faults
from tests.builders import LOOSE, Rig, engine_config, prompt, request

TENANTS = [
    TenantConfig("a", weight=2.0, max_slots=3),
    TenantConfig("b", reserved_slots=1, reserved_blocks=6),
    TenantConfig("c", max_blocks=14),
]
PREFIXES = [prompt(24, 900 + i) for i in range(3)]


@dataclass
class Chaos:
    """Random operations on one engine."""

    seed: int
    depth: int
    faulty: bool = False
    slots: int = 6
    blocks: int = 48
    # Draw the engine's shape from the seed as well: sizes, costs, targets, reservations.
    odd: bool = False
    rig: Rig = field(init=False)
    rng: np.random.Generator = field(init=False)
    numbers: list[int] = field(default_factory=list)
    operations: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, self.depth])
        self.faults = Faults()
        self.block_size = int(self.rng.choice([1, 2, 4, 16])) if self.odd else 4
        config = self._odd_config() if self.odd else self._config()
        self.rig = Rig(config, depth=self.depth, faults=self.faults if self.faulty else None)

    def _config(self) -> EngineConfig:
        return engine_config(
            slots=self.slots,
            blocks=self.blocks,
            context_len=100,
            max_step_tokens=40,
            ageing_s=0.5,
            tenants=TENANTS,
        )

    def _odd_config(self) -> EngineConfig:
        """Steps so slow that rows take turns, blocks of one token, one slot, all or nothing guaranteed."""
        rng = self.rng
        scale = 10.0 ** float(rng.uniform(-4, 1.5))
        slots = int(rng.integers(1, 9))
        target = TierTargets(ttft_s=10.0 ** float(rng.uniform(-3, 3)), itl_s=10.0 ** float(rng.uniform(-3, 3)))
        return engine_config(
            slots=slots,
            blocks=int(rng.integers(60, 200)) // self.block_size + 2,
            block_size=self.block_size,
            context_len=int(rng.integers(40, 100)),
            max_step_tokens=slots + int(rng.integers(0, 40)),
            ageing_s=10.0 ** float(rng.uniform(-2, 2)),
            guaranteed_share=float(rng.choice([0.0, 0.5, 0.8, 1.0])),
            profile=CostProfile(scale * 1e-2, scale * 1e-3, scale * 1e-3, scale * 1e-5, scale * 1e-6),
            targets=dict.fromkeys(LOOSE, target),
            tenants=[
                TenantConfig("a", weight=float(rng.choice([1e-3, 1.0, 1e3])), max_slots=int(rng.integers(0, 4))),
                TenantConfig("b", reserved_slots=int(rng.integers(0, slots + 1)), reserved_blocks=2),
                TenantConfig("c", max_blocks=int(rng.integers(0, 20))),
            ],
            max_queue_s=1e6,
            queue_timeout_s=1e6,
        )

    def operate(self) -> None:
        self.operations += 1
        engine, now_s = self.rig.engine, self.rig.now_s
        luck = self.rng.random()
        if luck < 0.22:
            self._add()
        elif luck < 0.58 or not self.numbers:
            self.rig.step()
        else:
            number = int(self.rng.choice(self.numbers[-40:]))
            if luck < 0.64:
                engine.abort(number, now_s)
            elif luck < 0.72:
                engine.pause(number, now_s)
            elif luck < 0.82:
                engine.resume(number, now_s)
            elif luck < 0.84:
                engine.withdraw(number, now_s)
            elif luck < 0.86 and self.faulty and number not in self.rig.ended:
                kind = (self.faults.fail_row, self.faults.nan_row, self.faults.bad_id)[int(self.rng.integers(3))]
                kind(number)
            else:
                self.rig.plan()

    def _add(self) -> None:
        rng = self.rng
        ids = prompt(int(rng.integers(1, 30)), int(rng.integers(2**31)))
        if rng.random() < 0.5:
            ids = PREFIXES[int(rng.integers(3))][: int(rng.integers(1, 25))] + ids[:6]
        made = request(
            f"r{self.operations}",
            ids=ids,
            max_tokens=int(rng.integers(1, 30)),
            tenant="abcd"[int(rng.integers(4))],
            tier=Tier(int(rng.integers(4))),
            admission=Admission(int(rng.random() < 0.25)),
            block_size=self.block_size,
            seed=int(rng.integers(2**31)),
            ttft_target_s=1e6 if self.odd else None,
        )
        try:
            output = int(rng.integers(1, 35)) if rng.random() < 0.6 else None
            self.numbers.append(self.rig.submit(made, output=output))
        except HeadraceError:
            pass

    def finish(self) -> None:
        for number in self.numbers:
            self.rig.engine.resume(number, self.rig.now_s)
        self.rig.run()
        assert set(self.rig.ended) == set(self.numbers), "somebody has no terminal event"
        self.rig.assert_true()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_thousand_operations(seed: int, depth: int) -> None:
    """5,000 operations in each of 20 runs: accounts proven after every step, no cell read or written wrongly."""
    chaos = Chaos(seed, depth, faulty=True)
    for _ in range(5000):
        chaos.operate()
    chaos.finish()
    outcomes = {event.outcome for event in chaos.rig.ended.values()}
    assert outcomes == set(Outcome)
    assert chaos.rig.engine.num_preemptions > 0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("part", range(4))
def test_engines_of_odd_shapes(part: int, depth: int) -> None:
    """20 shapes in each of 12 runs: every account after every step, and nobody is left waiting."""
    for seed in range(20):
        chaos = Chaos(5000 + 20 * part + seed, depth, odd=True)
        for _ in range(150):
            chaos.operate()
        chaos.finish()


@pytest.mark.parametrize("part", range(10))
def test_tokens_under_load_are_tokens_alone(part: int) -> None:
    """100 random interleavings in each of 10 parts, with preemption, prefix cache and chunks, mostly at depth 2."""
    preemptions = cached = 0
    for seed in range(100):
        chaos = Chaos(1000 + 100 * part + seed, depth=1 + (seed % 4 > 0), slots=4, blocks=30)
        chaos.rig.checked = False
        for _ in range(60):
            chaos.operate()
        chaos.finish()
        preemptions += chaos.rig.engine.num_preemptions
        cached += sum(event.counters.prompt_cached > 0 for event in chaos.rig.ended.values())
    assert preemptions > 50
    assert cached > 50


class Watch:
    """Checks every plan of a run against the promises of the step."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.plans = 0
        self.waits = 0
        self.preemptions = 0
        rig.on_plan = self.see

    def see(self, planned: Plan) -> None:
        state = self.rig.engine._state
        config = state.config
        self.plans += 1
        assert planned.predicted_s <= config.max_step_s or len(planned.slots) == 1
        assert planned.budget_s >= 0.8 * self._target_s()
        if planned.work.prefill_tokens > config.block_size:
            assert planned.predicted_s <= planned.budget_s * (1 + 1e-9), "the chunks take longer than the targets allow"
        if planned.work.decode_rows:
            assert planned.budget_s <= self._running_target_s() * (1 + 1e-9), "the targets of what runs are not kept"
        assert int(planned.counts.sum()) <= config.max_step_tokens
        assert len(planned.slots) == len(set(planned.slots.tolist())) <= config.slots
        self._see_waiters(planned)

    def _target_s(self) -> float:
        """The least the configured targets (one for all tiers here) allow a step to take."""
        config, model = self.rig.config, self.rig.engine._state.model
        target = config.targets["plus"]
        return min(max(min(target.itl_s, target.ttft_s / 5), 2 * (model.c0_s + model.c_out_s)), config.max_step_s)

    def _running_target_s(self) -> float:
        """Targets are rounded down by at most a fifth, never up."""
        return max(self._target_s(), self.rig.config.targets["plus"].itl_s)

    def _see_waiters(self, planned: Plan) -> None:
        """No tenant above its caps, and no slot idle, while somebody else could start and compute its prompt."""
        state = self.rig.engine._state
        table, tenants, pool = state.table, state.tenants, state.pool
        spare_tokens = state.config.max_step_tokens - int(planned.counts.sum())
        spare_s = planned.budget_s - planned.predicted_s
        now_s = self.rig.now_s
        holding = any(now_s - s.arrival_s >= state.config.ageing_s for s in state.line.heads())
        moved, self.preemptions = state.num_preemptions != self.preemptions, state.num_preemptions
        if holding or moved:
            # Memory gathers for an aged one; or a claim of this very plan has just freed something.
            return
        # Their slots are free for the next plan; when this one was made they were taken.
        left = [s.tenant for s in state.live.values() if s.phase == 2 and s.last_step == planned.step]
        leaving = len(left)
        num_free = table.num_free - leaving
        for sequence in state.line.heads():
            if state.in_flight(sequence) or sequence.guaranteed or sequence.preemptions:
                continue
            need = state.blocks_for(sequence.num_tokens)
            if sequence.num_tokens > spare_tokens or state.model.chunk_s(0, sequence.num_tokens) > spare_s:
                continue
            if not tenants.within_cap(sequence.tenant, 1 + left.count(sequence.tenant), need):
                continue
            self.waits += 1
            fits = need + table.num_running + leaving <= pool.num_available
            if fits:
                assert num_free == 0, f"slot idle while {sequence.number} waits at step {planned.step}"
            over = [
                other
                for other in table.running()
                if other.tenant != sequence.tenant
                and tenants.over_cap(other.tenant)
                and not other.guaranteed
                and other.begun_in != state.planning
                and table.emitted[other.slot] >= table.safe_below[other.slot]
            ]
            assert not (over and fits and num_free == 0), "a borrower stays while another tenant waits"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_every_step_keeps_its_promises(seed: int, depth: int) -> None:
    targets = {tier: TierTargets(ttft_s=0.4, itl_s=0.03) for tier in LOOSE}
    profile = CostProfile(c0_s=5e-3, c_in_s=4e-4, c_out_s=3e-4, c_kv_s=1e-6, c_att_s=1e-7)
    chaos = Chaos(seed, depth)
    config = engine_config(
        slots=6, blocks=60, context_len=100, max_step_tokens=48, targets=targets, profile=profile, tenants=TENANTS
    )
    chaos.rig = Rig(config, depth=depth, checked=False)
    watch = Watch(chaos.rig)
    for _ in range(3000):
        chaos.operate()
    chaos.finish()
    assert watch.plans > 800
    assert watch.waits > 100, "nobody ever waited: the test shows nothing"
