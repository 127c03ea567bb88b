"""Dialects go into a journal and come back: whoever words a stream then says the same bytes."""

from itertools import product

import msgspec
import pytest

from headrace.core.errors import InvalidInput
from headrace.gateway.dialects.chat import ChatDialect
from headrace.gateway.dialects.completion import CompletionDialect
from headrace.gateway.dialects.envelope import Heading, Wants
from headrace.gateway.dialects.spec import AnyDialect, JournalDialects
from headrace.streams.record import Alternative, CallDelta, Ending, Failure, Part, Record, Score, Usage

pytestmark = pytest.mark.unit

HEADING = Heading("chatcmpl-1", "req_1", 1_700_000_000, "modèle \u2028", service_tier="default")
FLAGS = [name for name in Wants.__struct_fields__ if name != "opening"]
SCORE = Score(5, b"\xff", -0.5, (Alternative(6, b"b", -1.5),))
RECORDS = [
    Record(1, (Part(0, (1, 2), "the prompt", (Score(1, b"a", None), SCORE), is_prompt=True),)),
    Record(
        2, (Part(0, (5,), "é\u2028", (SCORE,), cached=4), Part(1, (7, 8), "x")), usage=Usage(3, 1, 3), step=9, age_s=0.5
    ),
    Record(3, (Part(1, (9,), calls=(CallDelta(0, "call_1", "look", '{"a":'),), index=2, offset=1),)),
    Record(4, (Part(0, (6,), "end", finish="stop", index=1, offset=2), Part(1, finish="tool_calls", index=3))),
    Record(5, ending=Ending(Usage(3, 1, 5), stages={"decode": 0.25}), age_s=1.0),
]
BROKEN = Record(5, ending=Ending(Usage(), Failure("stream_lost", "gone", 503, None, 1.0)))


@pytest.mark.parametrize("kind", [ChatDialect, CompletionDialect])
@pytest.mark.parametrize("flag", ["", *FLAGS])
def test_the_same_bytes_are_said_again(kind: type[AnyDialect], flag: str) -> None:
    dialects = JournalDialects()
    for opening, num_choices, is_bound in product(["", "So, "], [1, 2], [False, True]):
        dialect = kind(HEADING, Wants(opening=opening, **({flag: True} if flag else {})), num_choices)
        if is_bound:
            dialect = dialect.bound(1_700_000_123.5, "fp_é")
        again = dialects.decode(dialects.encode(dialect))
        assert type(again) is kind
        assert [again.frame(one) for one in (*RECORDS, BROKEN)] == [dialect.frame(one) for one in (*RECORDS, BROKEN)]


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x94\xa5other", msgspec.msgpack.encode(["other", {}, {}, 1])])
def test_what_is_no_dialect_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        JournalDialects().decode(data)


def test_a_dialect_that_is_not_known_is_refused() -> None:
    whole = msgspec.msgpack.decode(JournalDialects().encode(ChatDialect(HEADING, Wants(), 1)))
    with pytest.raises(InvalidInput, match="not known here"):
        JournalDialects().decode(msgspec.msgpack.encode(["runes", *whole[1:]]))
