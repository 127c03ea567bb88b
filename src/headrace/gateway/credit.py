"""How often a peer may speak: so often at once, and so often a second. Owns the count; knows no clock and no protocol."""


class Credit:
    """An honest peer has some left at any time; one that has none waits for more."""

    __slots__ = ("__weakref__", "_at_s", "_left", "_most", "_per_s")

    def __init__(self, most: int, per_s: float, now_s: float) -> None:
        self._most = float(most)
        self._per_s = per_s
        self._left = self._most
        self._at_s = now_s

    @property
    def is_spent(self) -> bool:
        return self._left < 1.0

    def earn(self, now_s: float) -> None:
        """What time has brought since it was asked last."""
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s

    def spend(self) -> None:
        self._left -= 1.0
