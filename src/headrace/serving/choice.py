"""The text of one choice, from its ids as they come. Owns detokeniser and stop window; knows no engine."""

from collections.abc import Collection, Iterable

from headrace.text.detokenizer import Detokenizer
from headrace.text.stop import StopWindow
from headrace.text.tokens import TokenTable


class Choice:
    """Text is released when no later id can take it back. `ends` are ids that end a reply and are no part of it.

    `window` is left as it was: this text gets one of its own like it. `shows_specials` writes control ids out.
    """

    __slots__ = ("_detokenizer", "_ends", "_window", "num_tokens")

    def __init__(
        self,
        table: TokenTable,
        window: StopWindow | None = None,
        *,
        ends: Collection[int] = (),
        continues: bool = False,
        shows_specials: bool = False,
    ) -> None:
        show = table.control_ids if shows_specials else ()
        self._detokenizer = Detokenizer(table, continues=continues, show=show)
        self._window = None if window is None else window.again()
        self._ends = frozenset(ends)
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """A stop string is complete: whatever comes after it is dropped."""
        return self._window is not None and self._window.stopped is not None

    def push_one(self, token: int) -> str:
        """The text this id releases. Not to be called once `stopped`."""
        self.num_tokens += 1
        if token in self._ends:
            return ""
        text = self._detokenizer.push_one(token)
        return text if self._window is None else self._window.push(text)[0]

    def push(self, ids: Iterable[int]) -> str:
        """The text these ids release."""
        text = ""
        for token in ids:
            if self.stopped:
                break
            text += self.push_one(token)
        return text

    def finish(self) -> str:
        """No more ids will come: what was held back."""
        if self.stopped:
            return ""
        text = self._detokenizer.finish()
        return text if self._window is None else self._window.push(text)[0] + self._window.finish()
