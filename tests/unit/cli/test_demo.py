"""Command lines of `headrace demo` that cannot be meant, and how a reply that differs is described."""

import json

import pytest

from headrace.cli import main as cli
from headrace.cli.demo_failover import Telling, difference

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("words", "param"),
    [
        (["--tokens", "3"], "--tokens"),
        (["--tokens", "many"], "--tokens"),
        (["--model", ""], "--model"),
        (["--model", "a\x1b[2J"], "--model"),
        (["--question", " "], "--question"),
        (["--question", "x" * 5000], "--question"),
    ],
)
def test_bad_input_is_refused_before_a_server_is_started(
    capsys: pytest.CaptureFixture[str], words: list[str], param: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", "failover", "--json", *words])
    assert ended.value.code == 2
    assert json.loads(capsys.readouterr().out)["error"]["param"] == param


def test_the_demonstrations_are_both_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and "failover" in shown and "--seconds" in shown


def test_the_first_difference_is_named() -> None:
    truth = Telling("one two three", "length", 1)
    assert difference(truth, {"worker": truth, "gateway": truth}) is None
    for told, place in (
        (Telling("one twice", "length", 1), "letter 6"),
        (Telling("one two", "length", 1), "letter 7"),
        (Telling("one two three", "stop", 1), "ended by stop"),
    ):
        said = difference(truth, {"worker": truth, "gateway": told})
        assert said is not None and "gateway" in said and place in said
