"""The configuration tree: what no engine could run is refused, naming the field."""

import math

import msgspec
import pytest
from msgspec.structs import replace

from headrace.core.config import (
    Config,
    CostProfile,
    EngineConfig,
    TenantConfig,
    TierTargets,
    check_engine,
    check_profile,
)
from headrace.core.errors import InvalidInput
from headrace.core.request import Tier

INTS = ("slots", "blocks", "block_size", "context_len", "vocab_size", "max_step_tokens", "max_waiting")
SECONDS = ("max_step_s", "ageing_s", "max_queue_s", "queue_timeout_s")


def refused(config: EngineConfig) -> str:
    with pytest.raises(InvalidInput) as caught:
        check_engine(config)
    assert caught.value.param is not None
    return caught.value.param


def with_tenant(**fields: object) -> EngineConfig:
    return EngineConfig(tenants=(TenantConfig("acme", **fields),))  # type: ignore[arg-type]


def test_the_defaults_can_run() -> None:
    check_engine(Config().engine)


@pytest.mark.parametrize("name", INTS)
@pytest.mark.parametrize("value", [0, -1, 2**31])
def test_a_size_out_of_range_is_refused_by_name(name: str, value: int) -> None:
    assert refused(replace(EngineConfig(), **{name: value})) == f"engine.{name}"


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_seconds_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    assert refused(replace(EngineConfig(), **{name: value})) == f"engine.{name}"


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_the_guaranteed_share_is_a_share(value: float) -> None:
    assert refused(EngineConfig(guaranteed_share=value)) == "engine.guaranteed_share"


def test_a_step_holds_a_token_of_every_slot() -> None:
    check_engine(EngineConfig(slots=8, max_step_tokens=8))
    assert refused(EngineConfig(slots=8, max_step_tokens=7)) == "engine.max_step_tokens"


@pytest.mark.parametrize("name", CostProfile.__struct_fields__)
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
def test_a_coefficient_is_a_natural_cost(name: str, value: float) -> None:
    profile = replace(CostProfile(), **{name: value})
    assert refused(EngineConfig(profile=profile)) == f"engine.profile.{name}"
    with pytest.raises(InvalidInput, match=rf"^mine\.{name} "):
        check_profile(profile, "mine")


def test_a_step_takes_some_time() -> None:
    check_profile(CostProfile(c0_s=0.0))
    check_profile(CostProfile(c_out_s=0.0))
    assert refused(EngineConfig(profile=CostProfile(c0_s=0.0, c_out_s=0.0))) == "engine.profile.c0_s"


def test_every_tier_has_targets_and_every_target_a_tier() -> None:
    targets = {tier.name.lower(): TierTargets(1.0, 0.1) for tier in Tier}
    check_engine(EngineConfig(targets=targets))
    for tier in Tier:
        lacking = {name: target for name, target in targets.items() if name != tier.name.lower()}
        assert refused(EngineConfig(targets=lacking)) == "engine.targets"
    with pytest.raises(InvalidInput, match="'gold'; tiers are batch, free, plus, enterprise"):
        check_engine(EngineConfig(targets=targets | {"gold": TierTargets(1.0, 0.1)}))


@pytest.mark.parametrize(
    ("ttft_s", "itl_s", "name"), [(0.0, 0.1, "ttft_s"), (math.nan, 0.1, "ttft_s"), (1, 0, "itl_s")]
)
def test_targets_are_positive_seconds(ttft_s: float, itl_s: float, name: str) -> None:
    targets = EngineConfig().targets | {"free": TierTargets(ttft_s, itl_s)}
    assert refused(EngineConfig(targets=targets)) == f"engine.targets.free.{name}"


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_weight_is_positive(weight: float) -> None:
    assert refused(with_tenant(weight=weight)) == "tenant acme: weight"


def test_a_tenant_has_a_tier_that_exists() -> None:
    assert refused(with_tenant(tier="gold")) == "tier"


@pytest.mark.parametrize("name", ["max_slots", "max_blocks", "reserved_slots", "reserved_blocks"])
def test_caps_and_reservations_are_natural_numbers(name: str) -> None:
    check_engine(with_tenant(**{name: 0}))
    assert refused(with_tenant(**{name: -1})) == f"tenant acme: {name}"


@pytest.mark.parametrize("name", ["slots", "blocks"])
def test_reservations_of_all_tenants_fit_the_engine(name: str) -> None:
    halves = tuple(TenantConfig(tenant, **{f"reserved_{name}": 4}) for tenant in "ab")  # type: ignore[arg-type]
    check_engine(replace(EngineConfig(tenants=halves), **{name: 8}))
    assert refused(replace(EngineConfig(tenants=halves), **{name: 7})) == "engine.tenants"


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(msgspec.ValidationError, match="slotz"):
        msgspec.convert({"engine": {"slotz": 3}}, Config)


def test_a_tenant_named_twice_is_refused() -> None:
    assert refused(EngineConfig(tenants=(TenantConfig("a"), TenantConfig("a")))) == "engine.tenants"


@pytest.mark.parametrize("kind", ["slots", "blocks"])
def test_a_reservation_above_its_own_cap_is_refused(kind: str) -> None:
    assert refused(with_tenant(**{f"max_{kind}": 2, f"reserved_{kind}": 3})) == f"reserved_{kind}"
