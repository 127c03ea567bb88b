"""What could have stood where msgspec met something else: found by its complaint, in any type it decodes."""

from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta, Struct

from headrace.core.closed_set import complete, possible


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(Struct, tag_field="kind", tag="cat", forbid_unknown_fields=True):
    mood: Literal["calm", "wild"] = "calm"


class Dog(Struct, tag_field="kind", tag="dog", forbid_unknown_fields=True):
    friends: "tuple[Cat | Dog, ...]" = ()
    age: int = 0


class Owner(Struct, tag_field="kind", tag="owner"):
    heirs: list[Cat | Dog] = []


class Tenant(Struct, tag_field="kind", tag="tenant"):
    heirs: list[Dog | Cat] = []


class House(Struct, forbid_unknown_fields=True):
    pets: list[Cat | Dog] = []
    door: Annotated[Literal["open", "shut"], Meta(description="d")] | Cat | None = None
    walls: dict[str, Colour] = {}
    floors: tuple[Literal[1, 2], Literal["flat"]] = (1, "flat")
    street: str = msgspec.field(name="in_street", default="")


def complaint(raw: object, kind: Any = House) -> str:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(raw, kind)
    return str(caught.value)


@pytest.mark.parametrize(
    ("raw", "values"),
    [
        ({"door": "ajar"}, ["open", "shut", "an object"]),
        ({"pets": [{"kind": "cow"}]}, ["cat", "dog"]),
        ({"pets": [{"kind": "cat"}, {"kind": "cat", "mood": "bad"}]}, ["calm", "wild"]),
        ({"pets": [{"kind": "dog", "friends": [{"kind": "dog", "friends": [{"kind": "cow"}]}]}]}, ["cat", "dog"]),
        ({"walls": {"north": "green"}}, ["red", "blue"]),
        ({"floors": [3, "flat"]}, ["1", "2", "flat"]),
        ({"windows": 3}, ["pets", "door", "walls", "floors", "in_street"]),
        ({"door": {"kind": "cat", "colour": "red"}}, ["mood"]),
        ({"door": "` - at `$.walls[...]`"}, ["open", "shut", "an object"]),
        ({"windows - at `$.walls`": 3}, ["pets", "door", "walls", "floors", "in_street"]),
        ({"in_street": 7}, []),
        ({"pets": [{}]}, []),
        (7, []),
    ],
)
def test_a_complaint_leads_to_what_is_possible(raw: object, values: list[str]) -> None:
    assert possible(complaint(raw), House) == values


def test_a_union_and_a_word_alone_have_values_too() -> None:
    assert possible(complaint({"kind": "cow"}, Cat | Dog), Cat | Dog) == ["cat", "dog"]
    assert possible(complaint("c", Literal["a", "b"]), Literal["a", "b"]) == ["a", "b"]


def test_what_is_possible_in_several_places_is_told_once() -> None:
    raw = {"kind": "tenant", "heirs": [{"kind": "cow"}]}
    assert possible(complaint(raw, Owner | Tenant), Owner | Tenant) == ["cat", "dog"]


def test_who_wrote_a_file_is_told_both() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"door": "ajar"}, House)
    assert complete(caught.value, House) == f"{caught.value}; possible are open, shut, an object"
    assert complete(ValueError("as it is"), House) == "as it is"
