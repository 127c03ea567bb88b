"""When KV runs out: everything still completes, nobody is preempted for ever, nothing is charged twice."""

import numpy as np
import pytest

from headrace.core.event import Outcome
from headrace.core.request import Admission
from tests.builders import Rig, engine_config, request


def _crowd(depth: int, seed: int, *, guaranteed_share: float = 0.0) -> Rig:
    """Sequences that want about four times the pool at once."""
    rng = np.random.default_rng(seed)
    rig = Rig(engine_config(slots=16, blocks=60, block_size=4, context_len=200, max_queue_s=1e3), depth=depth)
    for i in range(60):
        output = int(rng.integers(10, 80))
        guaranteed = rng.random() < guaranteed_share
        admission = Admission.GUARANTEED if guaranteed else Admission.ELASTIC
        made = request(f"r{i}", int(rng.integers(4, 60)), 100, tenant=f"t{i % 3}", admission=admission, seed=i)
        rig.submit(made, output=output)
    rig.run()
    return rig


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_everything_completes_with_its_right_tokens(depth: int, seed: int) -> None:
    rig = _crowd(depth, seed)
    rig.assert_true()
    assert all(event.outcome is Outcome.FINISHED for event in rig.ended.values())
    assert rig.engine.num_preemptions > 10, "the pool was never short"


@pytest.mark.parametrize("depth", [1, 2])
def test_preemptions_per_sequence_are_few(depth: int) -> None:
    most = max(event.preemptions for seed in range(3) for event in _crowd(depth, seed).ended.values())
    assert most <= 8


def test_recomputed_tokens_are_counted_and_not_charged() -> None:
    """The service of a preempted run equals that of one with ample memory, up to the shared c0 of other steps."""
    rig = _crowd(1, 0)
    recomputed = sum(event.counters.recomputed for event in rig.ended.values())
    assert recomputed > 0
    for number, event in rig.ended.items():
        assert event.counters.prompt_computed == len(rig.requests[number].prompt_ids)
        assert event.counters.emitted == len(rig.tokens[number])
    levels = sum(rig.engine.service_levels().values())
    device_s = sum(planned.predicted_s for planned in rig.plans)
    fresh = sum(len(rig.requests[number].prompt_ids) + len(tokens) for number, tokens in rig.tokens.items())
    assert levels < device_s, "recomputation was charged"
    assert levels > 0.5 * device_s * fresh / (fresh + recomputed)


@pytest.mark.parametrize("depth", [1, 2])
def test_guaranteed_sequences_go_only_when_every_block_is_guaranteed(depth: int) -> None:
    rig = Rig(engine_config(slots=8, blocks=40, block_size=4, context_len=160), depth=depth)
    kept = [rig.submit(request(f"g{i}", 8, 30, tenant="g", admission=Admission.GUARANTEED)) for i in range(3)]
    for i in range(20):
        rig.submit(request(f"e{i}", 8, 60, tenant="e"))
    rig.run()
    rig.assert_true()
    assert rig.engine.num_guaranteed_preemptions == 0
    assert all(rig.ended[number].preemptions == 0 for number in kept)
    assert rig.engine.num_preemptions > 0, "nobody had to go: the test shows nothing"


def test_the_youngest_guaranteed_goes_when_all_blocks_are_guaranteed() -> None:
    """Short replies teach the engine to expect little; then three long ones outgrow their reservations."""
    rig = Rig(engine_config(slots=4, blocks=20, block_size=4, context_len=80))
    for i in range(40):
        rig.submit(request(f"s{i}", 4, 60, tenant="g"), output=4)
    rig.run()
    made = [request(f"g{i}", 4, 60, tenant="g", admission=Admission.GUARANTEED) for i in range(3)]
    numbers = [rig.submit(each, output=50) for each in made]
    rig.run()
    rig.assert_true()
    assert rig.engine.num_guaranteed_preemptions > 0
    assert rig.ended[numbers[0]].preemptions == 0, "the oldest went"
