"""Time of the engine's own work per step: planning and applying, with nothing behind it.

Owns the null runner, the steady load and the stopwatches. The engine is the real one, the garbage
collector is left as it is; time spent in the null runner is taken off. Wall time is what a device would
wait for; it is judged by CPU time, which is the same on an idle core and still means something on a busy one.
"""

import platform
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter_ns, thread_time_ns

import numpy as np
from msgspec import Struct

from headrace.core.config import EngineConfig
from headrace.core.hashing import chain_blocks, chain_root
from headrace.core.plan import Masks, Plan, StepResult
from headrace.core.request import Request, SamplingParams
from headrace.engine.loop import Engine

MEAN_OUTPUT = 200
# Far beyond the mean, so that those who began together do not all end together.
MAX_OUTPUT = 4000
PROMPTS = (60, 140)
BLOCK_SIZE = 16
TARGETS_MS = {256: 1.0, 1024: 3.0}
# "Independent of queue length": the longest queue may cost this much more than the shortest.
FLAT_RATIO = 1.25
# Filling the longest queues takes longer than measuring them: they are measured at some sizes only.
_DEEP_WAITING = 50_000
_TEMPLATES = 4096
# Three times what a sequence has on average: KV never binds.
_BLOCKS_PER_SLOT = 56
_WARM_UP_STEPS = 60
_LONG_S = 1e6


class Sizes(Struct, frozen=True):
    """What is varied, and how many steps are timed at each point. Only `deep` sizes see the longest queues."""

    slots: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    deep: tuple[int, ...] = (32, 256, 1024)
    waiting: tuple[int, ...] = (0, 1_000, 10_000, 100_000)
    tenants: tuple[int, ...] = (1, 50)
    steps: int = 400
    depth: int = 1
    prefix_cache: bool = True

    def queues(self, slots: int) -> list[int]:
        """The queue lengths measured at that many slots, shortest first."""
        return sorted(waiting for waiting in self.waiting if waiting < _DEEP_WAITING or slots in self.deep)


QUICK = Sizes(slots=(32, 256, 1024), waiting=(0, 1_000, 10_000), steps=150)


class StepCost(Struct, frozen=True):
    """Milliseconds per step at one point; `rows` is the mean number of rows in a plan."""

    slots: int
    waiting: int
    tenants: int
    rows: float
    ends_per_step: float
    plan_p50_ms: float
    plan_p99_ms: float
    apply_p50_ms: float
    apply_p99_ms: float
    both_p50_ms: float
    both_p99_ms: float
    # CPU time of plan and apply together: what is left when other processes are taken out of it.
    cpu_p50_ms: float
    cpu_p99_ms: float
    submit_us: float


class Verdict(Struct, frozen=True):
    target: str
    measured: str
    met: bool


class SchedulerReport(Struct, frozen=True):
    machine: str
    python: str
    sizes: Sizes
    points: tuple[StepCost, ...]
    verdicts: tuple[Verdict, ...]


