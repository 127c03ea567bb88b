"""Exact numbers: read from text without a float in between, and shown rounded.

Owns the bound on every number a plan is given. Knows no unit.
"""

import math
import re
from fractions import Fraction

from msgspec import Struct

from headrace.core.errors import InvalidInput

Number = Fraction | float

# Bounded on purpose: an exponent of nine digits would be an integer of a billion.
_NUMBER = re.compile(
    r"[+-]?(\d{1,18}(\.\d{0,18})?|\.\d{1,18})([eE][+-]?\d{1,2})?|[+-]?\d{1,18}/[1-9]\d{0,17}", re.ASCII
)


class Quantity(Struct, frozen=True):
    """A number as a float, and as the fraction it is where it is one: 133.33 beside "400/3"."""

    value: float
    exact: str | None = None


def measure(number: Number) -> Quantity:
    exact = str(number) if isinstance(number, Fraction | int) else None
    return Quantity(float(number), exact)


def parse_exact(text: str, param: str) -> Fraction:
    """Read a decimal or a fraction a/b exactly; a trailing % divides by a hundred."""
    body = text.strip()
    percent = body.endswith("%")
    body = body.removesuffix("%").strip().replace("_", "")
    if not _NUMBER.fullmatch(body):
        raise InvalidInput(f"{param} must be a number, not {text[:40]!r}", param=param)
    return Fraction(body) / (100 if percent else 1)


def parse_whole(text: str, param: str) -> int:
    number = parse_exact(text, param)
    if number.denominator != 1:
        raise InvalidInput(f"{param} must be a whole number, not {text[:40]!r}", param=param)
    return number.numerator


def check_number(number: Number, param: str, low: Number, high: Number) -> None:
    """Refuse what is not finite or lies outside low..high."""
    # NaN is in no range; an integer may be too large for a float, so that none is made of it.
    if not low <= number <= high:
        beyond = "below" if number < low else "above"
        shown = show(number) if -(10**30) < number < 10**30 or number != number else f"one far {beyond}"
        raise InvalidInput(f"{param} must be from {show(low)} to {show(high)}, not {shown}", param=param)


def round_up(number: Number) -> int:
    """The next whole number; a float that is whole but for its last bits counts as whole."""
    return math.ceil(number if isinstance(number, Fraction) else number - 1e-9 * abs(number))


def show(number: Number) -> str:
    """At most two decimals, three digits below a tenth: 4,000 and 133.33 and 0.0667."""
    if _is_small(number):
        return f"{float(number):.3g}"
    return _to_hundredths(number).removesuffix("0").removesuffix("0").removesuffix(".")


def show_money(amount: Number) -> str:
    """Dollars and cents, no cents when they are zero, and more digits below ten cents."""
    return "$" + (f"{float(amount):.3g}" if _is_small(amount) else _to_hundredths(amount).removesuffix(".00"))


def show_percent(share: Number) -> str:
    return f"{show(share * 100)} %"


def show_ms(seconds: float) -> str:
    return f"{show(seconds * 1000)} ms"


def _is_small(number: Number) -> bool:
    return not math.isfinite(number) or 0.0 < abs(float(number)) < 0.1


def _to_hundredths(number: Number) -> str:
    hundredths = round(number * 100)
    whole, rest = divmod(abs(hundredths), 100)
    return f"{'-' if hundredths < 0 else ''}{whole:,}.{rest:02d}"
