"""Stop strings over text that arrives in parts. Owns the hold-back; knows neither tokens nor streams.

The first stop string to be complete ends the text; of several that end on the same character, the longest,
so that none of its characters leaks. Where the text was cut into parts makes no difference.
"""

from collections.abc import Sequence
from copy import copy

from headrace.core.errors import InvalidInput

MAX_STOPS = 16
MAX_STOP_CHARS = 1024


class StopWindow:
    """An Aho-Corasick automaton: one move per character, whatever the number of stop strings.

    A state stands for the longest end of the text that begins a stop string, and that is what is held
    back. `include` keeps the stop string in the text; then nothing need be held.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """InvalidInput if there are too many, or one is empty or too long."""
        _check(stops)
        self._include = include
        self._held = ""
        self._state = 0
        self._stopped: str | None = None
        # Per state: moves, how many characters it stands for, where to go on a mismatch, which stop it completes.
        self._moves: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fallback = [0]
        self._completes: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._link()

    def again(self) -> "StopWindow":
        """A window for another text and the same stop strings. The automaton is shared: it can be large."""
        window = copy(self)
        window._held, window._state, window._stopped = "", 0, None
        return window

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._stopped

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown, and the stop string that ended it. Text behind that is dropped."""
        if self._stopped is not None:
            return "", self._stopped
        state = self._state
        for position, character in enumerate(text, start=1):
            state = self._follow(state, character)
            self._stopped = self._completes[state]
            if self._stopped is not None:
                return self._cut(self._held + text[:position], self._stopped)
        self._state = state
        if self._include:
            return text, None
        seen = self._held + text
        released = len(seen) - self._depth[state]
        self._held = seen[released:]
        return seen[:released], None

    def finish(self) -> str:
        """What was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held

    def _follow(self, state: int, character: str) -> int:
        moves = self._moves
        while state and character not in moves[state]:
            state = self._fallback[state]
        return moves[state].get(character, 0)

    def _cut(self, seen: str, stop: str) -> tuple[str, str]:
        self._held = ""
        return seen if self._include else seen[: len(seen) - len(stop)], stop

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            state = self._moves[state].setdefault(character, len(self._moves))
            if state == len(self._depth):
                self._moves.append({})
                self._depth.append(0)
                self._fallback.append(0)
                self._completes.append(None)
        self._completes[state] = stop

    def _link(self) -> None:
        """Fallbacks breadth first, so that shorter states are linked before longer ones need them."""
        queue = [0]
        for state in queue:
            for character, following in self._moves[state].items():
                self._depth[following] = self._depth[state] + 1
                fallback = self._follow(self._fallback[state], character) if state else 0
                self._fallback[following] = fallback
                if self._completes[following] is None:
                    self._completes[following] = self._completes[fallback]
                queue.append(following)


def _check(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidInput(f"At most {MAX_STOPS} stop strings are possible, not {len(stops)}.", param="stop")
    if not all(stops):
        raise InvalidInput("A stop string must not be empty.", param="stop")
    if max(map(len, stops), default=0) > MAX_STOP_CHARS:
        raise InvalidInput(f"A stop string has at most {MAX_STOP_CHARS} characters.", param="stop")
