"""A wrong token, a missing one and one too many are all caught, in streams and whole replies."""

import pytest
import uvloop

from headrace.cli.load.check import TruthReport, Vocabulary, check_truth
from headrace.sim.arrivals import Together
from tests.unit.cli.load.stub import EOS, VOCAB_SIZE, Ask, Script, answer, drive, plan, serving

pytestmark = pytest.mark.unit


async def checked(script: Script, *, streamed: bool = True) -> TruthReport:
    async with serving(script) as server:
        record, wording = await drive(server, plan(Together(3), output=6), streamed=streamed, with_ids=True)
    return check_truth(record.outcomes, wording, Vocabulary(VOCAB_SIZE, (EOS,)))


def spoiled(change: list[int]) -> Script:
    """The truth for every request but the last, which gets these ids instead."""
    seen = 0

    async def script(ask: Ask) -> None:
        nonlocal seen
        seen += 1
        if seen < 3:
            await answer(ask)
            return
        ask.begin_stream()
        for token in change:
            ask.piece("a", None, [token])
        ask.piece("", "length", [])
        ask.end_stream(len(change))

    return script


@pytest.mark.parametrize("streamed", [True, False])
def test_the_truth_is_accepted(streamed: bool) -> None:
    assert uvloop.run(checked(answer, streamed=streamed)) == TruthReport(3, 18, 0)


def test_a_wrong_token_is_named() -> None:
    report = uvloop.run(checked(spoiled([VOCAB_SIZE] * 6)))
    assert report.wrong == 1
    assert f"token 0 is {VOCAB_SIZE}, must be" in report.first


def test_a_missing_token_is_wrong() -> None:
    assert "0 tokens came of 6" in uvloop.run(checked(spoiled([]))).first
