"""A runner whose steps take longer by what a test injects: to prove that stages tell the truth.

Owns the delays only: `prefill` lengthens the step of a sequence's first chunk, `decode` that of its first decode row.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from headrace.core.plan import Masks, Plan, StepResult
from headrace.core.ports import Runner
from headrace.core.stages import Stage


class DelayedRunner:
    """Meets the contract of `Runner` by passing every call on."""

    def __init__(
        self, runner: Runner, inject: Mapping[str, float], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._runner = runner
        self._prefill_s = inject.get(Stage.PREFILL, 0.0)
        self._decode_s = inject.get(Stage.DECODE, 0.0)
        self._sleep = sleep
        self._delays: list[float] = []
        # Tokens known at the start, of each slot that has not decoded since.
        self._fresh: dict[int, int] = {}

    @property
    def depth(self) -> int:
        return self._runner.depth

    def load(self) -> None:
        self._runner.load()

    def warm_up(self) -> None:
        self._runner.warm_up()

    def launch(self, plan: Plan) -> None:
        self._fresh.update((start.slot, len(start.ids)) for start in plan.begun)
        rows = zip(plan.slots.tolist(), plan.starts.tolist(), strict=True)
        decoding = [slot for slot, start in rows if start >= self._fresh.get(slot, start + 1)]
        for slot in decoding:
            del self._fresh[slot]
        # First: a plan that finds no memory is not collected.
        self._runner.launch(plan)
        self._delays.append((self._prefill_s if plan.begun else 0.0) + (self._decode_s if decoding else 0.0))

    def sample(self, step: int, masks: Masks | None) -> None:
        self._runner.sample(step, masks)

    def collect(self) -> StepResult:
        result = self._runner.collect()
        delay_s = self._delays.pop(0)
        if delay_s > 0.0:
            self._sleep(delay_s)
        return result

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        return self._runner.export_blocks(blocks)

    def import_blocks(self, blocks: Sequence[int], payload: bytes) -> None:
        self._runner.import_blocks(blocks, payload)

    def close(self) -> None:
        self._runner.close()


def is_delayed(inject: Mapping[str, float]) -> bool:
    return any(inject.get(stage, 0.0) > 0.0 for stage in (Stage.PREFILL, Stage.DECODE))
