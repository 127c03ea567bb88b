"""What a simulation is asked to run. Owns the scenario's shape, its reading from TOML or JSON and its checks.

It only describes: the load is drawn in `workload`, time passes in `world`. Flags of the command build
the same tree and go through the same checks.
"""

import os
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field

from headrace.core.closed_set import complete
from headrace.core.config import CostProfile, EngineConfig, TenantConfig, check_engine, check_profile
from headrace.core.errors import InvalidInput
from headrace.sim.arrivals import Arrivals, Bursty, Diurnal, Together
from headrace.sim.lengths import Lengths, parse_lengths
from headrace.sim.traces import SLOWEST_READER, AdmissionName, Name, Seconds, TierName, is_pace, open_source

Share = Annotated[float, Meta(ge=0, le=1)]
Instant = Annotated[float, Meta(ge=0, le=1e9)]
Speed = Annotated[float, Meta(ge=1e-3, le=1e3)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
WorkerIndex = Annotated[int, Meta(ge=0, le=100_000)]
# As in a mix file, the short text form may stand for a distribution.
Written = Lengths | str | int

MAX_FILE_BYTES = 16 * 2**20
MAX_SLOTS = 65_536
MAX_EOS_IDS = 1024
# Of a worker, and of all workers together.
MAX_KV_TOKENS = 2**31
MAX_ALL_SLOTS = 2**24
MAX_ALL_BLOCKS = 2**28
MAX_MEMORY_BYTES = 8 * 2**30
# The arrivals of a spell are drawn together.
MAX_SPELL = 2_000_000
# The clock ends after 292 years.
MAX_STEP_S = 1e4
# Roughly what the simulator keeps.
_WORKER_BYTES, _BLOCK_BYTES, _CELL_BYTES, _VOCAB_BYTES, _SLOT_BYTES, _TENANT_BYTES = 30_000, 120, 16, 16, 512, 1024


class _Part(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Prefix(_Part, frozen=True):
    """A share of the requests begins with the tokens of one of `groups` prefixes, all equally likely."""

    tokens: Annotated[int, Meta(ge=1, le=10_000_000)]
    groups: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    share: Share = 1.0


class Cancels(_Part, frozen=True):
    """A share of the clients goes away: exponentially long after arriving, or after so many tokens."""

    share: Share
    after_s: Seconds | None = None
    after_tokens: Written | None = None

    def __post_init__(self) -> None:
        if (self.after_s is None) == (self.after_tokens is None):
            raise ValueError("cancels take either after_s or after_tokens")


class SlowReaders(_Part, frozen=True):
    """A share of the clients reads only so many tokens a second; zero reads none at all."""

    share: Share
    tokens_per_s: Annotated[float, Meta(ge=0, le=1e9)]

    def __post_init__(self) -> None:
        if not is_pace(self.tokens_per_s):
            raise ValueError(f"tokens_per_s must be 0 or at least {SLOWEST_READER:g}")


class TenantLoad(_Part, frozen=True):
    """One tenant: what it is entitled to and what it sends. Without `arrivals` it only names a tenant of the trace."""

    name: Name
    arrivals: Arrivals | None = None
    prompt: Written = 256
    output: Written = 128
    start_s: Instant = 0.0
    stop_s: Instant | None = None
    requests: Count | None = None
    tier: TierName = "plus"
    weight: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    max_slots: Count | None = None
    max_blocks: Count | None = None
    reserved_slots: Count = 0
    reserved_blocks: Count = 0
    admission: AdmissionName = "elastic"
    # Share of the requests that the model ends by itself, unforeseen by the scheduler.
    stop_share: Share = 0.0
    # What those requests ask for at most; without it, the rest of the context.
    max_tokens: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    prefix: Prefix | None = None
    cancels: Cancels | None = None
    slow_readers: SlowReaders | None = None
    ttft_target_s: Seconds | None = None
    itl_target_s: Seconds | None = None
    queue_timeout_s: Seconds | None = None
    deadline_s: Seconds | None = None

    def entitlement(self) -> TenantConfig:
        return TenantConfig(
            name=self.name,
            weight=self.weight,
            tier=self.tier,
            max_slots=self.max_slots,
            max_blocks=self.max_blocks,
            reserved_slots=self.reserved_slots,
            reserved_blocks=self.reserved_blocks,
        )


class Readers(_Part, frozen=True):
    """A stream with more unread tokens than `bound_tokens` is paused, and aborted after `limit_s` of that."""

    bound_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 256
    limit_s: Seconds = 30.0


class Retries(_Part, frozen=True):
    """A share of the refused clients comes back when it was told to, up to `tries` times."""

    share: Share = 0.0
    tries: Annotated[int, Meta(ge=1, le=100)] = 3


class WorkerDeath(_Part, frozen=True, tag_field="kind", tag="death"):
    """The worker is gone at once; a fresh one takes its place after `restart_s`, or never."""

    at_s: Instant
    worker: WorkerIndex = 0
    restart_s: Seconds | None = None


class SlowWorker(_Part, frozen=True, tag_field="kind", tag="slow"):
    """The worker's steps take `factor` times as long from `at_s` to `until_s`."""

    at_s: Instant
    factor: Speed
    worker: WorkerIndex = 0
    until_s: Instant | None = None


class Drift(_Part, frozen=True, tag_field="kind", tag="drift"):
    """From `at_s` on every worker's steps take `factor` times as long."""

    at_s: Instant
    factor: Speed


Happening = WorkerDeath | SlowWorker | Drift


class Scenario(_Part, frozen=True):
    """The whole world. Arrivals end with `duration_s` or `requests`; then everything runs to its end."""

    name: Annotated[str, Meta(max_length=200)] = ""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    duration_s: Seconds | None = None
    requests: Count | None = None
    workers: Annotated[int, Meta(ge=1, le=100_000)] = 1
    depth: Annotated[int, Meta(ge=1, le=8)] = 1
    # Virtual time that a worker's host spends between the end of a step and the next plan.
    host_s: Annotated[float, Meta(ge=0, le=10)] = 0.0
    # Off: the runner keeps no KV cells. Faster, and nothing can be verified.
    cells: bool = True
    engine: EngineConfig = field(default_factory=EngineConfig)
    # What steps really cost; by default what the engine believes at the start.
    device: CostProfile | None = None
    tenants: tuple[TenantLoad, ...] = ()
    trace: str | None = None
    retries: Retries = Retries()
    readers: Readers = Readers()
    happenings: tuple[Happening, ...] = ()

    def engine_config(self) -> EngineConfig:
        return msgspec.structs.replace(self.engine, tenants=tuple(tenant.entitlement() for tenant in self.tenants))

    def profile(self) -> CostProfile:
        return self.device or self.engine.profile


def read_scenario(path: str | os.PathLike[str]) -> Scenario:
    """Read and check a scenario file; a relative `trace` is taken from the file's folder."""
    where = Path(path)
    raw = read_document(where, f"scenario {where.name}", "scenario")
    try:
        scenario = msgspec.convert(raw, Scenario)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidInput(
            f"scenario {where.name}: {complete(error, Scenario)}", param=_place(error) or "scenario"
        ) from None
    if scenario.trace is not None:
        scenario = msgspec.structs.replace(scenario, trace=str(where.parent / scenario.trace))
    check_scenario(scenario, f"scenario {where.name}: ")
    return scenario


def read_document(path: Path, where: str, param: str) -> object:
    """What a file holds: JSON by its suffix, otherwise TOML. Raises InvalidInput for what is neither."""
    try:
        with open_source(path) as file:
            body = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidInput(f"{where}: cannot read {path}: {error.strerror or error}", param=param) from None
    if len(body) > MAX_FILE_BYTES:
        raise InvalidInput(f"{where}: {path} is larger than {MAX_FILE_BYTES // 2**20} MiB", param=param)
    try:
        return msgspec.json.decode(body) if path.suffix.lower() == ".json" else tomllib.loads(body.decode())
    # A ValueError is also what Python says to a number of thousands of digits.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{where}: {path} is malformed: {error}", param=param) from None


def check_scenario(scenario: Scenario, where: str = "") -> None:
    """Refuse what no world could run, naming the field. Values are checked as if they came from a file."""
    try:
        msgspec.convert(msgspec.to_builtins(scenario), Scenario)
        _check_tenants(scenario)
        _check_bounds(scenario)
        _check_sizes(scenario)
        check_engine(scenario.engine_config())
        check_profile(scenario.profile(), "device")
        _check_pace(scenario)
        _check_memory(scenario)
    except (msgspec.ValidationError, InvalidInput) as error:
        raise InvalidInput(
            f"{where}{complete(error, Scenario)}", param=getattr(error, "param", None) or _place(error)
        ) from None


def _place(error: Exception) -> str | None:
    """The field that msgspec names at the end of its message: ... - at `$.tenants[0].name`."""
    _, _, place = str(error).rpartition(" - at `$.")
    return place.removesuffix("`") or None


def _check_tenants(scenario: Scenario) -> None:
    if scenario.engine.tenants:
        raise InvalidInput("engine.tenants: name tenants in tenants instead", param="engine.tenants")
    if scenario.trace is None and not any(tenant.arrivals for tenant in scenario.tenants):
        raise InvalidInput("tenants: none has arrivals, and there is no trace", param="tenants")
    names: set[str] = set()
    for index, tenant in enumerate(scenario.tenants):
        where = f"tenants[{index}]"
        if tenant.name in names:
            raise InvalidInput(f"{where}.name: {tenant.name!r} is taken", param=f"{where}.name")
        names.add(tenant.name)
        written_lengths(tenant.prompt, f"{where}.prompt")
        written_lengths(tenant.output, f"{where}.output")
        _check_arrivals(tenant.arrivals, f"{where}.arrivals")
        if tenant.cancels is not None and tenant.cancels.after_tokens is not None:
            written_lengths(tenant.cancels.after_tokens, f"{where}.cancels.after_tokens")


def _check_arrivals(arrivals: Arrivals | None, where: str) -> None:
    if isinstance(arrivals, Bursty):
        spell = max(arrivals.rate * arrivals.on_s, arrivals.quiet_rate * arrivals.off_s)
        if spell > MAX_SPELL:
            raise InvalidInput(f"{where}: {spell:,.0f} requests in a spell, more than {MAX_SPELL:,}", param=where)
    if isinstance(arrivals, Diurnal) and arrivals.points and max(arrivals.points) < 1e-6:
        raise InvalidInput(f"{where}.points: the highest must be at least 1e-6", param=f"{where}.points")


def _check_bounds(scenario: Scenario) -> None:
    for index, tenant in enumerate(scenario.tenants):
        ends = tenant.arrivals is None or isinstance(tenant.arrivals, Together)
        bounds = (scenario.duration_s, scenario.requests, tenant.stop_s, tenant.requests)
        if not ends and all(bound is None for bound in bounds):
            raise InvalidInput(
                f"tenants[{index}]: its arrivals never end; set duration_s or requests", param="duration_s"
            )
    for index, happening in enumerate(scenario.happenings):
        if not isinstance(happening, Drift) and happening.worker >= scenario.workers:
            where = f"happenings[{index}].worker"
            raise InvalidInput(f"{where}: there are only {scenario.workers} workers", param=where)


def _check_sizes(scenario: Scenario) -> None:
    """Bounds that keep numbers within what arrays hold; before anything multiplies or allocates them."""
    engine, workers = scenario.engine, scenario.workers
    for name in ("slots", "blocks", "block_size", "context_len", "vocab_size", "max_step_tokens", "max_waiting"):
        _check_whole(f"engine.{name}", getattr(engine, name), 1, MAX_SLOTS if name == "slots" else 2**31 - 1)
    _check_whole("engine.eos_ids: their number", len(engine.eos_ids), 0, MAX_EOS_IDS)
    for index, token in enumerate(engine.eos_ids):
        _check_whole(f"engine.eos_ids[{index}]", token, 0, 2**31 - 1)
    products = (
        ("engine.blocks", "engine.blocks × engine.block_size", engine.blocks * engine.block_size, MAX_KV_TOKENS),
        ("workers", "workers × engine.slots", workers * engine.slots, MAX_ALL_SLOTS),
        ("workers", "workers × engine.blocks", workers * engine.blocks, MAX_ALL_BLOCKS),
    )
    for param, words, value, most in products:
        if value > most:
            raise InvalidInput(f"{words} must be at most {most:,}, not {value:,}", param=param)


def _check_whole(param: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidInput(f"{param} must be a whole number from {low:,} to {high:,}", param=param.partition(":")[0])


def _check_pace(scenario: Scenario) -> None:
    """A full step must not take ages, however slow happenings make it: virtual time is a 64-bit number."""
    slowness = 1.0
    for happening in scenario.happenings:
        if not isinstance(happening, WorkerDeath):
            slowness = min(slowness * max(happening.factor, 1.0), 1e30)
    _check_step("engine.profile", scenario.engine.profile, scenario.engine, 1.0)
    where = "engine.profile" if scenario.device is None else "device"
    _check_step(where, scenario.profile(), scenario.engine, slowness)


def _check_step(where: str, cost: CostProfile, engine: EngineConfig, slowness: float) -> None:
    tokens, kv = engine.max_step_tokens, engine.blocks * engine.block_size
    parts = {
        "c0_s": cost.c0_s,
        "c_in_s": cost.c_in_s * tokens,
        "c_out_s": cost.c_out_s * engine.slots,
        "c_kv_s": cost.c_kv_s * kv,
        "c_att_s": cost.c_att_s * min(tokens, kv) * min(engine.context_len, kv),
    }
    full_s = sum(parts.values())
    if full_s * slowness > MAX_STEP_S:
        slowest = max(parts, key=lambda name: parts[name])
        param = f"{where}.{slowest}" if full_s > MAX_STEP_S else "happenings"
        raise InvalidInput(f"{param}: a full step could take more than {MAX_STEP_S:,.0f} s", param=param)


def _check_memory(scenario: Scenario) -> None:
    """Refuse a world that would not fit, rather than be killed while it is built."""
    engine, cells = scenario.engine, scenario.cells
    parts = {
        "engine.blocks": engine.blocks * (_BLOCK_BYTES + engine.block_size * _CELL_BYTES * cells),
        "engine.vocab_size": engine.vocab_size * _VOCAB_BYTES * cells,
        "engine.slots": engine.slots * _SLOT_BYTES,
        "engine.context_len": engine.slots * -(-engine.context_len // engine.block_size) * 8,
        "tenants": len(scenario.tenants) * _TENANT_BYTES,
    }
    worker_bytes = _WORKER_BYTES + sum(parts.values())
    if worker_bytes * scenario.workers > MAX_MEMORY_BYTES:
        param = "workers" if worker_bytes <= MAX_MEMORY_BYTES else max(parts, key=lambda name: parts[name])
        size, most = worker_bytes * scenario.workers / 2**30, MAX_MEMORY_BYTES // 2**30
        raise InvalidInput(f"{param}: a world of about {size:,.0f} GiB; at most {most} GiB are simulated", param=param)


def written_lengths(value: Written, param: str) -> Lengths:
    """A distribution, whichever way it was written."""
    return parse_lengths(str(value), param) if isinstance(value, str | int) else value
