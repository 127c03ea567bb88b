"""The profile of a model's steps: the one that was kept, if steps still take what it says, or one measured now."""

from collections.abc import Sequence
from itertools import groupby

from headrace.core.config import CostProfile, EngineConfig
from headrace.core.plan import Work
from headrace.core.ports import Runner
from headrace.engine.cost import CostModel
from headrace.worker.shelf import Shelf
from headrace.worker.warmup import Scenes, measure_profile, shrink_scenes

# How much longer or shorter than a kept profile says the quickest step of a kind may be. Longer is sooner forgiven: others
# may have the processor for a moment.
_MOST_LONGER = 2.0
_MOST_SHORTER = 1.5


class Pace:
    """`depends_on` is what the cost of steps depends on, besides the engine's sizes. Without a shelf all is measured."""

    def __init__(self, shelf: Shelf | None = None, name: str = "", depends_on: object = None) -> None:
        self._shelf = shelf
        self._name = f"profile-{name}"
        self._depends_on = depends_on

    def profile(
        self, runner: Runner, config: EngineConfig, scenes: Scenes, seen: Sequence[tuple[Work, float]]
    ) -> CostProfile:
        """`seen`: steps that were run just now, and their seconds."""
        if self._shelf is None:
            return measure_profile(runner, config, scenes)
        sizes = config.slots, config.block_size, config.context_len, config.max_step_tokens
        depends_on = self._depends_on, sizes, shrink_scenes(config, scenes)
        kept = self._shelf.find(self._name, depends_on, CostProfile)
        if kept is not None and holds(kept, seen):
            return kept
        measured = measure_profile(runner, config, scenes)
        self._shelf.keep(self._name, depends_on, measured)
        return measured


def holds(profile: CostProfile, seen: Sequence[tuple[Work, float]]) -> bool:
    """Whether steps take what it says, those with tokens of prompts and those without. Of each kind the quickest tells:
    others may have taken the processor from the rest."""
    model = CostModel(profile)
    ratios = sorted((work.prefill_tokens > 0, seconds / max(model.predict(work), 1e-9)) for work, seconds in seen)
    quickest = [next(kind)[1] for _, kind in groupby(ratios, key=lambda ratio: ratio[0])]
    return bool(quickest) and all(1.0 / _MOST_SHORTER <= ratio <= _MOST_LONGER for ratio in quickest)
