"""Stop strings end a text wherever its deltas were cut, and none of their characters leak."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from headrace.core.errors import InvalidInput
from headrace.text.stop import MAX_STOP_CHARS, StopWindow

SHORT = st.text(alphabet="ab", min_size=1, max_size=4)


def run(stops: list[str], deltas: list[str], *, include: bool = False) -> tuple[str, str | None]:
    window = StopWindow(stops, include=include)
    shown = "".join(window.push(delta)[0] for delta in deltas)
    return shown + window.finish(), window.stopped


def find_naively(stops: list[str], text: str) -> tuple[int, str] | None:
    """Where the text ends and what ended it: first by end, then the longest."""
    found = [
        (at + len(stop), -len(stop), stop) for stop in stops for at in range(len(text)) if text.startswith(stop, at)
    ]
    end, _, stop = min(found, default=(0, 0, ""))
    return (end, stop) if stop else None


def test_a_stop_string_across_deltas_is_found() -> None:
    window = StopWindow(["\nUser:"])
    assert window.push("Paris.\nUs") == ("Paris.", None)
    assert window.push("er") == ("", None)
    assert window.push(": and") == ("", "\nUser:")
    assert window.push("more") == ("", "\nUser:")
    assert window.finish() == ""


def test_what_only_began_a_stop_string_is_released_as_soon_as_it_cannot_be_one() -> None:
    window = StopWindow(["</answer>"])
    assert window.push("1 </ans") == ("1 ", None)
    assert window.push("x") == ("</ansx", None)
    assert window.push("y <") == ("y ", None)
    assert window.finish() == "<"


def test_only_the_longest_possible_start_is_held() -> None:
    window = StopWindow(["aab", "b!"])
    assert window.push("aaaa") == ("aa", None)
    assert window.push("c") == ("aac", None)


def test_the_first_to_be_complete_wins_and_the_longest_of_those() -> None:
    assert run(["ab", "abc"], ["xabcx"]) == ("x", "ab")
    assert run(["bc", "abc"], ["xabcx"]) == ("x", "abc")
    assert run(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")


def test_include_keeps_the_stop_string_and_holds_nothing() -> None:
    window = StopWindow(["END"], include=True)
    assert window.push("1 EN") == ("1 EN", None)
    assert window.push("D2") == ("D", "END")


def test_characters_outside_the_first_plane_count_as_one() -> None:
    assert run(["👩\u200d🚀"], ["hi 👩", "\u200d", "🚀!"]) == ("hi ", "👩\u200d🚀")
    assert run(["👩\u200d🚀"], ["hi 👩", "\u200d", "💻!"]) == ("hi 👩\u200d💻!", None)


def test_no_stop_strings_hold_nothing() -> None:
    assert StopWindow([]).push("abc") == ("abc", None)


@pytest.mark.parametrize("stops", [[""], ["a", ""], ["a"] * 17, ["a" * (MAX_STOP_CHARS + 1)]])
def test_stop_strings_out_of_bounds_are_the_callers_fault(stops: list[str]) -> None:
    with pytest.raises(InvalidInput) as error:
        StopWindow(stops)
    assert error.value.param == "stop"


@given(stops=st.lists(SHORT, max_size=5), deltas=st.lists(st.text(alphabet="abc", max_size=5), max_size=12))
def test_any_deltas_end_where_the_whole_text_ends(stops: list[str], deltas: list[str]) -> None:
    text = "".join(deltas)
    found = find_naively(stops, text)
    expected = (text, None) if found is None else (text[: found[0] - len(found[1])], found[1])
    assert run(stops, deltas) == expected
    kept = (text, None) if found is None else (text[: found[0]], found[1])
    assert run(stops, deltas, include=True) == kept


@given(stops=st.lists(SHORT, min_size=1, max_size=5), deltas=st.lists(st.text(alphabet="abc", max_size=5), max_size=12))
def test_no_more_is_held_than_may_begin_a_stop_string(stops: list[str], deltas: list[str]) -> None:
    window = StopWindow(stops)
    seen = shown = ""
    for delta in deltas:
        released, stopped = window.push(delta)
        seen, shown = seen + delta, shown + released
        if stopped is not None:
            break
        starts = [size for stop in stops for size in range(1, len(stop)) if seen.endswith(stop[:size])]
        assert len(seen) - len(shown) == max(starts, default=0)
