"""An engine whose steps take exactly what a cost model says, by a clock that stands still otherwise; and a profile."""

from msgspec.structs import replace

from headrace.core.config import CostProfile, EngineConfig
from headrace.core.plan import StepResult
from headrace.core.profile import DecodePoint, Knee, Machine, MemoryUse, ModelProfile, PromptPoint
from headrace.engine.loop import Engine
from headrace.runner.fake import FakeRunner
from tests.builders import TestClock, engine_config

# Not the prior that the engine is given: what is found was measured.
TRUTH = CostProfile(c0_s=4e-3, c_in_s=5e-5, c_out_s=1e-3, c_kv_s=3e-7, c_att_s=2e-9)


class TickingRunner(FakeRunner):
    """Waiting for a step moves the clock to its end."""

    def __init__(self, config: EngineConfig, truth: CostProfile, clock: TestClock, depth: int = 1) -> None:
        super().__init__(config, profile=truth, clock=clock, depth=depth)
        self._ticks = clock

    def collect(self) -> StepResult:
        self._ticks.time_s = max(self._ticks.time_s, self.next_ready_s)
        return super().collect()


def ticking_engine(
    truth: CostProfile = TRUTH, *, depth: int = 1, **sizes: object
) -> tuple[Engine, TestClock, EngineConfig]:
    config = engine_config(slots=8, blocks=512, block_size=16, context_len=1024, max_queue_s=1e6)
    config = replace(config, max_step_tokens=256, **sizes)
    clock = TestClock()
    return Engine(config, TickingRunner(config, truth, clock, depth)), clock, config


def a_profile(**others: object) -> ModelProfile:
    """A small, sound one: 32 slots, 2,000 blocks of 16."""
    made = ModelProfile(
        name="tiny",
        model="tiny",
        files={"tiny.gguf": "0" * 64},
        fingerprint="f00",
        device="cpu",
        dtype="int8",
        measured_at="2026-01-01T00:00:00+00:00",
        machine=Machine("a processor", "a processor", 2, "3.12.0", "2.13.0", "0.1"),
        slots=32,
        context_len=2048,
        max_step_tokens=256,
        max_step_s=0.5,
        c0_s=5e-3,
        c_in_s=2e-5,
        c_out_s=3e-5,
        c_kv_s=2e-8,
        c_att_s=2e-10,
        fit_error_median=0.01,
        fit_error_worst=0.1,
        decode=(DecodePoint(1, 128, 140, 24, 5e-3, 6e-3, 199.0), DecodePoint(2, 128, 280, 24, 9e-3, 9.5e-3, 222.0)),
        prompts=(PromptPoint(32, 5, 6e-3, 5300.0, 5e-3), PromptPoint(64, 5, 7e-3, 9100.0, None)),
        knees=(Knee(128, 1, 199.0, 5e-3, False),),
        memory=MemoryUse(10**8, 10**7, 368_640, 16, 2_000, 2_500),
    )
    return replace(made, **others) if others else made
