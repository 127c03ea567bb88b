"""The block pool against a model that anybody can check: a set of holders and a table of hashes."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.engine.blocks import BlockPool

TOTAL = 8
KEYS = st.integers(0, 5).map(lambda number: bytes([number]))


class PoolMachine(RuleBasedStateMachine):
    """`holders` are what sequences would be: lists of blocks, one reference each."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.holders: list[list[int]] = []
        self.keys: dict[int, bytes] = {}
        # Blocks without a holder, in the order in which they became so.
        self.idle: list[int] = []
        self.freed: set[int] = set()

    def held(self) -> list[int]:
        return [block for blocks in self.holders for block in blocks]

    def cached(self) -> list[int]:
        return [block for block in self.idle if block in self.keys]

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        free = set(range(TOTAL)) - set(self.held()) - set(self.cached())
        count = data.draw(st.integers(0, len(free) + len(self.cached())))
        blocks = self.pool.allocate(count)
        assert set(blocks) >= free or set(blocks) <= free, "a cached block is given while another is free"
        assert set(blocks) - free == set(self.cached()[: max(0, count - len(free))]), "not the oldest is evicted"
        for block in blocks:
            self.keys.pop(block, None)
            self.forget_idle(block)
        self.holders.append(blocks)

    def forget_idle(self, block: int) -> None:
        if block in self.idle:
            self.idle.remove(block)
        self.freed.discard(block)

    @rule(keys=st.lists(KEYS, max_size=4, unique=True))
    def share_what_is_found(self, keys: list[bytes]) -> None:
        by_key = {key: block for block, key in self.keys.items()}
        expected = []
        for key in keys:
            if key not in by_key:
                break
            expected.append(by_key[key])
        found = self.pool.find(keys)
        assert found == expected
        before, idle = self.pool.num_available, self.pool.num_idle(found)
        self.pool.share(found)
        assert before - self.pool.num_available == idle
        for block in found:
            self.forget_idle(block)
        self.holders.append(found)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), key=KEYS)
    def publish(self, data: st.DataObject, key: bytes) -> None:
        held = self.held()
        if held:
            block = data.draw(st.sampled_from(held))
            self.pool.publish(block, key)
            if block not in self.keys and key not in self.keys.values():
                self.keys[block] = key

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(blocks)
        held = self.held()
        for block in reversed(blocks):
            if block not in held and block not in self.idle:
                self.idle.append(block)
                if block not in self.keys:
                    self.freed.add(block)

    @rule()
    def clear_cache(self) -> None:
        assert self.pool.clear_cache() == len(self.keys)
        self.freed |= set(self.cached())
        self.keys.clear()

    @rule()
    def take_freed(self) -> None:
        assert set(self.pool.take_freed()) == self.freed
        self.freed.clear()

    @invariant()
    def every_block_is_free_or_used_or_cached(self) -> None:
        used = len(set(self.held()))
        assert (self.pool.num_used, self.pool.num_cached) == (used, len(self.cached()))
        assert self.pool.num_free + self.pool.num_used + self.pool.num_cached == TOTAL
        assert self.pool.num_available == TOTAL - used

    @invariant()
    def the_pool_says_so_itself(self) -> None:
        self.pool.check(self.held())
        assert {key: self.pool.find([key]) for key in self.keys.values()} == {
            key: [block] for block, key in self.keys.items()
        }

    def teardown(self) -> None:
        for blocks in self.holders:
            self.pool.release(blocks)
        self.pool.check([])
        assert self.pool.num_used == 0


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40)
