"""Finds where one JSON value ends, a character at a time, and whether it is one. Keeps no value."""

from enum import Enum, auto
from typing import Protocol

WHITE_SPACE = " \t\n\r"
MAX_DEPTH = 128
_DIGITS = "0123456789"


class Step(Enum):
    """What a character did."""

    MORE = auto()
    # It was the last of the value.
    DONE = auto()
    # The value had ended before it: only a number ends like that.
    OVER = auto()
    BAD = auto()


class _Scalar(Protocol):
    def feed(self, character: str) -> Step: ...


class _String:
    """Behind the opening quote."""

    def __init__(self) -> None:
        self._is_escaped = False
        self._num_hex = 0

    def feed(self, character: str) -> Step:
        if self._num_hex:
            self._num_hex -= 1
            return Step.MORE if character in "0123456789abcdefABCDEF" else Step.BAD
        if self._is_escaped:
            self._is_escaped = False
            self._num_hex = 4 if character == "u" else 0
            return Step.MORE if character in '"\\/bfnrtu' else Step.BAD
        if character == '"':
            return Step.DONE
        self._is_escaped = character == "\\"
        return Step.BAD if character < " " else Step.MORE


# Per state of a number: which characters lead where.
_NUMBER: dict[str, dict[str, str]] = {
    "minus": {"0": "zero"} | dict.fromkeys("123456789", "whole"),
    "zero": {".": "point", "e": "e", "E": "e"},
    "whole": dict.fromkeys(_DIGITS, "whole") | {".": "point", "e": "e", "E": "e"},
    "point": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": dict.fromkeys(_DIGITS, "fraction") | {"e": "e", "E": "e"},
    "e": dict.fromkeys(_DIGITS, "exponent") | dict.fromkeys("+-", "sign"),
    "sign": dict.fromkeys(_DIGITS, "exponent"),
    "exponent": dict.fromkeys(_DIGITS, "exponent"),
}
_WHOLE_NUMBERS = frozenset({"zero", "whole", "fraction", "exponent"})


class _Number:
    def __init__(self, first: str) -> None:
        self._state = "minus" if first == "-" else _NUMBER["minus"][first]

    def feed(self, character: str) -> Step:
        following = _NUMBER[self._state].get(character)
        if following is None:
            return Step.OVER if self._state in _WHOLE_NUMBERS else Step.BAD
        self._state = following
        return Step.MORE


class _Literal:
    def __init__(self, rest: str) -> None:
        self._rest = rest

    def feed(self, character: str) -> Step:
        if character != self._rest[0]:
            return Step.BAD
        self._rest = self._rest[1:]
        return Step.MORE if self._rest else Step.DONE


_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}


class _Next(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()


class ValueScanner:
    """Feed it the characters of one value, white space before it included, until it answers other than MORE."""

    def __init__(self) -> None:
        self._next = _Next.VALUE
        self._closers: list[str] = []
        self._scalar: _Scalar | None = None

    def feed(self, character: str) -> Step:
        if self._scalar is None:
            return Step.MORE if character in WHITE_SPACE else self._structure(character)
        step = self._scalar.feed(character)
        if step is Step.MORE or step is Step.BAD:
            return step
        self._scalar = None
        outcome = self._after_value()
        if step is Step.DONE:
            return outcome
        return Step.OVER if outcome is Step.DONE else self.feed(character)

    def _structure(self, character: str) -> Step:
        match self._next:
            case _Next.COLON:
                self._next = _Next.VALUE
                return Step.MORE if character == ":" else Step.BAD
            case _Next.COMMA_OR_END if character == ",":
                self._next = _Next.KEY if self._closers[-1] == "}" else _Next.VALUE
                return Step.MORE
            case _Next.COMMA_OR_END | _Next.VALUE_OR_END | _Next.KEY_OR_END if character == self._closers[-1]:
                self._closers.pop()
                return self._after_value()
            case _Next.KEY | _Next.KEY_OR_END if character == '"':
                self._next = _Next.COLON
                self._scalar = _String()
                return Step.MORE
            case _Next.VALUE | _Next.VALUE_OR_END:
                return self._begin_value(character)
        return Step.BAD

    def _begin_value(self, character: str) -> Step:
        self._next = _Next.COMMA_OR_END
        if character in "{[":
            self._closers.append("}" if character == "{" else "]")
            self._next = _Next.KEY_OR_END if character == "{" else _Next.VALUE_OR_END
            return Step.MORE if len(self._closers) <= MAX_DEPTH else Step.BAD
        if character == '"':
            self._scalar = _String()
        elif character in "-0123456789":
            self._scalar = _Number(character)
        elif character in _LITERALS:
            self._scalar = _Literal(_LITERALS[character])
        else:
            return Step.BAD
        return Step.MORE

    def _after_value(self) -> Step:
        if self._next is _Next.COLON:  # it was a key
            return Step.MORE
        self._next = _Next.COMMA_OR_END
        return Step.MORE if self._closers else Step.DONE
