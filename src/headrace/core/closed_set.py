"""What could have stood where a decoder met something else. Owns the way from its complaint to the closed set that the
type knows; rewords nothing, and repeats nothing of what was decoded.
"""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from msgspec import inspect

_INVALID = ("Invalid value ", "Invalid enum value ")
_UNKNOWN = "Object contains unknown field "
# A field, or an item of a list or of an object.
_STEP = re.compile(r"\.(?P<field>[^.\[]+)|\[[^\]]*\]")
_OBJECTS = (inspect.StructType, inspect.DictType, inspect.TypedDictType)


def possible(complaint: str, kind: Any) -> list[str]:
    """The values, or the names of fields, one of which msgspec missed when it decoded something as `kind`. Empty where they
    are no closed set, and where the complaint is about something else."""
    what, path = _split(complaint)
    if not what.startswith((*_INVALID, _UNKNOWN)):
        return []
    here, tags = _members(_info(kind)), list[str]()
    for step in _STEP.finditer(path):
        name = step["field"]
        tags = [str(each.tag) for each in _structs(here) if name is not None and each.tag_field == name]
        here = _items(here) if name is None else _field(here, name)
    # Where unions meet, a type is a member of several.
    return list(dict.fromkeys(_names(here) if what.startswith(_UNKNOWN) else tags or _values(here)))


def complete(error: Exception, kind: Any) -> str:
    """What msgspec said of something that should be of this kind, and what it should have been, for who wrote it."""
    text = str(error)
    values = possible(text, kind)
    return f"{text}; possible are {', '.join(values)}" if values else text


def _split(complaint: str) -> tuple[str, str]:
    """What is wrong, and where. By no pattern: a complaint may hold all of a long value."""
    what, at, path = complaint.rpartition(" - at `$")
    return (what, path[:-1]) if at and path.find("`") == len(path) - 1 else (complaint, "")


@cache
def _info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _members(info: inspect.Type) -> list[inspect.Type]:
    """The types that a type is one of, without what is said about them."""
    if isinstance(info, inspect.Metadata):
        return _members(info.type)
    if isinstance(info, inspect.UnionType):
        return [member for each in info.types for member in _members(each)]
    return [info]


def _structs(here: Iterable[inspect.Type]) -> list[inspect.StructType]:
    return [each for each in here if isinstance(each, inspect.StructType)]


def _field(here: Iterable[inspect.Type], name: str) -> list[inspect.Type]:
    fields = [field for each in _structs(here) for field in each.fields if field.encode_name == name]
    return [member for field in fields for member in _members(field.type)]


def _items(here: Iterable[inspect.Type]) -> list[inspect.Type]:
    found: list[inspect.Type] = []
    for each in here:
        if isinstance(each, (inspect.ListType, inspect.VarTupleType, inspect.SetType)):
            found += _members(each.item_type)
        elif isinstance(each, inspect.TupleType):
            found += [member for item in each.item_types for member in _members(item)]
        elif isinstance(each, inspect.DictType):
            found += _members(each.value_type)
    return found


def _values(here: Iterable[inspect.Type]) -> list[str]:
    """An object is named where one is possible beside the values."""
    found: list[str] = []
    for each in here:
        if isinstance(each, inspect.LiteralType):
            found += [str(value) for value in each.values]
        elif isinstance(each, inspect.EnumType):
            found += [str(member.value) for member in each.cls]
    return [*found, "an object"] if found and any(isinstance(each, _OBJECTS) for each in here) else found


def _names(here: Iterable[inspect.Type]) -> list[str]:
    return [field.encode_name for each in _structs(here) for field in each.fields]
