"""The keys of all tenants, as hashes. Owns finding who presents a key; keeps no key and reads no file."""

import hashlib
import hmac
from collections.abc import Iterable

from headrace.core.caller import Caller
from headrace.core.config import TenantEntry
from headrace.core.request import Tier

MAX_KEY_BYTES = 512
_KEY_ID_CHARS = 12


def hash_key(key: str) -> str:
    """As the configuration holds it: SHA-256 in hex."""
    return hashlib.sha256(key.encode()).hexdigest()


class KeyRing:
    """Who has which key. `replace` swaps all of them at once. Entries are of a configuration that was checked."""

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
    return {
        key: (
            key,
            Caller(entry.name, Tier[entry.tier.upper()], key[:_KEY_ID_CHARS], frozenset(entry.scopes), entry.no_log),
        )
        for entry in entries
        for key in entry.keys
    }
