"""Which addresses of a Redis a configuration may name."""

import pytest

from headrace.core.config import Config, GatewayConfig, check_config
from headrace.core.errors import InvalidInput
from headrace.core.redis_address import redis_place


def refusal(journal: str) -> str:
    with pytest.raises(InvalidInput) as refused:
        check_config(Config(gateway=GatewayConfig(journal=journal)))
    assert refused.value.param == "gateway.journal"
    return refused.value.message


@pytest.mark.parametrize(
    "address",
    [
        "redis://127.0.0.1",
        "redis://localhost:6380/3",
        "redis://:secret@[::1]:6379",
        "redis://",
        "unix:///run/redis.sock?db=2",
        "rediss://:secret@redis.example:6379/1?ssl_ca_certs=/ca.pem",
        "rediss://redis.example?password=secret",
    ],
)
def test_several_gateways_may_share_it(address: str) -> None:
    check_config(Config(gateway=GatewayConfig(journal=address, processes=4)))


@pytest.mark.parametrize(
    "address", ["redis://:secret@redis.example", "rediss://redis.example", "redis://10.0.0.1", "redis://127.0.0.1.evil"]
)
def test_on_another_machine_it_needs_a_password_and_tls(address: str) -> None:
    assert "needs a password and TLS" in refusal(address) and "secret" not in refusal(address)


@pytest.mark.parametrize(
    "address",
    [
        "redis://127.0.0.1:secret",
        "redis://[::1",
        "unix://",
        "rediss://:secret@redis.example?ssl_cert_reqs=none",
        "rediss://:secret@redis.example?ssl_check_hostname=false",
        "redis://127.0.0.1?secret",
        "http://secret",
        "redis:secret",
        "redis://127.0.0.1?db=secret",
        "redis://:123/secret@127.0.0.1",
        "redis://:#secret@127.0.0.1",
        "redis://127.0.0.1/0/secret",
    ],
)
def test_what_is_none_is_refused_and_not_repeated(address: str) -> None:
    assert "secret" not in refusal(address)


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("redis://", "localhost:6379"),
        ("redis:///2", "localhost:6379"),
        ("redis://somebody:secret@127.0.0.1:6390/2", "127.0.0.1:6390"),
        ("rediss://:se%40cret@journal.example?password=secret", "journal.example:6379"),
        ("redis://:secret@[::1]:6390", "[::1]:6390"),
        ("unix://:secret@/run/redis.sock?password=secret", "/run/redis.sock"),
    ],
)
def test_where_it_is_found_is_said_without_what_opens_it(address: str, place: str) -> None:
    assert redis_place(address) == place


@pytest.mark.parametrize("processes", [0, -1, 65])
def test_a_number_of_gateways_that_cannot_be(processes: int) -> None:
    with pytest.raises(InvalidInput, match=r"gateway\.processes must be a number from 1 to 64"):
        check_config(Config(gateway=GatewayConfig(processes=processes, journal="redis://")))
