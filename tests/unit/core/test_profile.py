"""The stored profile's document: what was written is read, and nothing else is."""

from typing import Any

import msgspec
import pytest

from headrace.core.errors import InvalidInput
from headrace.core.profile import VERSION, convert_profile, is_profile
from tests.unit.cli.profile.profile_rig import a_profile

pytestmark = pytest.mark.unit


def document(**others: Any) -> dict[str, Any]:
    raw: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(a_profile()))
    return raw | others


def refused(raw: object) -> str:
    with pytest.raises(InvalidInput) as caught:
        convert_profile(raw, "it", "--profile")
    assert caught.value.param == "--profile"
    return caught.value.message


def test_what_was_written_is_read() -> None:
    raw = document()
    assert is_profile(raw) and raw["version"] == VERSION
    assert convert_profile(raw, "it", "--profile") == a_profile()


@pytest.mark.parametrize("raw", [None, [], 3, "profile", {}, {"format": "another"}, {"c0_s": 1.0}])
def test_what_is_something_else_is_no_profile(raw: object) -> None:
    assert not is_profile(raw)
    assert refused(raw) == "it is not a Headrace profile"


@pytest.mark.parametrize("version", [0, VERSION + 1, None, "one", 1.5])
def test_another_version_is_to_be_measured_again(version: object) -> None:
    told = refused(document(version=version))
    assert "measure again (headrace models profile)" in told and "damaged" not in told


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("c_in_s", None),
        ("c_in_s", "fast"),
        ("c_in_s", -1.0),
        ("c_kv_s", 1e300),
        ("slots", 0),
        ("slots", 2**80),
        ("decode", []),
        ("memory", {}),
        ("machine", "mine"),
        ("unheard_of", 1),
        ("name", "x" * 5000),
    ],
)
def test_a_damaged_field_is_named(field: str, value: object) -> None:
    told = refused(document(**{field: value}))
    assert told.startswith("it is damaged") and field in told


def test_no_coefficient_has_a_default() -> None:
    raw = document()
    del raw["c_att_s"]
    assert "c_att_s" in refused(raw)


def test_a_step_that_takes_no_time_is_damaged() -> None:
    assert "a step must take some time" in refused(document(c0_s=0.0, c_out_s=0.0))
