"""The configuration tree: one frozen section per package. Owns defaults and checks; reads no file."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct, field

from headrace.core.errors import InvalidInput
from headrace.core.redis_address import check_redis, is_redis
from headrace.core.request import Tier
from headrace.core.stages import INJECTABLE


class CostProfile(Struct, frozen=True, forbid_unknown_fields=True):
    """step time = c0 + c_in·prefill tokens + c_out·decode rows + c_kv·KV tokens + c_att·Σ(chunk × context)."""

    c0_s: float = 5e-3
    c_in_s: float = 2e-5
    c_out_s: float = 3e-5
    c_kv_s: float = 2e-8
    c_att_s: float = 2e-10

    def coefficients(self) -> tuple[float, float, float, float, float]:
        return (self.c0_s, self.c_in_s, self.c_out_s, self.c_kv_s, self.c_att_s)


class TierTargets(Struct, frozen=True, forbid_unknown_fields=True):
    """What a tier is promised unless its request asks for something else."""

    ttft_s: float
    itl_s: float


def _tier_targets() -> dict[str, TierTargets]:
    return {
        "enterprise": TierTargets(1.0, 0.050),
        "plus": TierTargets(2.0, 0.075),
        "free": TierTargets(5.0, 0.150),
        "batch": TierTargets(60.0, 0.500),
    }


class TenantConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Soft caps (None: no cap) and reservations of one tenant in one engine."""

    name: str
    weight: float = 1.0
    tier: str = "plus"
    max_slots: int | None = None
    max_blocks: int | None = None
    reserved_slots: int = 0
    reserved_blocks: int = 0


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes come from the model and the device; the rest are promises, not tuning knobs."""

    slots: int = 32
    blocks: int = 4096
    block_size: int = 16
    context_len: int = 8192
    vocab_size: int = 32000
    eos_ids: tuple[int, ...] = (0,)
    # Most tokens a runner can take in one step (its workspace), decode rows included.
    max_step_tokens: int = 8192
    # Parts of prompts are multiples of this where a runner computes fewer tokens in the same time; 0: of any length.
    part_tokens: int = 0
    # No plan is predicted to take longer than this.
    max_step_s: float = 0.5
    # A waiting sequence of any tier counts as the highest tier after this long.
    ageing_s: float = 10.0
    # The queue holds at most this many seconds of work, each tenant its share of them; a request whose
    # TTFT target is shorter is refused sooner.
    max_queue_s: float = 30.0
    max_waiting: int = 200_000
    queue_timeout_s: float = 120.0
    # Share of all blocks that guaranteed reservations may take.
    guaranteed_share: float = 0.8
    prefix_cache: bool = True
    profile: CostProfile = CostProfile()
    targets: dict[str, TierTargets] = field(default_factory=_tier_targets)
    tenants: tuple[TenantConfig, ...] = ()


class FakeConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The model of a worker that has none: byte tokens, answers computable from the prompt, settable cost."""

    vocab_size: int = 512
    context_len: int = 8192
    slots: int = 32
    blocks: int = 4096
    depth: int = 1
    profile: CostProfile = CostProfile()
    # Steps take the time that the profile says.
    sleep: bool = True
    eos_probability: float = 0.0
    # For drills: a prompt with this id kills whatever worker computes it.
    lethal_id: int | None = None


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One model to serve. `source` is what `headrace models` understands: a name of ours or a path.

    `runner` is torch or fake. `device` auto takes a CUDA card where there is one that can be used. Zero and None leave a
    size to the model and the machine.
    """

    name: str
    source: str = ""
    aliases: tuple[str, ...] = ()
    workers: int = 1
    runner: str = "torch"
    device: str = "auto"
    dtype: str = "auto"
    # The same tokens alone, in any company and after any interruption. The CPU's are so by themselves.
    deterministic: bool = False
    slots: int = 32
    context_len: int | None = None
    kv_tokens: int | None = None
    threads: int = 0
    fake: FakeConfig = FakeConfig()


class TenantEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant of the configuration file. `keys` are SHA-256 in hex: a key itself is never written down."""

    name: str
    keys: tuple[str, ...] = ()
    # What its keys may do besides generate: metrics, admin.
    scopes: tuple[str, ...] = ()
    tier: str = "plus"
    weight: float = 1.0
    # Blocks are those of the workers: of 8 tokens on processors, of 16 on cards.
    max_slots: int | None = None
    max_blocks: int | None = None
    reserved_slots: int = 0
    reserved_blocks: int = 0
    # Nothing of its streams is written down: they outlive their worker, not their gateway.
    no_log: bool = False

    def in_engine(self) -> TenantConfig:
        return TenantConfig(
            name=self.name,
            weight=self.weight,
            tier=self.tier,
            max_slots=self.max_slots,
            max_blocks=self.max_blocks,
            reserved_slots=self.reserved_slots,
            reserved_blocks=self.reserved_blocks,
        )


class GatewayConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP face: where it listens, what it takes in, how it streams."""

    host: str = "127.0.0.1"
    port: int = 8080
    # 0: no gRPC.
    grpc_port: int = 0
    processes: int = 1
    tls_cert: str | None = None
    tls_key: str | None = None
    # Host headers that are answered besides loopback names and the address listened on; "*" answers all.
    allowed_hosts: tuple[str, ...] = ()
    # Origins of pages elsewhere whose scripts may call; none by default.
    allowed_origins: tuple[str, ...] = ()
    # A request must be here, headers and body, after this long.
    receive_s: float = 30.0
    max_headers: int = 100
    max_header_bytes: int = 32 << 10
    max_body_bytes: int = 8 << 20
    max_open_requests: int = 10_000
    # Silence of a stream is broken by a comment this often.
    heartbeat_s: float = 10.0
    # Deltas within this time are sent as one; 0 sends each step's at once.
    coalesce_s: float = 0.0
    # How long a stream goes on when its last reader went away.
    disconnect_grace_s: float = 10.0
    # How long a stream that ended can be read again, and the most that all of these may take in memory; as much again on
    # disk, where they are kept in files.
    resume_s: float = 300.0
    resume_bytes: int = 256 << 20
    # Where streams are kept so that they outlive their gateway: file (in the run folder), memory (nowhere), or the
    # address of a Redis, which several gateways share.
    journal: str = "file"
    # Text that no reader of a stream has read: past this its sequences pause. A reader that is behind by so much for
    # the time is cut off; with the last one the stream is aborted.
    max_unread_bytes: int = 256 << 10
    max_unread_s: float = 60.0
    # Of what was sent, the most that the system holds for a client that takes nothing: more is unread, and counts above.
    max_unsent_bytes: int = 16 << 10
    # While requests are open, and up to half a second longer, processors wait for work without halting, where Linux lets this
    # user ask for that: a lone request meets no processor that must wake up, and idle ones take as much power as busy ones.
    keep_awake: bool = False
    # Open streams may take this long to finish when the server is told to stop.
    drain_s: float = 30.0

    @property
    def closing_s(self) -> int:
        """How long after being told to stop the last connection is cut: after `drain_s`, and time for last words."""
        return math.ceil(self.drain_s + _LAST_WORDS_S)


class TelemetryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What the server's processes say of themselves."""

    # Least of what is logged; at info a line for each request.
    log_level: str = "info"


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole tree. A section is added with the package that reads it."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    gateway: GatewayConfig = GatewayConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    models: tuple[ModelConfig, ...] = ()
    tenants: tuple[TenantEntry, ...] = ()
    # Seconds to sleep when a request enters a stage, by the stage's name: to prove that stages tell the truth.
    inject: dict[str, float] = {}


RUNNERS = ("torch", "fake")
DEVICES = ("auto", "cuda", "cpu")
# Which of them a device can do is its runner's to say.
DTYPES = ("auto", "fp32", "bf16", "fp8", "int8", "int4")
JOURNALS = ("file", "memory")
LOG_LEVELS = ("debug", "info", "warning", "error")
# Of the engine's fields, those that a server's configuration decides for all its models.
PROMISES = (
    "max_step_s",
    "ageing_s",
    "max_queue_s",
    "max_waiting",
    "queue_timeout_s",
    "guaranteed_share",
    "prefix_cache",
    "targets",
)
SCOPES = ("metrics", "admin")
_TIERS = ", ".join(tier.name.lower() for tier in Tier)

_LAST_WORDS_S = 3.0
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,127}")
_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_KEY_HASH = re.compile(r"[0-9a-f]{64}")

# Least and most of what a number may be, by its section.
_GATEWAY_RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "grpc_port": (0, 65535),
    "processes": (1, 64),
    "receive_s": (0.01, 3600),
    "max_headers": (1, 10_000),
    "max_header_bytes": (256, 1 << 20),
    "max_body_bytes": (1, 1 << 30),
    "max_open_requests": (1, 1_000_000),
    "heartbeat_s": (0.01, 3600),
    "coalesce_s": (0, 10),
    "disconnect_grace_s": (0, 86_400),
    "resume_s": (0, 86_400),
    "resume_bytes": (0, 1 << 40),
    "max_unread_bytes": (1, 1 << 30),
    "max_unread_s": (0, 86_400),
    "max_unsent_bytes": (1 << 10, 1 << 30),
    "drain_s": (0, 86_400),
}
_MODEL_RANGES: dict[str, tuple[float, float]] = {
    "workers": (1, 256),
    "slots": (1, 4096),
    "context_len": (2, 2**31 - 1),
    "kv_tokens": (1, 2**31 - 1),
    "threads": (0, 4096),
}
_FAKE_RANGES: dict[str, tuple[float, float]] = {
    "vocab_size": (512, 1 << 20),
    "context_len": (2, 1 << 24),
    "slots": (1, 4096),
    "blocks": (1, 1 << 24),
    "depth": (1, 8),
    "eos_probability": (0, 1),
}
_POSITIVE_INTS = ("slots", "blocks", "block_size", "context_len", "vocab_size", "max_step_tokens", "max_waiting")
_POSITIVE_SECONDS = ("max_step_s", "ageing_s", "max_queue_s", "queue_timeout_s")


