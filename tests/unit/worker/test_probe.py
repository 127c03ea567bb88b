"""The golden probe trusts a device that says the same twice, and no other."""

import pytest

from headrace.core.clock import SystemClock
from headrace.core.errors import RunnerFailed
from headrace.core.plan import StepResult
from headrace.runner.fake import FakeRunner
from headrace.runner.faults import Faults
from headrace.worker.probe import golden_probe
from tests.builders import engine_config


class Moody(FakeRunner):
    """Its tokens depend on how many steps it has run."""

    def collect(self) -> StepResult:
        result = super().collect()
        self.count = getattr(self, "count", 0) + 1
        result.tokens[0] = (int(result.tokens[0]) + self.count // 8) % 900 + 1
        return result


def test_two_sound_devices_give_one_digest_and_are_left_as_they_were() -> None:
    config = engine_config()
    runner = FakeRunner(config)
    first = golden_probe(runner, config, SystemClock())
    assert first == golden_probe(FakeRunner(config), config, SystemClock())
    assert first == golden_probe(runner, config, SystemClock())


def test_another_answer_the_second_time_is_a_failure() -> None:
    config = engine_config()
    with pytest.raises(RunnerFailed, match="two different answers"):
        golden_probe(Moody(config, cells=False), config, SystemClock())


def test_a_row_that_is_not_finite_is_a_failure() -> None:
    config, faults = engine_config(), Faults()
    faults.nan_row(0)
    with pytest.raises(RunnerFailed, match="golden probe failed"):
        golden_probe(FakeRunner(config, faults=faults), config, SystemClock())


def test_the_smallest_engine_can_be_probed() -> None:
    config = engine_config(blocks=1, block_size=4, context_len=2)
    assert len(golden_probe(FakeRunner(config), config, SystemClock())) == 12
