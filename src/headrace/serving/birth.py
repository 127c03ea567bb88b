"""What must be known of a request to go on with it elsewhere: its prompts as ids, how they are sampled and read.

Owns the form in which a journal keeps that. Texts, tools and schemas that preparation has used up are left out.
"""

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from headrace.core.caller import Caller
from headrace.core.errors import InvalidInput
from headrace.core.request import SamplingParams
from headrace.serving.ask import Ask
from headrace.serving.life import Life
from headrace.serving.preparation import Prepared, stop_window
from headrace.text.grammar import Grammar


class SavedAsk(Struct, frozen=True, array_like=True):
    """`serving.preparation.Prepared` without what is made again from its ask."""

    ask: Ask
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    grammar: Grammar | None
    continues: bool
    syntax: str
    is_forced: bool
    is_named: bool
    echoed: str
    # Of no older version: any.
    tool_names: frozenset[str] = frozenset()

    def prepared(self) -> Prepared:
        return Prepared(
            ask=self.ask,
            prompt_ids=self.prompt_ids,
            sampling=self.sampling,
            grammar=self.grammar,
            window=stop_window(self.ask, {}),
            continues=self.continues,
            syntax=self.syntax,
            tool_names=self.tool_names,
            is_forced=self.is_forced,
            is_named=self.is_named,
            echoed=self.echoed,
        )


class SavedOrder(Struct, frozen=True, array_like=True):
    """`age_s` is how old the request was when its stream began. `most_tokens` has an entry for each choice."""

    caller: Caller
    asks: tuple[SavedAsk, ...]
    counts: bool
    age_s: float
    numerics: str
    most_tokens: tuple[int, ...]


def save_order(life: Life, age_s: float) -> bytes:
    """`age_s`: since its first byte, when its stream began."""
    asks = tuple(_save(prepared) for prepared in life.asks)
    most_tokens = tuple(voice.most_tokens for voice in life.voices)
    saved = SavedOrder(life.caller, asks, life.counts, age_s, life.numerics, most_tokens)
    return msgspec.msgpack.encode(saved)


def read_order(data: bytes) -> SavedOrder:
    """InvalidInput for what this version cannot go on with."""
    try:
        return msgspec.msgpack.decode(data, type=SavedOrder)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the journal's request cannot be gone on with here: {error}") from error


def _save(prepared: Prepared) -> SavedAsk:
    ask = replace(
        prepared.ask,
        prompt=None,
        messages=None,
        raw=None,
        ids=None,
        tools=[],
        chat_template_kwargs={},
        json_schema=None,
        regex=None,
        choices=None,
        grammar=None,
    )
    return SavedAsk(
        ask,
        prepared.prompt_ids,
        prepared.sampling,
        prepared.grammar,
        prepared.continues,
        prepared.syntax,
        prepared.is_forced,
        prepared.is_named,
        prepared.echoed,
        prepared.tool_names,
    )
