"""Stand-ins for what people wrote, while a template shows what it writes around them. Runs in a limited process.

A blank may be written, joined with other text and stripped. Asked whether it contains a text, or begins or ends with
it, it says no and notes that text. Whatever else would tell anything of what it stands for raises `Inspected`: a template
that runs to its end over blanks does the same with everything that is not empty and contains none of the noted texts.
Where that cannot be known (a macro, a filter that is not known to keep to it) it raises as well.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NoReturn, cast

from jinja2 import nodes
from jinja2.environment import Environment
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# What a blank holds as a string: no text that arrived as UTF-8 can, and no template is given as many marks.
_MARK = "\udfff"
# Of these a result that goes with a blank cannot be told from one that looked at it.
_UNKNOWN_NODES = (
    nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.Block, nodes.Include, nodes.Import,
    nodes.FromImport, nodes.Extends,
)  # fmt: skip
# They take a blank as it is, or ask it for what raises.
_KEEPING_FILTERS = frozenset(
    ("trim", "length", "count", "default", "d", "string", "first", "last", "list", "lower", "upper", "items")
).union(("select", "reject", "selectattr", "rejectattr", "map"))
# What any text answers to these.
_TESTS = {
    **dict.fromkeys(("string", "sequence", "iterable", "defined"), True),
    **dict.fromkeys(("none", "undefined", "mapping", "boolean", "number", "integer", "float"), False),
    **dict.fromkeys(("true", "false", "callable"), False),
}
_OBJECT_NAMES = frozenset(dir(object)) - {"__str__", "__repr__", "__format__", "__hash__", "__eq__", "__ne__"}.union(
    ("__lt__", "__le__", "__gt__", "__ge__")
)


class Inspected(Exception):
    """A template wants to know what somebody wrote."""


def _refuse(*_: object, **__: object) -> NoReturn:
    raise Inspected


def _muted(kind: "type[Blank]") -> "type[Blank]":
    """Every method of a string that it has no own of refuses; those of later Python versions as well."""
    for name in set(dir(str)) - _OBJECT_NAMES - set(vars(kind)):
        setattr(kind, name, _refuse)
    return kind


@_muted
class Blank(str):
    """Texts, and numbers as in `Form`. `absent` is where texts are noted."""

    __slots__ = ("_absent", "_parts")
    _parts: tuple[str | int, ...]
    _absent: set[str]

    def __new__(cls, absent: set[str], *parts: str | int) -> "Blank":
        blank = super().__new__(cls, _MARK)
        blank._absent = absent
        blank._parts = parts
        return blank

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return True

    def __add__(self, other: object) -> "Blank":
        return Blank(self._absent, *self._parts, *_parts_of(other))

    def __radd__(self, other: object) -> "Blank":
        return Blank(self._absent, *_parts_of(other), *self._parts)

    def strip(self, chars: str | None = None, /) -> "Blank":
        part = self._parts[0]
        if chars is not None or len(self._parts) > 1 or isinstance(part, str):
            raise Inspected
        return Blank(self._absent, part | 1)

    def lacks(self, *sought: object) -> bool:
        """Of one text alone: joined with others, it could begin or end in the middle of what is sought."""
        if len(self._parts) > 1 or not all(type(text) is str and text for text in sought):
            raise Inspected
        self._absent.update(sought)  # type: ignore[arg-type]
        return True

    def startswith(self, sought: object, /) -> bool:  # type: ignore[override]
        return not self.lacks(*(sought if isinstance(sought, tuple) else (sought,)))

    endswith = startswith  # type: ignore[assignment]


def parts_of(written: str) -> tuple[str | int, ...]:
    """Of what a template wrote: a text, a blank, or both joined."""
    if isinstance(written, Blank):
        return written._parts
    if _MARK in written:
        raise Inspected
    return (written,)


def _parts_of(other: object) -> tuple[str | int, ...]:
    if not isinstance(other, str):
        raise TypeError(f"a text and a {type(other).__name__} cannot be joined")
    return parts_of(other)


class BlankEnvironment(ImmutableSandboxedEnvironment):
    """As that of the renderer, for templates that are given blanks."""

    intercepted_binops = frozenset(("%", "*"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, str) or isinstance(right, str):
            raise Inspected
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as Jinja's
        if __obj is not Namespace and _holds_blank(args, kwargs):
            raise Inspected
        return super().call(__context, __obj, *args, **kwargs)


def blind(environment: Environment) -> None:
    """Have its filters and tests tell nothing of blanks."""
    for name in environment.filters:
        if name not in _KEEPING_FILTERS:
            environment.filters[name] = _refuse
    for name, test in environment.tests.items():
        environment.tests[name] = _blind_test(name, cast(Callable[..., Any], test))


def blind_template(template: nodes.Template) -> None:
    """Rewrite what would reach into a blank without asking it."""
    if next(template.find_all(_UNKNOWN_NODES), None) or any(loop.recursive for loop in template.find_all(nodes.For)):
        raise Inspected
    _rewrite(template)


def _rewrite(node: nodes.Node) -> None:
    for field, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, field, [_rewritten(each) for each in value])
        else:
            setattr(node, field, _rewritten(value))


def _rewritten(node: Any) -> Any:
    if not isinstance(node, nodes.Node):
        return node
    _rewrite(node)
    if isinstance(node, nodes.Concat):
        first, *rest = [nodes.Filter(part, "string", [], [], None, None) for part in node.nodes]
        joined: nodes.Expr = first
        for part in rest:
            joined = nodes.Add(joined, part)
        return joined
    if isinstance(node, nodes.Compare) and any(operand.op in ("in", "notin") for operand in node.ops):
        return _membership(node)
    return node


def _membership(node: nodes.Compare) -> nodes.Expr:
    """A text that is asked for a blank would answer by itself."""
    if len(node.ops) > 1:
        raise Inspected
    (operand,) = node.ops
    test = nodes.Test(node.expr, "in", [operand.expr], [], None, None)
    return nodes.Not(test) if operand.op == "notin" else test


def _blind_test(name: str, test: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(test)
    def blinded(*args: Any, **kwargs: Any) -> Any:
        if not _holds_blank(args, kwargs):
            return test(*args, **kwargs)
        if name == "in" and isinstance(args[1], Blank):
            return not args[1].lacks(args[0])
        if name not in _TESTS:
            raise Inspected
        return _TESTS[name]

    return blinded


def _holds_blank(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return any(
        isinstance(value, Blank) or (isinstance(value, list | tuple) and any(isinstance(each, Blank) for each in value))
        for value in (*args, *kwargs.values())
    )
