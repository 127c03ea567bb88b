"""How long the next step may take, and what is left of it. Derived from targets, never a constant."""

from msgspec import Struct

from headrace.engine.cost import CostModel

# A newcomer waits for the step in flight: a step takes at most this part of the shortest TTFT target.
_TTFT_PART = 0.2
# What is left of a TTFT target for the queue, after the step in flight and the newcomer's own.
QUEUE_PART = 1.0 - 2.0 * _TTFT_PART
# A target below twice the smallest step cannot be kept by anybody; it would only stop all prefill.
_LEAST_STEPS = 2.0
# A prompt that needs several steps lengthens them to at most so many times what decode rows took at their shortest since
# it began, or, where they have grown much, so many times what they take now. Twice is promised: predictions may err.
_PART_STEPS = 1.9
_LEAST_PART_STEPS = 1.5


def longest_step_s(model: CostModel, max_step_s: float) -> float:
    """The bound of any plan. On a device whose smallest step comes near it, twice the smallest step."""
    return max(max_step_s, _LEAST_STEPS * (model.c0_s + model.c_out_s))


def step_target_s(model: CostModel, itl_s: float, ttft_s: float, longest_s: float) -> float:
    """The longest step that keeps what is running (`itl_s`) and what will come (`ttft_s`) on target."""
    least_s = _LEAST_STEPS * (model.c0_s + model.c_out_s)
    return min(max(min(itl_s, _TTFT_PART * ttft_s), least_s), longest_s)


def part_target_s(decode_s: float, steady_s: float) -> float:
    """How long a step may become through a part of a prompt, since the first of which decode rows took `steady_s` or more."""
    return max(_PART_STEPS * min(decode_s, steady_s), _LEAST_PART_STEPS * decode_s)


class StepBudget(Struct, eq=False):
    """What a step may still take, in predicted seconds and in tokens."""

    model: CostModel
    target_s: float
    predicted_s: float
    tokens: int
    # Smaller chunks, and smaller than `multiple`, are not worth a row, unless they are all that is left.
    grain: int
    limit_s: float
    # Its decode rows, and what they take alone; without any nobody minds how long it becomes.
    rows: int = 0
    decode_s: float = float("inf")
    # When decode rows alone fill the target, one grain a step is still owed, or what the longest step holds of it:
    # prefill must not starve.
    owed: bool = True
    # What is less than all that is pending is a multiple of this, unless there is no room for one.
    multiple: int = 1

    def chunk(self, start: int, pending: int, *, target_s: float | None = None) -> int:
        """The most tokens a prefill row at `start` may compute in this step, or up to a nearer `target_s`."""
        room = min(pending, self.tokens)
        if room <= 0:
            return 0
        spare_s = min(self.target_s, target_s or self.target_s) - self.predicted_s
        if room == pending and spare_s > 0.0 and self.model.chunk_s(start, pending) <= spare_s:
            return pending
        count = min(room, self.model.chunk_for(start, spare_s))
        least = min(room, -(-self.grain // self.multiple) * self.multiple)
        if count >= least:
            return count - count % self.multiple or count
        if not self.owed:
            return 0
        if self.predicted_s + self.model.chunk_s(start, least) <= self.limit_s:
            return least
        return min(least, self.model.chunk_for(start, self.limit_s - self.predicted_s))

    @property
    def has_room(self) -> bool:
        """Could any row at all still be added?"""
        return self.chunk(0, self.grain) > 0

    def take(self, start: int, count: int) -> float:
        """Spend; returns the marginal seconds."""
        seconds = self.model.chunk_s(start, count)
        self.predicted_s += seconds
        self.tokens -= count
        self.owed = False
        return seconds
