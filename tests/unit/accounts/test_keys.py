"""Keys: found by hash, each with its own tenant, and never wrongly."""

import pytest

from headrace.accounts.keys import KeyRing, hash_key
from headrace.core.config import TenantEntry
from headrace.core.request import Tier

PREFIX = "sk-" + "x" * 40


def test_keys_that_begin_alike_are_their_own_tenants() -> None:
    ring = KeyRing([TenantEntry("a", keys=(hash_key(PREFIX + "1"),)), TenantEntry("b", keys=(hash_key(PREFIX + "2"),))])
    first, second = ring.find(PREFIX + "1"), ring.find(PREFIX + "2")
    assert first is not None and first.tenant == "a"
    assert second is not None and second.tenant == "b"
    assert first.key_id != second.key_id
    assert ring.find(PREFIX) is None


def test_a_caller_has_what_the_entry_says() -> None:
    ring = KeyRing([TenantEntry("a", keys=(hash_key("k"),), tier="enterprise", scopes=("metrics",))])
    caller = ring.find("k")
    assert caller is not None
    assert (caller.tier, caller.scopes) == (Tier.ENTERPRISE, frozenset({"metrics"}))


@pytest.mark.parametrize("presented", ["", "K", hash_key("k"), "k" * 513, "\ud800", "k\x00"])
def test_nothing_else_is_a_key(presented: str) -> None:
    assert KeyRing([TenantEntry("a", keys=(hash_key("k"),))]).find(presented) is None


def test_a_reload_takes_keys_away() -> None:
    ring = KeyRing([TenantEntry("a", keys=(hash_key("old"),))])
    ring.replace([TenantEntry("a", keys=(hash_key("new"),))])
    assert ring.find("old") is None
    assert ring.find("new") is not None
