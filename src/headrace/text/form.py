"""What a template writes around what people say: a prompt with blanks. Owns which conversations have the same form, the
forms that are known, and how blanks are filled.

Knows no template: forms come from a limited process, where the template ran over blanks and looked at none of them
(`text.blank`). So the prompt of a plain conversation is put together here as that template would have written it, and
no process is asked.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from msgspec import Struct

# A conversation has one more message with each turn, and each length is a form of its own.
MAX_MESSAGES = 64
# Larger ones have their bounds checked by who renders them.
MAX_CHARS = 64 << 10
# A text of a template's own that stands between special tokens in every prompt; longer ones are few.
MAX_SETTLED_CHARS = 64
_PLAIN = 2


class Shape(Struct, frozen=True):
    """What a form depends on. `roles` of messages that hold nothing else than a text that is not blank."""

    roles: tuple[str, ...]
    add_generation_prompt: bool


class Form(Struct, frozen=True, array_like=True, dict=True):
    """Ids of special tokens, and texts in parts: a number is the blank of the message at half of it; an odd one is
    filled with that text stripped. It holds for contents in which none of the `absent` texts is."""

    pieces: list[int | list[str | int]]
    absent: list[str] = []

    def fits(self, contents: Sequence[str]) -> bool:
        for text in self.absent:
            for content in contents:
                if text in content:
                    return False
        return True

    @cached_property
    def _texts(self) -> list[tuple[int, list[str | int]]]:
        """Among many ids there are few of them: each with its place."""
        return [(place, piece) for place, piece in enumerate(self.pieces) if not isinstance(piece, int)]

    def fill(self, contents: Sequence[str]) -> list[str | int]:
        filled: list[Any] = self.pieces.copy()
        for place, text in self._texts:
            filled[place] = "".join([part if isinstance(part, str) else _filling(part, contents) for part in text])
        return filled

    def settled(self, encode: Callable[[str], Sequence[int]]) -> "Form":
        """The same, with ids in place of short texts without a blank, so that they are not encoded again for every prompt.
        `encode` is for what follows a special token; a prompt's first text has nothing before it, and stays."""
        known: dict[str, Sequence[int]] = {}
        pieces: list[int | list[str | int]] = []
        for place, piece in enumerate(self.pieces):
            text = _constant(piece) if place else None
            if text is None:
                pieces.append(piece)
                continue
            if text not in known:
                known[text] = encode(text)
            pieces.extend(known[text])
        return Form(pieces, self.absent)


class Forms:
    """The forms of one template, those used last. A shape that has none is remembered as well."""

    def __init__(self, remembered: int = 128) -> None:
        self._remembered = remembered
        self._forms: OrderedDict[Shape, Form | None] = OrderedDict()

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._forms

    def find(self, shape: Shape) -> Form | None:
        form = self._forms.get(shape)
        if form is not None:
            self._forms.move_to_end(shape)
        return form

    def forget(self, shape: Shape) -> None:
        """Whether it has a form is not known any more."""
        self._forms.pop(shape, None)

    def file(self, shape: Shape, form: Form | None) -> None:
        self._forms[shape] = form
        if len(self._forms) > self._remembered:
            self._forms.popitem(last=False)


def contents_of(messages: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """What is said in messages that templates are given; None where there is more to them than a role and a text, or
    much of it."""
    if len(messages) > MAX_MESSAGES:
        return None
    contents: list[str] = []
    for message in messages:
        text = text_of(message)
        if not text or text.isspace():
            return None
        contents.append(text)
    return None if sum(map(len, contents)) > MAX_CHARS else contents


def text_of(message: Mapping[str, Any]) -> str | None:
    """Of a message that has a role and a text, be it by itself or as the only part."""
    content = message["content"] if len(message) == _PLAIN and "role" in message else None
    if isinstance(content, list) and len(content) == 1 and content[0].keys() == {"type", "text"}:
        content = content[0]["text"]
    return content if isinstance(content, str) else None


def shape_of(messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> Shape:
    return Shape(tuple([message["role"] for message in messages]), add_generation_prompt)


def _constant(piece: int | list[str | int]) -> str | None:
    """The whole of a short text in which nothing is filled."""
    if isinstance(piece, int):
        return None
    texts = [part for part in piece if isinstance(part, str)]
    text = "".join(texts)
    return text if len(texts) == len(piece) and len(text) <= MAX_SETTLED_CHARS else None


def _filling(blank: int, contents: Sequence[str]) -> str:
    content = contents[blank >> 1]
    return content.strip() if blank & 1 else content
