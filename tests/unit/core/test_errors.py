"""The error tree: what is drawn is what exists, and every error says how to answer it."""

import re

from headrace.core import errors
from headrace.core.errors import HeadraceError, InvalidInput, QueueFull, Refused


def drawn() -> list[tuple[int, str, int | None]]:
    """(depth, name, status) of each line of the tree in the module's docstring."""
    lines = (errors.__doc__ or "").split("\n\n", 1)[1].splitlines()
    matches = [re.match(r"^([│├└─ ]*)(\w+)(?: +(\d{3}) )?", line) for line in lines if line]
    return [(len(m[1]) // 4, m[2], int(m[3]) if m[3] else None) for m in matches if m]


def declared(kind: type[HeadraceError] = HeadraceError, depth: int = 0) -> list[tuple[int, str, int | None]]:
    found: list[tuple[int, str, int | None]] = [(depth, kind.__name__, kind.status if depth else None)]
    for child in children(kind):
        found += declared(child, depth + 1)
    return found


def children(kind: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [child for child in kind.__subclasses__() if child.__module__ == errors.__name__]


def all_errors() -> list[type[HeadraceError]]:
    return [getattr(errors, name) for _, name, _ in drawn()]


def test_the_drawn_tree_is_the_tree_of_classes() -> None:
    assert drawn() == declared()


def test_every_code_is_its_own() -> None:
    codes = [kind.code for kind in all_errors()]
    assert len(set(codes)) == len(codes)


def test_what_the_caller_did_wrong_is_not_retryable_and_a_refusal_is() -> None:
    assert not InvalidInput.retryable and not any(kind.retryable for kind in children(InvalidInput))
    assert Refused.retryable and all(kind.retryable for kind in children(Refused))
    assert not errors.MemoryCorrupted.retryable


def test_an_error_carries_its_message_param_and_retry_time() -> None:
    wrong = InvalidInput("top_p is odd", param="top_p")
    assert (str(wrong), wrong.message, wrong.param) == ("top_p is odd", "top_p is odd", "top_p")
    full = QueueFull("later", retry_after_s=2.5)
    assert (full.retry_after_s, full.param, full.status) == (2.5, None, 503)
