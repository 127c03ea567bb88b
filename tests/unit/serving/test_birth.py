"""Orders of every shape go into a journal and come back as they were, but for what preparation has used up."""

import asyncio
from collections.abc import Iterator

import msgspec
import pytest
from msgspec.structs import asdict, replace

from headrace.core.errors import InvalidInput
from headrace.core.request import Tier
from headrace.core.stages import Stage, StageClock
from headrace.serving.ask import Ask
from headrace.serving.birth import SavedOrder, read_order, save_order
from headrace.serving.life import Life
from headrace.serving.model_text import ModelText
from headrace.serving.preparation import Prepared, prepare
from headrace.streams.stream import Stream
from headrace.text.limited import LimitedPool
from tests.unit.serving.asks import ASKS, CALLING, TOOL
from tests.unit.serving.network_rig import CALLER, EOS, VOCABULARY, PlainDialect

pytestmark = pytest.mark.unit

SHAPES: dict[str, tuple[Ask, ...]] = {
    **{kind: (ask,) for kind, ask in ASKS.items()},
    "tools": (CALLING,),
    "a named tool": (replace(CALLING, tool_choice=str(TOOL["name"])),),
    "a choice of tools": (replace(CALLING, tool_choice="auto"),),
    "messages": (Ask(messages=[{"role": "user", "content": "hi"}], chat_template_kwargs={"a": [1, {"b": None}]}),),
    "continued": (
        Ask(
            messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}],
            continue_final_message=True,
        ),
    ),
    "prompt": (Ask(prompt="hi", echo=True, return_token_ids=True),),
    "ids": (Ask(ids=[1, 2, 3], truncate_prompt_tokens=2, echo=True),),
    "choices": (Ask(raw="hi", choices=["yes", "no"]),),
    "grammar": (Ask(raw="hi", grammar='start: "a"+'),),
    "object": (Ask(raw="hi", json_object=True),),
    "no schema": (Ask(raw="hi", json_schema=True),),
    "biases": (Ask(raw="hi", logit_bias={"5": -100.0}, allowed_ids=[5, 6], stop_ids=[9], min_tokens=2, max_tokens=9),),
    "extremes": (Ask(raw="hi", seed=2**64 - 1, temperature=0.0, top_k=1, min_p=0.5, deadline_s=1e6),),
    "negative seed": (Ask(raw="hi", seed=-(2**63), priority=Tier.BATCH, queue_timeout_s=0.1, n=3),),
    "stops": (Ask(raw="hi", stop="one", include_stop=True), Ask(raw="ho", stop=["é\u0000", "🙂"])),
    "many": tuple(Ask(raw=f"prompt {number}", n=2) for number in range(20)),
}


@pytest.fixture(scope="module")
def model(pool: LimitedPool) -> Iterator[ModelText]:
    made = ModelText.build("m", VOCABULARY, pool, context_len=1024, vocab_size=512, eos_ids=(EOS,))
    yield made
    made.close()


def life_of(model: ModelText, *asks: Ask) -> Life:
    prepared = asyncio.run(prepare(model, asks, now_s=0.0, seeds=lambda: 7))
    life = Life(Stream("r", "acme", PlainDialect()), CALLER, StageClock(Stage.ROUTE, 0.0), model, counts=True)
    life.prepare(prepared)
    life.numerics = "fp"
    for voice in life.voices:
        voice.most_tokens = 10 + voice.number
    return life


def plain(prepared: Prepared) -> dict[str, object]:
    """All that a voice and a worker need. A window is what its ask's stop strings make of it."""
    found = asdict(prepared)
    found["window"] = prepared.window is not None
    used_up = {"prompt", "messages", "raw", "ids", "tools", "chat_template_kwargs", "json_schema", "regex", "choices"}
    found["ask"] = {name: value for name, value in asdict(prepared.ask).items() if name not in {*used_up, "grammar"}}
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_an_order_comes_back_as_it_was(model: ModelText, shape: str) -> None:
    life = life_of(model, *SHAPES[shape])
    saved = read_order(save_order(life, 1.5))
    assert (saved.caller, saved.counts, saved.age_s, saved.numerics) == (CALLER, True, 1.5, "fp")
    assert [plain(ask.prepared()) for ask in saved.asks] == [plain(prepared) for prepared in life.asks]
    again = Life(Stream("r", "acme", PlainDialect()), saved.caller, StageClock(Stage.ROUTE, 0.0), model)
    again.prepare([ask.prepared() for ask in saved.asks])
    assert saved.most_tokens == tuple(10 + number for number in range(len(again.voices)))
    names = [(voice.number, voice.choice_of_ask, voice.prepared.prompt_ids) for voice in life.voices]
    assert names == [(voice.number, voice.choice_of_ask, voice.prepared.prompt_ids) for voice in again.voices]


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x90", b"\x96\xc0\xc0\xc0\xc0\xc0\xc0", b"\xa2\xff\xff"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        read_order(data)


def test_an_order_cut_anywhere_is_refused(model: ModelText) -> None:
    whole = save_order(life_of(model, CALLING), 0.0)
    assert msgspec.msgpack.decode(whole, type=SavedOrder) == read_order(whole)
    for size in range(0, len(whole), 7):
        with pytest.raises(InvalidInput):
            read_order(whole[:size])
