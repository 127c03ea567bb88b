"""One call: a JSON object with a name and arguments. Owns what of it is known; knows no tags around it."""

from collections.abc import Collection
from enum import Enum, auto

import msgspec

from headrace.text.tools.scan import WHITE_SPACE, Step, ValueScanner

MAX_NAME_CHARS = 256
_ARGUMENTS = frozenset({"arguments", "parameters"})
_HARMLESS = frozenset({"id", "type"})


class _Next(Enum):
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    VALUE = auto()
    COMMA_OR_END = auto()


class CallParser:
    """Feed it the object from its `{` on. It is a call (`has_started`) once its name is known and its
    arguments have begun; from then on `take_arguments` gives them as they come.

    `is_tagged`: a tag says that this is a call, so other keys are ignored and arguments may be missing.
    Without one, an object with other keys is no call, and is known not to be one at its first such key.
    `names` are those that can be called; None: any.
    """

    def __init__(self, *, is_tagged: bool, names: Collection[str] | None = None) -> None:
        self.name = ""
        self._is_tagged = is_tagged
        self._names = names
        self._next: _Next | None = None
        self._scanner: ValueScanner | None = None
        self._key = ""
        self._literal: list[str] = []
        self._has_arguments = False
        self._arguments: list[str] = []
        self._source: list[str] = []

    @property
    def has_started(self) -> bool:
        return bool(self.name) and self._has_arguments

    @property
    def source(self) -> str:
        """All that was fed and was part of the object."""
        return "".join(self._source)

    def take_arguments(self) -> str:
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def feed(self, character: str) -> Step:
        """MORE, DONE with the object's `}`, or BAD: then `character` is not part of `source`."""
        step = self._feed(character)
        if step is not Step.BAD:
            self._source.append(character)
        return step

    def _feed(self, character: str) -> Step:
        if self._scanner is not None:
            return self._scan(self._scanner, character)
        if character in WHITE_SPACE:
            return Step.MORE
        match self._next, character:
            case None, "{":
                self._next = _Next.KEY_OR_END
            case ((_Next.KEY | _Next.KEY_OR_END), '"'):
                return self._scan(self._begin(), character)
            case _Next.COLON, ":":
                self._next = _Next.VALUE
            case _Next.VALUE, _:
                return self._begin_value(character)
            case _Next.COMMA_OR_END, ",":
                self._next = _Next.KEY
            case ((_Next.COMMA_OR_END | _Next.KEY_OR_END), "}"):
                return self._end()
            case _:
                return Step.BAD
        return Step.MORE

    def _begin(self) -> ValueScanner:
        self._literal.clear()
        self._scanner = ValueScanner()
        return self._scanner

    def _begin_value(self, character: str) -> Step:
        if self._key in _ARGUMENTS:
            if self._has_arguments or character != "{":
                return Step.BAD
            self._has_arguments = True
        elif self._key == "name" and (self.name or character != '"'):
            return Step.BAD
        return self._scan(self._begin(), character)

    def _scan(self, scanner: ValueScanner, character: str) -> Step:
        step = scanner.feed(character)
        if step is Step.BAD:
            return step
        if step is not Step.OVER:
            is_arguments = self._next is _Next.VALUE and self._key in _ARGUMENTS
            (self._arguments if is_arguments else self._literal).append(character)
            if step is Step.MORE:
                return Step.BAD if len(self._literal) > MAX_NAME_CHARS and self._is_name else step
        self._scanner = None
        if not (self._end_key() if self._next is not _Next.VALUE else self._end_value()):
            return Step.BAD
        return self._feed(character) if step is Step.OVER else Step.MORE

    @property
    def _is_name(self) -> bool:
        """Whether the literal being read is a key or the name; both are short."""
        return self._next is not _Next.VALUE or self._key == "name"

    def _end_key(self) -> bool:
        self._key = _string("".join(self._literal))
        self._next = _Next.COLON
        return self._is_tagged or self._key == "name" or self._key in _ARGUMENTS or self._key in _HARMLESS

    def _end_value(self) -> bool:
        self._next = _Next.COMMA_OR_END
        if self._key == "name":
            name = _string("".join(self._literal))
            if self._names is None or name in self._names:
                self.name = name
            return bool(self.name)
        return True

    def _end(self) -> Step:
        if not self._has_arguments and self._is_tagged:
            self._has_arguments = True
            self._arguments.append("{}")
        return Step.DONE if self.has_started else Step.BAD


def _string(literal: str) -> str:
    try:
        return msgspec.json.decode(literal, type=str)
    except msgspec.MsgspecError:  # half of a surrogate pair
        return ""