def check_config(config: Config) -> None:
    """Refuse a tree that no server could run, naming the field."""
    check_engine(config.engine)
    _check_promises(config.engine)
    _check_gateway(config.gateway)
    _check_telemetry(config.telemetry)
    for number, model in enumerate(config.models):
        _check_model(model, f"models[{number}]")
    _check_names(config.models)
    _check_tenants(config)
    for name, seconds in config.inject.items():
        if name not in INJECTABLE:
            told = f"inject names no stage that can be made longer: {name}; these are {', '.join(INJECTABLE)}"
            raise InvalidInput(told, param="inject")
        _check_number(f"inject.{name}", seconds, 0, 60)


def _check_promises(engine: EngineConfig) -> None:
    """Sizes follow from a model and its machine, tenants have a section of their own: here they would do nothing."""
    usual = EngineConfig()
    for name in engine.__struct_fields__:
        if name not in PROMISES and getattr(engine, name) != getattr(usual, name):
            message = f"engine.{name} cannot be set for a server: it follows from [[models]] and [[tenants]]"
            raise InvalidInput(message, param=f"engine.{name}")


def _check_gateway(gateway: GatewayConfig) -> None:
    if is_redis(gateway.journal):
        check_redis(gateway.journal, "gateway.journal")
    elif gateway.journal not in JOURNALS:
        message = f"gateway.journal must be {', '.join(JOURNALS)} or the address of a Redis (redis://127.0.0.1)"
        raise InvalidInput(message, param="gateway.journal")
    _check_ranges("gateway", gateway, _GATEWAY_RANGES)
    if gateway.processes > 1 and not is_redis(gateway.journal):
        message = (
            "more than one gateway needs Redis: give its address as gateway.journal or --journal (redis://127.0.0.1)"
        )
        raise InvalidInput(message, param="gateway.processes")
    if not gateway.host:
        raise InvalidInput("gateway.host must name an address", param="gateway.host")
    if (gateway.tls_cert is None) != (gateway.tls_key is None):
        raise InvalidInput("gateway.tls_cert and gateway.tls_key go together", param="gateway.tls_cert")


def _check_telemetry(telemetry: TelemetryConfig) -> None:
    if telemetry.log_level not in LOG_LEVELS:
        message = f"telemetry.log_level must be one of {', '.join(LOG_LEVELS)}"
        raise InvalidInput(message, param="telemetry.log_level")


def _check_model(model: ModelConfig, where: str) -> None:
    for name in (model.name, *model.aliases):
        if not _MODEL_NAME.fullmatch(name):
            raise InvalidInput(f"{where}: {name[:200]!r} cannot be a model's name", param=f"{where}.name")
    if model.runner not in RUNNERS:
        raise InvalidInput(f"{where}.runner must be one of {', '.join(RUNNERS)}", param=f"{where}.runner")
    if model.device not in DEVICES:
        raise InvalidInput(f"{where}.device must be one of {', '.join(DEVICES)}", param=f"{where}.device")
    if model.dtype not in DTYPES:
        raise InvalidInput(f"{where}.dtype must be one of {', '.join(DTYPES)}", param=f"{where}.dtype")
    _check_ranges(where, model, _MODEL_RANGES)
    _check_ranges(f"{where}.fake", model.fake, _FAKE_RANGES)
    check_profile(model.fake.profile, f"{where}.fake.profile")


def _check_names(models: Iterable[ModelConfig]) -> None:
    taken: set[str] = set()
    for model in models:
        for name in (model.name, *model.aliases):
            if name in taken:
                raise InvalidInput(f"models: {name!r} names more than one model, or one of them twice", param="models")
            taken.add(name)


