"""The keys of all tenants, as hashes. Owns finding who presents a key; keeps no key and reads no file."""

import hashlib
import hmac
from collections.abc import Iterable

from headrace.core.caller import Caller
from headrace.core.config import TenantEntry
from headrace.core.errors import InvalidInput
from headrace.core.request import Tier

MAX_KEY_BYTES = 512
_KEY_ID_CHARS = 12


def hash_key(key: str) -> str:
    """As the configuration holds it: SHA-256 in hex."""
    return hashlib.sha256(key.encode()).hexdigest()


class KeyRing:
    """Who has which key. `replace` swaps all of them at once, and keeps the old ones where the new are wrong."""

    __slots__ = ("_callers",)

    def __init__(self, entries: Iterable[TenantEntry]) -> None:
        self._callers = _callers_of(entries)

    def replace(self, entries: Iterable[TenantEntry]) -> None:
        self._callers = _callers_of(entries)

    def find(self, presented: str) -> Caller | None:
        """The caller whose key this is. The look-up is by hash, so its time says nothing about any key."""
        key = presented.encode(errors="surrogatepass")
        if not 0 < len(key) <= MAX_KEY_BYTES:
            return None
        digest = hashlib.sha256(key).hexdigest()
        found = self._callers.get(digest)
        if found is None:
            return None
        known, caller = found
        return caller if hmac.compare_digest(known, digest) else None


def _callers_of(entries: Iterable[TenantEntry]) -> dict[str, tuple[str, Caller]]:
    callers: dict[str, tuple[str, Caller]] = {}
    names: set[str] = set()
    for entry in entries:
        if entry.name in names:
            raise InvalidInput(f"tenant {entry.name} is there twice", param="tenants")
        names.add(entry.name)
        if entry.tier.upper() not in Tier.__members__:
            raise InvalidInput(f"tenant {entry.name}: no such tier", param="tier")
        for given in entry.keys:
            digest = given.lower()
            if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
                raise InvalidInput(f"tenant {entry.name}: a key is given as its SHA-256 in hex", param="keys")
            if digest in callers:
                raise InvalidInput(f"tenant {entry.name}: one of its keys is there twice", param="keys")
            caller = Caller(entry.name, Tier[entry.tier.upper()], digest[:_KEY_ID_CHARS], frozenset(entry.scopes))
            callers[digest] = (digest, caller)
    return callers
