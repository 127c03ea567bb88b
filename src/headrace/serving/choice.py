"""The text of one choice, from its ids as they come. Owns detokeniser and stop window; knows no engine."""

from collections.abc import Collection, Iterable, Sequence

from headrace.text.detokenizer import Detokenizer
from headrace.text.stop import StopWindow
from headrace.text.tokens import TokenTable


class Choice:
    """Text is released when no later id can take it back. `ends` are ids that end a reply and are no part of it."""

    def __init__(
        self, table: TokenTable, stops: Sequence[str] = (), *, ends: Collection[int] = (), continues: bool = False
    ) -> None:
        self._detokenizer = Detokenizer(table, continues=continues)
        self._window = StopWindow(stops)
        self._ends = frozenset(ends)
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """A stop string is complete: whatever comes after it is dropped."""
        return self._window.stopped is not None

    def push(self, ids: Iterable[int]) -> str:
        """The text these ids release."""
        if self.stopped:
            return ""
        text = ""
        for token in ids:
            self.num_tokens += 1
            if token in self._ends:
                continue
            released, stop = self._window.push(self._detokenizer.push((token,)))
            text += released
            if stop is not None:
                break
        return text

    def finish(self) -> str:
        """No more ids will come: what was held back."""
        if self.stopped:
            return ""
        released, _ = self._window.push(self._detokenizer.finish())
        return released + self._window.finish()
