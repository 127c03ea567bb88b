"""Where a chat template writes special tokens. Owns the marks that stand for them while a template runs.

Before it runs, every special token in the template's own literals is replaced by a mark; after it ran, the text
is split at the marks and nowhere else. What a user wrote is never touched and never looked at: it cannot become
a special token, whole or joined with its neighbours. Marks are lone surrogates, which no text that arrived as
UTF-8 can hold.
"""

import itertools
import re
from collections.abc import Iterable, Mapping

from jinja2 import nodes

from headrace.core.errors import InvalidModel
from headrace.text.rendering import ROLES

_FIRST_MARK = 0xD800
_MAX_MARKS = 0x7FF
_HALVES = ("head ", "tail ")

# Of these the first argument is looked for in a text, so it must stay as it is; the others may be written.
_SEEKING_METHODS = frozenset(
    ("split", "rsplit", "partition", "rpartition", "startswith", "endswith", "strip", "lstrip", "rstrip", "get", "pop")
).union(("removeprefix", "removesuffix", "find", "rfind", "index", "rindex", "count", "replace"))
_SEEKING_FILTERS = frozenset(("replace",))
_WRITING_FILTERS = frozenset(("default", "d", "join", "format", "indent"))


class Marks:
    """One template's marks. `special_ids` maps the text of special tokens to their ids."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = {text: token for text, token in special_ids.items() if text}
        longest_first = sorted(self._special_ids, key=lambda text: -len(text))
        self._specials = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._halves = _role_halves(self._special_ids)
        self._mark_of: dict[str, str] = {}
        self._text_of: dict[str, str] = {}

    def mark(self, literal: str) -> str:
        """A literal that the template writes, with marks for the special tokens in it.

        A template may also write `"<|" + role + "|>"`: both halves are marked, and count when only a role is between.
        """
        literal = re.sub("[\ud800-\udfff]", "\ufffd", literal)
        marked = self._specials.sub(lambda found: self._mark(found[0]), literal)
        for head in self._halves:
            if marked.endswith(head):
                marked = marked[: -len(head)] + self._mark(head, "head ")
                break
        for tail in sorted({tail for tails in self._halves.values() for tail in tails}, key=len, reverse=True):
            if marked.startswith(tail):
                marked = self._mark(tail, "tail ") + marked[len(tail) :]
                break
        return marked

    def split(self, rendered: str) -> list[str | int]:
        """Texts and ids of special tokens, in order; no text is empty and no two texts are neighbours."""
        pieces: list[str | int] = []
        texts: list[str] = []
        end = 0
        for found in self._pattern().finditer(rendered):
            texts.append(rendered[end : found.start()])
            end = found.end()
            text = self.restore(found[0])
            whole = len(found[0]) > 1 or self._mark_of.get(text) == found[0]
            if not whole:
                texts.append(text)
                continue
            _flush(texts, pieces)
            pieces.append(self._special_ids[text])
        texts.append(rendered[end:])
        _flush(texts, pieces)
        return pieces

    def is_open(self, rendered: str, blank: str) -> bool:
        """What stands for a text in it could be the role of a special token that the template assembles."""
        halves = {mark: key.partition(" ")[0] for key, mark in self._mark_of.items() if key.startswith(_HALVES)}
        pairs = itertools.pairwise(rendered)
        return any(
            (after == blank and halves.get(before) == "head") or (before == blank and halves.get(after) == "tail")
            for before, after in pairs
        )

    def restore(self, text: str) -> str:
        """The text with what its marks stand for."""
        return re.sub("[\ud800-\udfff]", lambda found: self._text_of.get(found[0], ""), text)

    def _pattern(self) -> re.Pattern[str]:
        assembled = [
            f"{self._mark_of['head ' + head]}(?:{'|'.join(roles)}){self._mark_of['tail ' + tail]}"
            for head, tails in self._halves.items()
            for tail, roles in tails.items()
            if "head " + head in self._mark_of and "tail " + tail in self._mark_of
        ]
        return re.compile("|".join([*assembled, "[\ud800-\udfff]"]))

    def _mark(self, text: str, use: str = "") -> str:
        key = use + text
        if key not in self._mark_of:
            if len(self._mark_of) == _MAX_MARKS:
                raise InvalidModel(f"the chat template writes more than {_MAX_MARKS} different special tokens")
            mark = chr(_FIRST_MARK + len(self._mark_of))
            self._mark_of[key] = mark
            self._text_of[mark] = text
        return self._mark_of[key]


def mark_template(template: nodes.Template, marks: Marks) -> None:
    """Mark every literal that the template may write. A literal that it only compares with stays as it is.

    Which is which is a matter of quality, not of safety: a literal taken for a comparison is encoded as plain text.
    """
    _walk(template, marks, True)


def _walk(node: nodes.Node, marks: Marks, written: bool) -> None:
    if isinstance(node, nodes.TemplateData):
        node.data = marks.mark(node.data)
    elif isinstance(node, nodes.Const):
        if written and isinstance(node.value, str):
            node.value = marks.mark(node.value)
    elif isinstance(node, nodes.Compare | nodes.Test):
        _walk_all(node.iter_child_nodes(), marks, False)
    elif isinstance(node, nodes.Getitem):
        _walk(node.node, marks, written)
        _walk(node.arg, marks, False)
    elif isinstance(node, nodes.Pair):
        _walk(node.key, marks, False)
        _walk(node.value, marks, written)
    elif isinstance(node, nodes.Call | nodes.Filter):
        _walk_call(node, marks, written)
    else:
        _walk_all(node.iter_child_nodes(), marks, written)


def _walk_call(node: nodes.Call | nodes.Filter, marks: Marks, written: bool) -> None:
    if isinstance(node, nodes.Filter):
        seeks = node.name in _SEEKING_FILTERS
        rest = written and (seeks or node.name in _WRITING_FILTERS)
    else:
        seeks = isinstance(node.node, nodes.Getattr) and node.node.attr in _SEEKING_METHODS
        rest = written
    first = rest and not seeks
    if node.node is not None:
        _walk(node.node, marks, written)
    _walk_all(node.args[:1], marks, first)
    _walk_all([*node.args[1:], *node.kwargs], marks, rest)


def _walk_all(children: Iterable[nodes.Node], marks: Marks, written: bool) -> None:
    for child in children:
        _walk(child, marks, written)


def _role_halves(special_ids: Mapping[str, int]) -> dict[str, dict[str, list[str]]]:
    """head -> tail -> roles, for special tokens that are a head, a role and a tail; longest heads first."""
    halves: dict[str, dict[str, list[str]]] = {}
    for text in special_ids:
        for role in ROLES:
            head, found, tail = text.partition(role)
            if found and head and tail:
                halves.setdefault(head, {}).setdefault(tail, []).append(role)
    return dict(sorted(halves.items(), key=lambda half: -len(half[0])))


def _flush(texts: list[str], pieces: list[str | int]) -> None:
    text = "".join(texts)
    texts.clear()
    if text:
        pieces.append(text)
