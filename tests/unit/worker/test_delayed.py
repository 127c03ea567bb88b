"""Injected delays: once as a sequence enters a stage, and nowhere else."""

from headrace.core.stages import Stage
from headrace.worker.delayed import DelayedRunner, is_delayed
from tests.builders import Rig, engine_config, request


def slept(inject: dict[str, float], *, prompt: int = 30, output: int = 5) -> list[float]:
    naps: list[float] = []
    rig = Rig(engine_config(max_step_tokens=16))
    rig.engine._runner = DelayedRunner(rig.runner, inject, naps.append)
    rig.submit(request("a", prompt, output))
    rig.submit(request("b", 1, output))
    rig.run()
    rig.assert_true()
    return naps


def test_each_sequence_is_delayed_once_at_its_first_chunk() -> None:
    assert slept({Stage.PREFILL: 0.05}, output=1) in ([0.05], [0.05, 0.05])


def test_each_sequence_is_delayed_once_when_it_decodes() -> None:
    assert 1 <= len(slept({Stage.DECODE: 0.05})) <= 2
    assert slept({Stage.DECODE: 0.05}, output=1) == []


def test_other_stages_delay_nothing_here() -> None:
    assert not is_delayed({Stage.ROUTE: 1.0, Stage.PREFILL: 0.0})
    assert is_delayed({Stage.DECODE: 0.1})
    assert slept({Stage.ROUTE: 1.0}) == []
