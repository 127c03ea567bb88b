"""What a simulation is asked to run. Owns the scenario's shape, its reading from TOML or JSON and its checks.

It only describes: the load is drawn in `workload`, time passes in `world`. Flags of the command build
the same tree and go through the same checks.
"""

import os
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field

from headrace.core.config import CostProfile, EngineConfig, TenantConfig, check_engine, check_profile
from headrace.core.errors import InvalidInput
from headrace.sim.arrivals import Arrivals, Together
from headrace.sim.lengths import Lengths, parse_lengths
from headrace.sim.traces import AdmissionName, Name, Seconds, TierName

Share = Annotated[float, Meta(ge=0, le=1)]
Instant = Annotated[float, Meta(ge=0, le=1e9)]
Speed = Annotated[float, Meta(ge=1e-3, le=1e3)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
WorkerIndex = Annotated[int, Meta(ge=0, le=1_000_000)]
# As in a mix file, the short text form may stand for a distribution.
Written = Lengths | str | int


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
    workers: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
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
    try:
        data = where.read_bytes()
    except OSError as error:
        raise InvalidInput(f"scenario {path}: {error.strerror or error}", param="scenario") from None
    decode = msgspec.json.decode if where.suffix == ".json" else msgspec.toml.decode
    try:
        scenario = decode(data, type=Scenario)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"scenario {where.name}: {error}", param="scenario") from None
    if scenario.trace is not None:
        scenario = msgspec.structs.replace(scenario, trace=str(where.parent / scenario.trace))
    check_scenario(scenario, f"scenario {where.name}: ")
    return scenario


def check_scenario(scenario: Scenario, where: str = "") -> None:
    """Refuse what no world could run, naming the field. Values are checked as if they came from a file."""
    try:
        msgspec.convert(msgspec.to_builtins(scenario), Scenario)
        _check_tenants(scenario)
        _check_bounds(scenario)
        check_engine(scenario.engine_config())
        check_profile(scenario.profile(), "device")
    except (msgspec.ValidationError, InvalidInput) as error:
        raise InvalidInput(f"{where}{error}", param=getattr(error, "param", None)) from None


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
        if tenant.cancels is not None and tenant.cancels.after_tokens is not None:
            written_lengths(tenant.cancels.after_tokens, f"{where}.cancels.after_tokens")


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


def written_lengths(value: Written, param: str) -> Lengths:
    """A distribution, whichever way it was written."""
    return parse_lengths(str(value), param) if isinstance(value, str | int) else value
