"""What a package needs from above or beside it, as Protocols."""

from collections.abc import Sequence
from typing import Protocol

from headrace.core.plan import Masks, Plan, StepResult


class Clock(Protocol):
    def now_s(self) -> float: ...


class Runner(Protocol):
    """Computes plans in the order they were launched.

    `launch(plan)` starts the forward pass and returns at once. `sample(step, masks)` starts the
    sampling of that plan and is called exactly once per launched plan, in order, before the next
    `launch`'s rows may use its tokens; `masks` is None when the plan has no masked rows.
    `collect()` waits for the oldest launched plan and returns its result. At most `depth` plans are
    in flight. A row that fails is reported in `statuses`; only a failure of the whole device raises
    (RunnerFailed), after which the runner is unusable.
    """

    @property
    def depth(self) -> int: ...

    def load(self) -> None: ...

    def warm_up(self) -> None: ...

    def launch(self, plan: Plan) -> None: ...

    def sample(self, step: int, masks: Masks | None) -> None: ...

    def collect(self) -> StepResult: ...

    def export_blocks(self, blocks: Sequence[int]) -> bytes: ...

    def import_blocks(self, blocks: Sequence[int], payload: bytes) -> None: ...

    def close(self) -> None: ...


class MaskSource(Protocol):
    """Masks of the rows that need one. The engine never knows what a mask means.

    `masks(plan_rows, numbers)` is asked when every earlier token of those sequences was passed to
    `advance`. A row it leaves out of `Masks.rows` has no mask to give and fails alone.
    """

    def masks(self, rows: Sequence[int], numbers: Sequence[int]) -> Masks: ...

    def advance(self, number: int, token: int) -> None: ...
