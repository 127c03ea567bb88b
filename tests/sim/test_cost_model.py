"""The cost model learns a machine it was not told about, keeps up with it, and stays sane."""

import numpy as np

from headrace.core.config import CostProfile
from tests.builders import Rig, engine_config, request

GUESS = CostProfile(c0_s=5e-3, c_in_s=2e-5, c_out_s=5e-5, c_kv_s=2e-8, c_att_s=1e-10)
REAL = CostProfile(c0_s=8e-3, c_in_s=4.5e-5, c_out_s=2e-5, c_kv_s=6e-8, c_att_s=5e-10)


class Traffic:
    """Mixed requests that keep the engine busy, a 64k prompt now and then."""

    def __init__(self, seed: int) -> None:
        config = engine_config(
            slots=32,
            blocks=16_000,
            block_size=16,
            context_len=70_000,
            profile=GUESS,
            max_queue_s=1e4,
            queue_timeout_s=1e6,
            max_step_tokens=4096,
        )
        self.rig = Rig(config, checked=False, cells=False, runner_profile=REAL, jitter=0.03)
        self.rng = np.random.default_rng(seed)
        self.count = 0

    def run(self, steps: int) -> np.ndarray:
        """Relative errors of the predictions of `steps` steps."""
        rig = self.rig
        errors = []
        for _ in range(steps):
            if rig.engine.load().waiting < 4:
                self._submit()
            before_s = rig.now_s
            rig.step()
            errors.append(abs(rig.plans[-1].predicted_s / (rig.now_s - before_s) - 1.0))
        return np.array(errors)

    def _submit(self) -> None:
        self.count += 1
        long = self.count % 40 == 0
        length = 64_000 if long else int(self.rng.integers(20, 3000))
        self.rig.submit(request(f"r{self.count}", length, int(self.rng.integers(10, 300)), seed=self.count))


def _coefficients(rig: Rig) -> list[float]:
    model = rig.engine._state.model
    return [model.c0_s, model.c_in_s, model.c_out_s, model.c_kv_s, model.c_att_s]


def test_predictions_are_within_a_tenth_after_learning() -> None:
    traffic = Traffic(seed=3)
    traffic.run(600)
    errors = traffic.run(500)
    assert np.percentile(errors, 90) <= 0.10
    assert min(_coefficients(traffic.rig)) >= 0.0


def test_predictions_follow_a_drift() -> None:
    traffic = Traffic(seed=4)
    traffic.run(600)
    traffic.rig.runner.speed = 1.8
    broken = traffic.run(5)
    assert np.median(broken) > 0.3, "the drift is not felt: the test shows nothing"
    traffic.run(495)
    errors = traffic.run(200)
    assert np.percentile(errors, 90) <= 0.20
    assert min(_coefficients(traffic.rig)) >= 0.0
