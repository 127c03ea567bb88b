"""Expected output lengths, learned per tenant and prompt-length bucket. Knows nothing of `max_tokens`."""

_PRIOR_TOKENS = 128.0
_PRIOR_COUNT = 4.0
_FORGET = 0.98
# The longest known go first; they are learned again in a few requests.
_MOST_KEYS = 65_536


class OutputEstimates:
    """A decayed mean per (tenant, bucket), leaning on the tenant's, then on everyone's, while little is known."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], tuple[float, float]] = {}

    def expected(self, tenant: str, num_prompt: int) -> float:
        guess = _PRIOR_TOKENS
        for key in (("", -1), (tenant, -1), (tenant, num_prompt.bit_length())):
            total, count = self._sums.get(key, (0.0, 0.0))
            guess = (total + guess * _PRIOR_COUNT) / (count + _PRIOR_COUNT)
        return guess

    def learn(self, tenant: str, num_prompt: int, num_output: int) -> None:
        for key in (("", -1), (tenant, -1), (tenant, num_prompt.bit_length())):
            total, count = self._sums.get(key, (0.0, 0.0))
            if key not in self._sums and len(self._sums) >= _MOST_KEYS:
                del self._sums[next(iter(self._sums))]
            self._sums[key] = (total * _FORGET + num_output, count * _FORGET + 1.0)
