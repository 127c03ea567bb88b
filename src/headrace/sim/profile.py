"""What one replica is and what it promises: its cost model, its sizes, its targets.

Owns the shape of a profile file and every bound in it. Knows nothing of load or price.
"""

import msgspec
from msgspec import Struct

from headrace.core.closed_set import complete
from headrace.core.config import CostProfile, check_profile
from headrace.core.errors import InvalidInput
from headrace.sim.exact import check_number


class ReplicaProfile(Struct, frozen=True):
    """A replica's cost model and sizes; it takes `gpus_per_replica` devices."""

    cost: CostProfile
    slots: int
    kv_tokens: int
    max_step_tokens: int = 8192
    max_step_s: float = 0.5
    block_tokens: int = 16
    gpus_per_replica: int = 1


class Targets(Struct, frozen=True):
    """The SLO; None where nothing is promised."""

    ttft_s: float | None = None
    itl_s: float | None = None


class _ProfileFile(Struct, frozen=True, forbid_unknown_fields=True):
    """Flat, as a measurement writes it. Coefficients have no defaults: a plan on a guess is not a plan."""

    c0_s: float
    c_in_s: float
    c_out_s: float
    c_kv_s: float
    c_att_s: float
    slots: int | None = None
    kv_tokens: int | None = None
    max_step_tokens: int = 8192
    max_step_s: float = 0.5
    block_tokens: int = 16
    gpus_per_replica: int = 1


def load_profile(raw: object, where: str, *, slots: int | None = None, kv_tokens: int | None = None) -> ReplicaProfile:
    """Check what a profile file held; `slots` and `kv_tokens` go before the file's."""
    try:
        file = msgspec.convert(raw, _ProfileFile)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{where}: {complete(error, _ProfileFile)}", param=where) from None
    profile = ReplicaProfile(
        cost=CostProfile(file.c0_s, file.c_in_s, file.c_out_s, file.c_kv_s, file.c_att_s),
        slots=_given("slots", slots, file.slots),
        kv_tokens=_given("kv_tokens", kv_tokens, file.kv_tokens),
        max_step_tokens=file.max_step_tokens,
        max_step_s=file.max_step_s,
        block_tokens=file.block_tokens,
        gpus_per_replica=file.gpus_per_replica,
    )
    check_replica(profile)
    return profile


def check_replica(profile: ReplicaProfile) -> None:
    check_profile(profile.cost)
    if profile.cost.c0_s <= 0.0:
        raise InvalidInput("profile.c0_s must be above zero: it is what batching shares", param="profile.c0_s")
    check_number(profile.slots, "slots", 1, 1_000_000)
    check_number(profile.kv_tokens, "kv_tokens", 1, 10**12)
    check_number(profile.max_step_tokens, "max_step_tokens", 1, 10**9)
    check_number(profile.max_step_s, "max_step_s", 1e-6, 1e4)
    check_number(profile.block_tokens, "block_tokens", 1, 65536)
    check_number(profile.gpus_per_replica, "gpus_per_replica", 1, 4096)
    if profile.max_step_tokens < profile.slots:
        raise InvalidInput("max_step_tokens must be at least slots", param="max_step_tokens")


def check_targets(targets: Targets) -> None:
    for name, target_s in (("slo_ttft", targets.ttft_s), ("slo_itl", targets.itl_s)):
        if target_s is not None:
            check_number(target_s, name, 1e-6, 1e5)


def _given(name: str, flag: int | None, written: int | None) -> int:
    value = written if flag is None else flag
    if value is None:
        raise InvalidInput(f"{name} is neither in the profile nor given", param=name)
    return value