class NullRunner:
    """Answers every plan with tokens drawn beforehand, one in `MEAN_OUTPUT` of them an end of sequence."""

    def __init__(self, config: EngineConfig, depth: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.depth = depth
        self.spent_ns = 0
        # Virtual time, which passes as the profile says, and the rows of the plan collected last.
        self.now_s = 0.0
        self.num_rows = 0
        self._profile = config.profile
        self._tokens = rng.integers(1, config.vocab_size, 1 << 16, dtype=np.int32)
        self._tokens[rng.random(len(self._tokens)) < 1.0 / MEAN_OUTPUT] = config.eos_ids[0]
        self._statuses = np.zeros(config.slots, np.uint8)
        self._place = 0
        self._plans: deque[Plan] = deque()

    def load(self) -> None: ...

    def warm_up(self) -> None: ...

    def close(self) -> None: ...

    def launch(self, plan: Plan) -> None:
        since_ns = perf_counter_ns()
        self._plans.append(plan)
        self.spent_ns += perf_counter_ns() - since_ns

    def sample(self, step: int, masks: Masks | None) -> None: ...

    def collect(self) -> StepResult:
        since_ns = perf_counter_ns()
        plan = self._plans.popleft()
        self.num_rows = rows = len(plan.slots)
        if self._place + rows > len(self._tokens):
            self._place = 0
        tokens = np.where(plan.samples, self._tokens[self._place : self._place + rows], np.int32(-1))
        self._place += rows
        step_s = self._step_s(plan)
        self.now_s += step_s
        result = StepResult(plan.step, tokens, self._statuses[:rows], step_s)
        self.spent_ns += perf_counter_ns() - since_ns
        return result

    def _step_s(self, plan: Plan) -> float:
        work, profile = plan.work, self._profile
        tokens_s = profile.c_in_s * work.prefill_tokens + profile.c_out_s * work.decode_rows
        return profile.c0_s + tokens_s + profile.c_kv_s * work.kv_tokens + profile.c_att_s * work.attended

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        raise NotImplementedError

    def import_blocks(self, blocks: Sequence[int], payload: bytes) -> None:
        raise NotImplementedError


class Bench:
    """One engine in steady state: as many requests are added as end, so that the queue keeps its length."""

    def __init__(self, slots: int, tenants: int, sizes: Sizes) -> None:
        self._config = EngineConfig(
            slots=slots,
            blocks=slots * _BLOCKS_PER_SLOT,
            block_size=BLOCK_SIZE,
            max_queue_s=_LONG_S,
            queue_timeout_s=_LONG_S,
            max_waiting=2 * max(sizes.waiting) + 2 * slots,
            prefix_cache=sizes.prefix_cache,
        )
        self._runner = NullRunner(self._config, sizes.depth, seed=slots)
        self._engine = Engine(self._config, self._runner)
        self._templates = _templates(sizes.prefix_cache)
        self._tenants = tenants
        self._submitted = 0
        self._outstanding = 0
        self._submit_ns = 0

    def measure(self, waiting: int, steps: int) -> StepCost:
        """Fill the queue to `waiting`, let the slots fill, then time `steps` steps."""
        since_ns, since = self._submit_ns, self._submitted
        self._top_up(waiting)
        submit_us = (self._submit_ns - since_ns) / 1e3 / max(1, self._submitted - since)
        for _ in range(self._warm_up_steps()):
            self._step(waiting)
        taken = np.array([self._step(waiting) for _ in range(steps)])  # [steps, (plan, apply, cpu, rows, ends)]
        plan_ms, apply_ms, cpu_ms = taken[:, 0] / 1e6, taken[:, 1] / 1e6, taken[:, 2] / 1e6
        return StepCost(
            self._config.slots,
            waiting,
            self._tenants,
            float(taken[:, 3].mean()),
            float(taken[:, 4].mean()),
            *_median_and_tail(plan_ms),
            *_median_and_tail(apply_ms),
            *_median_and_tail(plan_ms + apply_ms),
            *_median_and_tail(cpu_ms),
            submit_us,
        )

    @property
    def num_waiting(self) -> int:
        return self._engine.load().waiting

    def _warm_up_steps(self) -> int:
        """Prompts of a whole house are prefilled over many steps when the house is large."""
        return _WARM_UP_STEPS + (self._config.slots // 4 if self._engine.load().running == 0 else 0)

    def _step(self, waiting: int) -> tuple[int, int, int, int, int]:
        """One plan launched and one applied: nanoseconds of each, of CPU time, and how many rows and ends."""
        if self._engine.in_flight < self._runner.depth - 1:
            self._engine.begin(self._runner.now_s)
        spent_ns, cpu_ns, start_ns = self._runner.spent_ns, thread_time_ns(), perf_counter_ns()
        self._engine.begin(self._runner.now_s)
        begun_ns, begin_spent_ns = perf_counter_ns(), self._runner.spent_ns
        frame = self._engine.end(self._runner.now_s)
        ended_ns, cpu_ns = perf_counter_ns(), thread_time_ns() - cpu_ns
        plan_ns = begun_ns - start_ns - (begin_spent_ns - spent_ns)
        apply_ns = ended_ns - begun_ns - (self._runner.spent_ns - begin_spent_ns)
        self._outstanding -= len(frame.ended)
        self._top_up(waiting)
        cpu_ns -= self._runner.spent_ns - spent_ns
        return plan_ns, apply_ns, cpu_ns, self._runner.num_rows, len(frame.ended)

    def _top_up(self, waiting: int) -> None:
        for _ in range(self._config.slots + waiting - self._outstanding):
            request = self._request(self._submitted)
            since_ns = perf_counter_ns()
            self._engine.submit(request, self._runner.now_s)
            self._submit_ns += perf_counter_ns() - since_ns
            self._submitted += 1
            self._outstanding += 1

    def _request(self, index: int) -> Request:
        prompt_ids, root, hashes = self._templates[index % _TEMPLATES]
        return Request(
            f"request-{index}",
            f"tenant-{index % self._tenants}",
            prompt_ids,
            max_tokens=MAX_OUTPUT,
            sampling=SamplingParams(),
            # A wait beyond the target would be refused at the door, and here the queue is long on purpose.
            ttft_target_s=_LONG_S,
            prefix_root=root,
            block_hashes=hashes,
        )


def run_scheduler(sizes: Sizes, progress: Callable[[str], None]) -> SchedulerReport:
    points: list[StepCost] = []
    for slots in sizes.slots:
        for tenants in sizes.tenants:
            progress(f"{slots} slots, {tenants} tenant{'s' if tenants > 1 else ''}")
            bench = Bench(slots, tenants, sizes)
            points += [bench.measure(waiting, sizes.steps) for waiting in sizes.queues(slots)]
    machine = f"{platform.machine()} {platform.system()}"
    return SchedulerReport(machine, platform.python_version(), sizes, tuple(points), judge(points))


def judge(points: Sequence[StepCost]) -> tuple[Verdict, ...]:
    """Against TARGETS_MS, by medians of CPU time, the worst point of each kind counting."""
    verdicts = []
    for slots, target_ms in TARGETS_MS.items():
        medians = [point.cpu_p50_ms for point in points if point.slots == slots]
        if medians:
            told = f"plan + apply <= {target_ms:g} ms at {slots:,} slots"
            verdicts.append(Verdict(told, f"{max(medians):.2f} ms", max(medians) <= target_ms))
    queues = sorted({point.waiting for point in points if point.waiting})
    if len(queues) > 1:
        growth = queue_growth([point for point in points if point.waiting])
        told = f"{queues[-1]:,} waiting cost at most {FLAT_RATIO}x of {queues[0]:,}"
        verdicts.append(Verdict(told, f"{growth:.2f}x", growth <= FLAT_RATIO))
    return tuple(verdicts)


def queue_growth(points: Sequence[StepCost]) -> float:
    """The median step with the longest queue over that with the shortest: the worst of all sizes that had both."""
    rows: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for point in points:
        rows.setdefault((point.slots, point.tenants), []).append((point.waiting, point.cpu_p50_ms))
    longest = max(point.waiting for point in points)
    full = [sorted(row) for row in rows.values() if max(row)[0] == longest]
    return max(row[-1][1] / row[0][1] for row in full)


def _median_and_tail(values_ms: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float]:
    return float(np.percentile(values_ms, 50)), float(np.percentile(values_ms, 99))


def _templates(hashed: bool) -> list[tuple[tuple[int, ...], bytes, tuple[bytes, ...]]]:
    """Prompts with their hashes, as the tokeniser would send them; enough that cached prefixes are rare."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(PROMPTS[0], PROMPTS[1] + 1, _TEMPLATES).tolist()
    templates = []
    for index, length in enumerate(lengths):
        ids = tuple(range(1, length + 1))
        root = chain_root(salt=index.to_bytes(4, "little"), version="bench@1") if hashed else b""
        templates.append((ids, root, chain_blocks(root, ids, BLOCK_SIZE) if hashed else ()))
    return templates
