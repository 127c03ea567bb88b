"""How large a grammar is once its references and repeats are written out. Compiles nothing.

A few hundred bytes can say 2⁴⁰: references that double, repeats of repeats. Such a grammar is refused by its size,
whether or not a compiler would notice.
"""

from collections.abc import Iterator, Mapping
from typing import Any

MAX_EXPANDED_VALUES = 100_000
MAX_EXPANDED_REGEX = 100_000
# A matcher spends about two states on each character of a text whose length is counted, and has 20,000 of them. Items
# and properties cost it none, but so many would fill a context that is larger than most.
_MOST = {"minLength": 10_000, "minItems": 100_000, "minProperties": 100_000, "maxLength": 2**32 - 1}
_MAX_NESTING = 500


class _Expansion:
    """Values of a schema with every `$ref` replaced by what it names; one that leads back to itself counts once."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._sizes: dict[str, int] = {}
        self._open: set[str] = set()

    def size(self, value: Any, depth: int = 0) -> int:
        if depth > _MAX_NESTING:
            return MAX_EXPANDED_VALUES + 1
        total = 1
        if isinstance(value, dict):
            reference = value.get("$ref")
            if isinstance(reference, str):
                total += self._referred(reference, depth + 1)
            children: Iterator[Any] = (child for name, child in value.items() if name not in ("$defs", "definitions"))
        elif isinstance(value, list):
            children = iter(value)
        else:
            return total
        for child in children:
            total += self.size(child, depth + 1)
            if total > MAX_EXPANDED_VALUES:
                break
        return total

    def _referred(self, reference: str, depth: int) -> int:
        if reference in self._open:
            return 1
        if reference not in self._sizes:
            self._open.add(reference)
            self._sizes[reference] = self.size(self._find(reference), depth)
            self._open.discard(reference)
        return self._sizes[reference]

    def _find(self, reference: str) -> Any:
        """What a local reference names; None where it names nothing, which the compiler will say."""
        found = self._schema
        for part in reference.removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(name)
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        return found


def excess(keywords: Mapping[str, object]) -> tuple[str, int] | None:
    """The keyword that asks for more than any reply could hold, and the most it may say. What is only allowed costs
    nothing, so upper bounds may be as large as the compiler can read."""
    for name, most in _MOST.items():
        value = keywords.get(name)
        if isinstance(value, int | float) and value > most:
            return name, most
    return None


def is_schema_too_large(schema: Any) -> bool:
    return _Expansion(schema).size(schema) > MAX_EXPANDED_VALUES


def is_regex_too_large(pattern: str) -> bool:
    """By its counted repeats: `(a{1,500}){1,500}` stands for 250,000 letters. `*` and `+` cost an automaton nothing."""
    sizes = [0]
    last = 0
    place = 0
    while place < len(pattern):
        character = pattern[place]
        place += 1
        if character == "(":
            sizes.append(0)
            continue
        if character == ")" and len(sizes) > 1:
            last = sizes.pop()
        elif character == "{":
            counted, place = _repeats(pattern, place)
            last = max(1, last) * (counted - 1)
        elif character in "*+?|^$":
            continue
        else:
            place = _skip_atom(pattern, place - 1)
            last = 1
        sizes[-1] += last
        last = last if character != "{" else sizes[-1]
        if sizes[-1] > MAX_EXPANDED_REGEX:
            return True
    return sum(sizes) > MAX_EXPANDED_REGEX


def _repeats(pattern: str, place: int) -> tuple[int, int]:
    """The upper count of `{m}`, `{m,}` or `{m,n}` whose brace is open at `place`, and where it ends."""
    end = pattern.find("}", place)
    low, _, high = pattern[place:end].partition(",") if end >= 0 else ("", "", "")
    if not low.isdecimal() or (high and not high.isdecimal()):
        return 1, place
    return max(1, min(int(high or low), MAX_EXPANDED_REGEX + 2)), end + 1


def _skip_atom(pattern: str, place: int) -> int:
    """Past one letter, one escape or one class."""
    if pattern[place] == "\\":
        return place + 2
    if pattern[place] != "[":
        return place + 1
    place += 2 if pattern[place + 1 : place + 2] in ("]", "^") else 1
    while place < len(pattern) and pattern[place] != "]":
        place += 2 if pattern[place] == "\\" else 1
    return place + 1
