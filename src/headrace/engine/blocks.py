"""The KV block pool: reference counts, one free list in LRU order, the prefix cache.

Owns which block belongs to whom. Knows neither sequences nor tenants nor what a block holds.
A block is *used* (references > 0), *cached* (none, but published under a hash) or *free*.
The list of what may be handed out holds free blocks first, then cached ones, oldest first.
"""

from collections import Counter
from collections.abc import Iterable, Sequence


class BlockPool:
    """`free + used + cached == total`, always."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._references = [0] * total
        self._hash_of: list[bytes | None] = [None] * total
        self._block_of: dict[bytes, int] = {}
        # A ring through every block without references; index `total` is its head.
        self._next = [*range(1, total + 1), 0]
        self._previous = [total, *range(total)]
        # Blocks that `allocate` can hand out: free and cached ones.
        self.num_available = total
        self._num_cached = 0
        # Blocks that became free (not cached) since they were last asked for.
        self._freed: list[int] = []

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_free(self) -> int:
        return self.num_available - self._num_cached

    @property
    def num_used(self) -> int:
        return self.total - self.num_available

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest published prefix of `hashes`. Takes no reference."""
        found: list[int] = []
        block_of = self._block_of
        for key in hashes:
            block = block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` have no reference: sharing them takes that many from `num_available`."""
        references = self._references
        return sum(references[block] == 0 for block in blocks)

    def num_freed_by(self, holdings: Iterable[Iterable[int]]) -> int:
        """How many blocks would come back if the holders of all these let go."""
        held = Counter(block for blocks in holdings for block in blocks)
        return sum(self._references[block] == count for block, count in held.items())

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference to each published block."""
        for block in blocks:
            assert self._hash_of[block] is not None, f"block {block} is shared but not published"
            if self._references[block] == 0:
                self._unlink(block)
                self._num_cached -= 1
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; the caller has checked `num_available`."""
        assert count <= self.num_available, f"{count} blocks asked, {self.num_available} available"
        taken: list[int] = []
        head, following, previous = self.total, self._next, self._previous
        references, hash_of = self._references, self._hash_of
        block = following[head]
        for _ in range(count):
            if hash_of[block] is not None:
                self._forget(block)
                self._num_cached -= 1
            references[block] = 1
            taken.append(block)
            block = following[block]
        following[head] = block
        previous[block] = head
        self.num_available -= count
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each. The end of a sequence goes first, so that its start is cached longest."""
        references = self._references
        for block in reversed(blocks):
            references[block] -= 1
            if references[block]:
                assert references[block] > 0, f"block {block} was released once too often"
            elif self._hash_of[block] is None:
                self._link_after(self.total, block)
                self._freed.append(block)
            else:
                self._link_after(self._previous[self.total], block)
                self._num_cached += 1

    def publish(self, block: int, key: bytes) -> None:
        """Make a computed block findable. A key that another block holds already stays with that block."""
        assert self._references[block] > 0, f"block {block} is published but nobody holds it"
        if self._hash_of[block] is None and key not in self._block_of:
            self._hash_of[block] = key
            self._block_of[key] = block

    def clear_cache(self) -> int:
        """Forget every published prefix (a salt was rotated, weights changed). Used blocks stay used."""
        forgotten = list(self._block_of.values())
        for block in forgotten:
            self._forget(block)
            if self._references[block] == 0:
                self._unlink(block)
                self._link_after(self.total, block)
                self._freed.append(block)
        self._num_cached = 0
        return len(forgotten)

    def take_freed(self) -> list[int]:
        """Blocks freed since the last call that are still free."""
        if not self._freed:
            return []
        references, hash_of = self._references, self._hash_of
        freed = [block for block in self._freed if not references[block] and hash_of[block] is None]
        self._freed.clear()
        return freed

    def check(self, held: Iterable[int]) -> None:
        """Prove the accounts: `held` lists every reference that somebody says to hold."""
        expected = [0] * self.total
        for block in held:
            expected[block] += 1
        assert expected == self._references, "references differ from what sequences hold"
        listed: list[int] = []
        before, block = self.total, self._next[self.total]
        while block != self.total:
            assert self._previous[block] == before, f"the free list is torn at block {block}"
            listed.append(block)
            assert len(listed) <= self.total, "the free list has a loop"
            before, block = block, self._next[block]
        assert self._previous[self.total] == before, "the free list is torn at its end"
        assert len(listed) == self.num_available, "the free list's length is wrong"
        assert all(expected[block] == 0 for block in listed), "a used block is in the free list"
        cached = sum(self._hash_of[block] is not None for block in listed)
        used = sum(count > 0 for count in expected)
        assert cached == self._num_cached, "the count of cached blocks is wrong"
        assert self.num_free + used + cached == self.total, "free + used + cached != total"
        published = {key: block for block, key in enumerate(self._hash_of) if key is not None}
        assert published == self._block_of, "the prefix index lies"

    def _forget(self, block: int) -> None:
        key = self._hash_of[block]
        if key is not None:
            del self._block_of[key]
            self._hash_of[block] = None

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self.num_available -= 1

    def _link_after(self, before: int, block: int) -> None:
        after = self._next[before]
        self._next[before] = block
        self._previous[block] = before
        self._next[block] = after
        self._previous[after] = block
        self.num_available += 1
