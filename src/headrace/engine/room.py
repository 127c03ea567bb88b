"""How many tokens a step may have after the device found no memory for more. Counts only; knows no plan and no clock."""

# Launches without a refusal after which twice as much is tried again: a second or two.
_QUIET_LAUNCHES = 64


class StepRoom:
    """`tokens` is the bound: `most`, unless a step was refused."""

    def __init__(self, most: int) -> None:
        self.tokens = most
        self.num_refused = 0
        # Since the last launch: a row that found no room alone.
        self.has_ended_one = False
        self._most = most
        self._quiet = 0

    @property
    def is_short(self) -> bool:
        return self.tokens < self._most

    def rows(self, *, is_awaited: bool) -> int:
        """How many of the tokens decode rows may be: while prompts wait for their turn, half of them."""
        return -(-self.tokens // 2) if is_awaited else self.tokens

    def refused(self, tokens: int) -> bool:
        """A step of so many tokens found no room. False where there is no smaller one."""
        self.num_refused += 1
        self._quiet = 0
        self.tokens = max(1, tokens // 2)
        return tokens > 1

    def restore(self) -> None:
        """It was one row alone, and it is gone: the others have done nothing to be held short."""
        self.has_ended_one = True
        self._quiet = 0
        self.tokens = self._most

    def launched(self) -> None:
        self.has_ended_one = False
        if self.is_short:
            self._quiet += 1
            if self._quiet >= _QUIET_LAUNCHES:
                self._quiet = 0
                self.tokens = min(2 * self.tokens, self._most)
