"""Who a request comes from, as far as its key says. Owns the record; finds nobody."""

from msgspec import Struct

from headrace.core.request import Tier


class Caller(Struct, frozen=True):
    """`key_id` names the key in logs and counts; it is not the key. `no_log`: nothing it says or hears is written down."""

    tenant: str
    tier: Tier = Tier.PLUS
    key_id: str = ""
    scopes: frozenset[str] = frozenset()
    no_log: bool = False
