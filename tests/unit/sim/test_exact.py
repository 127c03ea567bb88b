"""Exact numbers: what is read, what is refused, what is shown."""

from fractions import Fraction

import pytest

from headrace.core.errors import InvalidInput
from headrace.sim.exact import check_number, measure, parse_exact, parse_whole, round_up, show, show_money


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0.1", Fraction(1, 10)),
        ("20%", Fraction(1, 5)),
        (" 12.5 % ", Fraction(1, 8)),
        ("10_000", Fraction(10_000)),
        ("1e3", Fraction(1000)),
        ("400/3", Fraction(400, 3)),
        ("-5", Fraction(-5)),
        (".5", Fraction(1, 2)),
    ],
)
def test_text_is_read_without_a_float_in_between(text: str, number: Fraction) -> None:
    assert parse_exact(text, "rate") == number


@pytest.mark.parametrize(
    "text", ["", "nan", "inf", "-Infinity", "1e999999999", "1/0", "1,5", "0x10", "--1", "٣", "9" * 40]
)
def test_what_is_no_number_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidInput, match="rate must be a number") as refused:
        parse_exact(text, "rate")
    assert refused.value.param == "rate"


def test_whole_numbers_are_whole() -> None:
    assert parse_whole("6e3", "gpus") == 6000
    with pytest.raises(InvalidInput, match="gpus must be a whole number"):
        parse_whole("2.5", "gpus")


def test_bounds_name_the_number_that_broke_them() -> None:
    check_number(Fraction(1, 2), "headroom", 0, 10)
    with pytest.raises(InvalidInput, match=r"headroom must be from 0 to 10, not -0\.2"):
        check_number(Fraction(-1, 5), "headroom", 0, 10)
    with pytest.raises(InvalidInput, match="not nan"):
        check_number(float("nan"), "headroom", 0, 10)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (Fraction(400, 3), "133.33"),
        (Fraction(4000), "4,000"),
        (Fraction(6, 5), "1.2"),
        (Fraction(2, 3), "0.67"),
        (0.0667123, "0.0667"),
        (1e-10, "1e-10"),
        (0, "0"),
        (-1234.5, "-1,234.5"),
        (100.0, "100"),
    ],
)
def test_numbers_are_shown_rounded(number: Fraction | float, text: str) -> None:
    assert show(number) == text


def test_money_has_cents_or_none() -> None:
    assert [show_money(amount) for amount in (300_000, Fraction(55, 2), 0.0433)] == ["$300,000", "$27.50", "$0.0433"]


def test_a_fraction_keeps_its_exact_form_beside_the_float() -> None:
    assert measure(Fraction(400, 3)).exact == "400/3"
    assert measure(0.5).exact is None


def test_rounding_up_forgives_the_last_bits_of_a_float_only() -> None:
    assert round_up(100 * 1.1) == 110
    assert round_up(Fraction(110) + Fraction(1, 10**15)) == 111
