"""Who takes how much of a journal: records by tenant. Owns the rule by which somebody takes more than is fair to others.

Knows nothing of what follows from that.
"""

from collections.abc import Mapping

# Who takes more than this part of what may be kept is large.
_PART = 1 / 8


class Shares:
    __slots__ = ("_records",)

    def __init__(self) -> None:
        self._records: dict[str, int] = {}

    def add(self, records: Mapping[str, int]) -> None:
        for tenant, number in records.items():
            self._records[tenant] = self._records.get(tenant, 0) + number

    def remove(self, records: Mapping[str, int]) -> None:
        for tenant, number in records.items():
            left = self._records.get(tenant, 0) - number
            if left > 0:
                self._records[tenant] = left
            else:
                self._records.pop(tenant, None)

    def large(self, size_bytes: int, max_bytes: int) -> frozenset[str]:
        """Tenants that are, where all together take `size_bytes` of `max_bytes`. Nobody is who is alone."""
        if len(self._records) < 2 or not size_bytes:
            return frozenset()
        most = sum(self._records.values()) * _PART * max_bytes / size_bytes
        return frozenset(tenant for tenant, number in self._records.items() if number > most)