def _check_tenants(config: Config) -> None:
    names: set[str] = set()
    owners: dict[str, str] = {}
    for entry in config.tenants:
        if not _TENANT_NAME.fullmatch(entry.name):
            raise InvalidInput(f"tenants: {entry.name[:200]!r} cannot be a tenant's name", param="tenants.name")
        if entry.name in names:
            raise InvalidInput(f"tenants names {entry.name} twice", param="tenants")
        names.add(entry.name)
        _check_tenant(entry.in_engine())
        for key in entry.keys:
            if not _KEY_HASH.fullmatch(key):
                message = (
                    f"tenant {entry.name}: a key is written as its SHA-256, 64 small hex digits (headrace keys new)"
                )
                raise InvalidInput(message, param="keys")
            if owners.setdefault(key, entry.name) != entry.name or entry.keys.count(key) > 1:
                raise InvalidInput(f"tenant {entry.name}: key {key[:8]}… is given twice", param="keys")
        for scope in entry.scopes:
            if scope not in SCOPES:
                message = f"tenant {entry.name}: scopes are {', '.join(SCOPES)}, not {scope[:200]!r}"
                raise InvalidInput(message, param="scopes")
    for model in config.models:
        slots = model.fake.slots if model.runner == "fake" else model.slots
        if sum(entry.reserved_slots for entry in config.tenants) > slots:
            message = f"reserved_slots of all tenants exceed the {slots} slots of model {model.name}"
            raise InvalidInput(message, param="tenants")


def _check_ranges(where: str, section: Any, ranges: Mapping[str, tuple[float, float]]) -> None:
    for name, (low, high) in ranges.items():
        value = getattr(section, name)
        if value is not None:
            _check_number(f"{where}.{name}", value, low, high)


def check_engine(config: EngineConfig) -> None:
    """Refuse a tree that no engine could run, naming the field."""
    for name in _POSITIVE_INTS:
        _check_number(f"engine.{name}", getattr(config, name), 1, 2**31 - 1)
    for name in _POSITIVE_SECONDS:
        _check_number(f"engine.{name}", getattr(config, name), 1e-6, 1e7)
    _check_number("engine.part_tokens", config.part_tokens, 0, config.max_step_tokens)
    _check_number("engine.guaranteed_share", config.guaranteed_share, 0.0, 1.0)
    if config.max_step_tokens < config.slots:
        raise InvalidInput("engine.max_step_tokens must be at least engine.slots", param="engine.max_step_tokens")
    check_profile(config.profile, "engine.profile")
    for tier in Tier:
        if tier.name.lower() not in config.targets:
            raise InvalidInput(f"engine.targets lacks {tier.name.lower()}", param="engine.targets")
    for name, target in config.targets.items():
        if name.upper() not in Tier.__members__:
            raise InvalidInput(
                f"engine.targets names no tier: {name[:200]!r}; tiers are {_TIERS}", param="engine.targets"
            )
        _check_number(f"engine.targets.{name}.ttft_s", target.ttft_s, 1e-6, 1e7)
        _check_number(f"engine.targets.{name}.itl_s", target.itl_s, 1e-6, 1e7)
    for tenant in config.tenants:
        _check_tenant(tenant)
    if len({tenant.name for tenant in config.tenants}) < len(config.tenants):
        raise InvalidInput("engine.tenants names a tenant twice", param="engine.tenants")
    if sum(tenant.reserved_slots for tenant in config.tenants) > config.slots:
        raise InvalidInput("reserved_slots of all tenants exceed engine.slots", param="engine.tenants")
    if sum(tenant.reserved_blocks for tenant in config.tenants) > config.blocks:
        raise InvalidInput("reserved_blocks of all tenants exceed engine.blocks", param="engine.tenants")


def check_profile(profile: CostProfile, where: str = "profile") -> None:
    for name in profile.__struct_fields__:
        _check_number(f"{where}.{name}", getattr(profile, name), 0.0, 1e6)
    if profile.c0_s + profile.c_out_s <= 0.0:
        raise InvalidInput(f"{where}: a step must take some time (c0_s or c_out_s)", param=f"{where}.c0_s")


def _check_tenant(tenant: TenantConfig) -> None:
    where = f"tenant {tenant.name}"
    _check_number(f"{where}: weight", tenant.weight, 1e-6, 1e6)
    if tenant.tier.upper() not in Tier.__members__:
        raise InvalidInput(f"{where}: tier must be one of {_TIERS}", param="tier")
    for name in ("max_slots", "max_blocks", "reserved_slots", "reserved_blocks"):
        value = getattr(tenant, name)
        if value is not None:
            _check_number(f"{where}: {name}", value, 0, 2**31 - 1)
    for kind, most, reserved in (
        ("slots", tenant.max_slots, tenant.reserved_slots),
        ("blocks", tenant.max_blocks, tenant.reserved_blocks),
    ):
        if most is not None and reserved > most:
            raise InvalidInput(f"{where}: reserved_{kind} exceeds max_{kind}", param=f"reserved_{kind}")


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidInput(f"{name} must be a number from {low:g} to {high:g}", param=name)
