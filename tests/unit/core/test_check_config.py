"""The whole tree: what no server could run is refused, naming the field."""

import math
from typing import Any

import pytest

from headrace.core.config import (
    Config,
    EngineConfig,
    FakeConfig,
    GatewayConfig,
    ModelConfig,
    TenantConfig,
    TenantEntry,
    check_config,
)
from headrace.core.errors import InvalidInput

HASH, OTHER = "ab" * 32, "cd" * 32


def refused(**sections: Any) -> tuple[str | None, str]:
    with pytest.raises(InvalidInput) as caught:
        check_config(Config(**sections))
    return caught.value.param, caught.value.message


def model(**fields: Any) -> dict[str, Any]:
    return {"models": (ModelConfig("a", **fields),)}


def tenants(*entries: TenantEntry) -> dict[str, Any]:
    return {"tenants": entries}


def test_the_defaults_and_a_full_tree_can_run() -> None:
    check_config(Config())
    check_config(
        Config(
            engine=EngineConfig(max_queue_s=5.0, prefix_cache=False),
            gateway=GatewayConfig(port=0, tls_cert="c", tls_key="k", coalesce_s=0.01),
            models=(ModelConfig("a", aliases=("default",)), ModelConfig("b/c@1", runner="fake")),
            tenants=(TenantEntry("x", keys=(HASH,), scopes=("metrics",)), TenantEntry("y", keys=(OTHER,))),
            inject={"route": 0.05},
        )
    )


@pytest.mark.parametrize(
    ("sections", "param"),
    [
        ({"gateway": GatewayConfig(port=-1)}, "gateway.port"),
        ({"gateway": GatewayConfig(port=65536)}, "gateway.port"),
        ({"gateway": GatewayConfig(host="")}, "gateway.host"),
        ({"gateway": GatewayConfig(heartbeat_s=math.nan)}, "gateway.heartbeat_s"),
        ({"gateway": GatewayConfig(drain_s=-1.0)}, "gateway.drain_s"),
        ({"gateway": GatewayConfig(max_body_bytes=0)}, "gateway.max_body_bytes"),
        ({"gateway": GatewayConfig(tls_cert="c")}, "gateway.tls_cert"),
        ({"gateway": GatewayConfig(tls_key="k")}, "gateway.tls_cert"),
        (model(workers=0), "models[0].workers"),
        (model(runner="cuda"), "models[0].runner"),
        (model(device="tpu"), "models[0].device"),
        (model(slots=0), "models[0].slots"),
        (model(context_len=1), "models[0].context_len"),
        (model(fake=FakeConfig(vocab_size=100)), "models[0].fake.vocab_size"),
        (model(fake=FakeConfig(eos_probability=1.5)), "models[0].fake.eos_probability"),
        (model(aliases=("bad name",)), "models[0].name"),
        ({"models": (ModelConfig(""),)}, "models[0].name"),
        (tenants(TenantEntry("")), "tenants.name"),
        (tenants(TenantEntry("a"), TenantEntry("a")), "tenants"),
        (tenants(TenantEntry("a", tier="gold")), "tier"),
        (tenants(TenantEntry("a", scopes=("root",))), "scopes"),
        (tenants(TenantEntry("a", keys=("hr-plain-key",))), "keys"),
        (tenants(TenantEntry("a", keys=(HASH.upper(),))), "keys"),
        (tenants(TenantEntry("a", keys=(HASH, HASH))), "keys"),
        (tenants(TenantEntry("a", keys=(HASH,)), TenantEntry("b", keys=(HASH,))), "keys"),
        ({**tenants(TenantEntry("a", reserved_slots=33)), **model()}, "tenants"),
        ({"engine": EngineConfig(slots=8)}, "engine.slots"),
        ({"engine": EngineConfig(tenants=(TenantConfig("a"),))}, "engine.tenants"),
        ({"engine": EngineConfig(max_queue_s=0.0)}, "engine.max_queue_s"),
        ({"inject": {"lunch": 1.0}}, "inject"),
        ({"inject": {"wait:capacity": 1.0}}, "inject"),
        ({"inject": {"route": -1.0}}, "inject.route"),
    ],
)
def test_what_cannot_run_is_refused_by_name(sections: dict[str, Any], param: str) -> None:
    assert refused(**sections)[0] == param


@pytest.mark.parametrize(
    "models",
    [
        (ModelConfig("a"), ModelConfig("a")),
        (ModelConfig("a", aliases=("b",)), ModelConfig("b")),
        (ModelConfig("a", aliases=("x",)), ModelConfig("b", aliases=("x",))),
        (ModelConfig("a", aliases=("a",)),),
    ],
)
def test_a_name_or_alias_means_one_model(models: tuple[ModelConfig, ...]) -> None:
    assert refused(models=models)[0] == "models"


def test_two_gateways_are_refused_in_one_sentence() -> None:
    assert refused(gateway=GatewayConfig(processes=2)) == (
        "gateway.processes",
        "more than one gateway needs Redis: give its address as gateway.journal or --journal (redis://127.0.0.1)",
    )


def test_a_key_is_not_shown_whole_in_an_error() -> None:
    assert HASH not in refused(**tenants(TenantEntry("a", keys=(HASH, HASH))))[1]
