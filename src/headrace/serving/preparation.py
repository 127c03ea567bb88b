"""From an ask to what an engine can run: prompt ids, sampling, grammar, how to read the reply.

What is decided is here once, pure. Two thin drivers, one that waits and one that awaits, have templates rendered,
texts encoded and grammars checked where that is done: in limited processes and threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from headrace.core.errors import ContextLengthExceeded, InvalidInput
from headrace.core.request import MAX_LOGPROBS, SamplingParams, check_ends, check_sampling
from headrace.serving.ask import ALL_THAT_FIT, Ask, check_ask, check_free, sampling_of, shape_of
from headrace.serving.model_text import ModelText
from headrace.serving.tools import ToolPlan, plan_tools
from headrace.text.fitting import Room, encode_small, encode_within
from headrace.text.grammar import Grammar
from headrace.text.rendering import Traits
from headrace.text.stop import StopWindow
from headrace.text.template import ChatTemplate, Conversation
from headrace.text.tokenizer import Piece, num_chars

# Takes a tenth of a millisecond to encode; handing it to a thread takes as much.
INLINE_CHARS = 512
# Of one request, with the alternatives to each token.
MAX_SCORES = 1 << 20

_Windows = dict[tuple[tuple[str, ...], bool], StopWindow]


class Prepared(Struct, frozen=True):
    """An ask as the engine will see it. `syntax` reads calls of `tool_names` from the reply, empty where it is all text;
    `is_forced`: the reply is calls and nothing else; `is_named`: of one given tool. `window` looks for stop strings, if there are any. `echoed` is the prompt
    as text, where that is to be repeated."""

    ask: Ask
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    grammar: Grammar | None = None
    window: StopWindow | None = None
    continues: bool = False
    syntax: str = ""
    tool_names: frozenset[str] = frozenset()
    is_forced: bool = False
    is_named: bool = False
    echoed: str = ""


@dataclass(slots=True)
class _Draft:
    """An ask on its way. One of `conversation`, `pieces` and `ids` is its prompt. Grammars are to be checked before it may
    go on, each with the field that it came from."""

    ask: Ask
    sampling: SamplingParams
    grammar: Grammar | None
    checks: list[tuple[Grammar, str]]
    tools: ToolPlan
    window: StopWindow | None
    conversation: Conversation | None = None
    pieces: list[Piece] | None = None
    ids: list[int] | None = None


async def prepare(
    model: ModelText, asks: Sequence[Ask], *, now_s: float, seeds: Callable[[], int], most_tokens: int | None = None
) -> list[Prepared]:
    """Raises what is wrong with an ask; nothing is kept. `now_s` is the time that templates may print. A prompt has
    `most_tokens`, unless it is given what the model has room for."""
    drafts = []
    windows: _Windows = {}
    for ask in asks:
        template = _template(model, ask)
        traits = await template.describe() if template is not None else None
        draft = _draft(model, ask, traits, now_s, seeds, windows)
        for grammar, param in draft.checks:
            await model.desk.check(grammar, param=param)
        if draft.conversation is not None and template is not None:
            draft.pieces = _framed(model, ask, await template.render(draft.conversation))
        drafts.append(draft)
    most_tokens = model.context_len - 1 if most_tokens is None else most_tokens
    encoded = iter(await _encode(model, drafts, most_tokens))
    prepared = [_finish(model, draft, next(encoded) if draft.ids is None else draft.ids) for draft in drafts]
    _check_scores(model, prepared)
    return prepared


def prepare_sync(model: ModelText, ask: Ask, *, seeds: Callable[[], int], now_s: float = 0.0) -> Prepared:
    """`prepare` for who has no event loop; blocks the calling thread."""
    template = _template(model, ask)
    traits = template.describe_sync() if template is not None else None
    draft = _draft(model, ask, traits, now_s, seeds, {})
    for grammar, param in draft.checks:
        model.desk.check_sync(grammar, param=param)
    if draft.conversation is not None and template is not None:
        draft.pieces = _framed(model, ask, template.render_sync(draft.conversation))
    ids = draft.ids
    if draft.pieces is not None:
        room = Room(model.context_len - 1, _num_kept(model, ask))
        (ids,) = encode_within(model.tokenizer, [draft.pieces], [room])
    assert ids is not None, "a draft has a prompt"
    return _finish(model, draft, ids)


async def _encode(model: ModelText, drafts: Sequence[_Draft], most_tokens: int) -> list[list[int]]:
    """Away from the loop, unless handing it over would take longer than to do it."""
    jobs = [
        (draft.pieces, Room(most_tokens, _num_kept(model, draft.ask))) for draft in drafts if draft.pieces is not None
    ]
    if sum([num_chars(pieces) for pieces, _ in jobs]) <= INLINE_CHARS:
        return [encode_small(model.tokenizer, pieces, room) for pieces, room in jobs]
    return await model.encoders.encode_batch([pieces for pieces, _ in jobs], [room for _, room in jobs])


async def encode_prompt(model: ModelText, ask: Ask, *, now_s: float, framed: bool = True) -> list[int]:
    """The prompt alone, which may be longer than the context. Unless `framed`, a raw text is encoded as it stands."""
    if ask.raw is not None and not framed:
        return await model.encoders.encode([ask.raw], Room(model.most_told_tokens))
    (prepared,) = await prepare(model, [ask], now_s=now_s, seeds=lambda: 0, most_tokens=model.most_told_tokens)
    return list(prepared.prompt_ids)


def _check_scores(model: ModelText, prepared: Sequence[Prepared]) -> None:
    """Refuse more log-probabilities than a reply can hold. One sequence of any length may have all of them."""
    found = 0
    for one in prepared:
        sampling, num_prompt = one.sampling, len(one.prompt_ids)
        if sampling.logprobs is None and sampling.prompt_logprobs is None:
            continue
        num_output = model.context_len - num_prompt
        if one.ask.max_tokens is not None:
            num_output = min(one.ask.max_tokens, num_output)
        scores = 0 if sampling.prompt_logprobs is None else num_prompt * (sampling.prompt_logprobs + 1)
        scores += 0 if sampling.logprobs is None else num_output * (sampling.logprobs + 1)
        found += one.ask.n * scores
        most = max(MAX_SCORES, model.context_len * (MAX_LOGPROBS + 1))
        if found > most:
            param = "prompt_logprobs" if one.ask.logprobs is None else "logprobs"
            raise InvalidInput(
                f"n times the tokens of prompt and reply times their log-probabilities must be at most {most}: "
                "ask for a smaller n, max_tokens or logprobs",
                param=param,
            )


def grammar_of(ask: Ask, shape: str | None = None) -> Grammar | None:
    """What constrains the reply; InvalidInput when several things do. `shape` is the ask's, where that is known."""
    match shape_of(ask) if shape is None else shape:
        case "json_schema":
            return Grammar.json_schema(ask.json_schema)
        case "json_object":
            return Grammar("json_object")
        case "regex":
            return Grammar("regex", ask.regex or "")
        case "choices":
            return Grammar.choice(ask.choices or [])
        case "grammar":
            return Grammar("lark", ask.grammar or "")
    return None


def _template(model: ModelText, ask: Ask) -> ChatTemplate | None:
    """The one to render the ask with; None where it needs none."""
    if ask.messages is None and ask.prompt is None:
        return None
    if model.template is None:
        raise InvalidInput("this model has no chat template: give raw text", param="messages")
    return model.template


def _draft(
    model: ModelText, ask: Ask, traits: Traits | None, now_s: float, seeds: Callable[[], int], windows: _Windows
) -> _Draft:
    if ask.ids is not None and ask.truncate_prompt_tokens is None and len(ask.ids) >= model.context_len:
        raise ContextLengthExceeded(
            f"the prompt has {len(ask.ids)} tokens; the context holds {model.context_len}, one of them for output",
            param="ids",
        )
    check_ask(ask)
    messages = ask.messages if ask.messages is not None else [{"role": "user", "content": ask.prompt}]
    tools = ToolPlan(()) if traits is None else plan_tools(ask, messages, model.syntax, traits)
    shape = shape_of(ask)
    # Beside calls an answer's shape is part of their grammar; it is to blame for itself alone.
    checks: list[tuple[Grammar, str]] = []
    if shape and (shaped := grammar_of(ask, shape)) is not None:
        checks.append((shaped, shape))
    if tools.grammar is not None:
        checks.append((tools.grammar, "tools"))
    grammar = checks[-1][0] if checks else None
    if checks:
        check_free(ask)
        if not model.eos_ids:
            raise InvalidInput("this model's end is unknown, so no grammar can end its reply", param=checks[0][1])
    sampling = sampling_of(ask, seeds=seeds, masked=grammar is not None)
    check_sampling(sampling, model.vocab_size)
    check_ends(sampling, model.eos_ids)
    draft = _Draft(ask, sampling, grammar, checks, tools, stop_window(ask, windows))
    if ask.ids is not None:
        draft.ids = ask.ids
    elif ask.raw is not None:
        draft.pieces = model.tokenizer.frame(ask.raw)
    else:
        draft.conversation = Conversation(
            messages=tools.messages,
            tools=tools.tools,
            add_generation_prompt=ask.add_generation_prompt and not ask.continue_final_message,
            variables=ask.chat_template_kwargs,
            now_s=now_s,
        )
    return draft


def stop_window(ask: Ask, windows: _Windows) -> StopWindow | None:
    """Asks with the same stop strings share what looks for them."""
    if not ask.stops:
        return None
    key = (tuple(ask.stops), ask.include_stop)
    if key not in windows:
        windows[key] = StopWindow(ask.stops, include=ask.include_stop)
    return windows[key]


def _framed(model: ModelText, ask: Ask, rendered: list[Piece]) -> list[Piece]:
    """A rendered conversation as the model expects it, its begin-of-text in front."""
    if ask.continue_final_message and ask.messages:
        rendered = _cut_after(rendered, ask.messages[-1]["content"])
    before = model.tokenizer.before
    return rendered if tuple(rendered[: len(before)]) == before else [*before, *rendered]


def _cut_after(rendered: list[Piece], content: str) -> list[Piece]:
    """Up to the end of the last message: what the template wrote to close it is left out."""
    for sought in (content, content.strip()):
        for place in range(len(rendered) - 1, -1, -1):
            piece = rendered[place]
            if isinstance(piece, str) and sought in piece:
                return [*rendered[:place], piece[: piece.rindex(sought) + len(sought)]]
    raise InvalidInput("the chat template changes the last message, so it cannot be continued", param="messages")


def _num_kept(model: ModelText, ask: Ask) -> int | None:
    """How many of the prompt's last tokens are kept; None: all. Where max_tokens leave no room, they are what is refused."""
    if ask.truncate_prompt_tokens != ALL_THAT_FIT:
        return ask.truncate_prompt_tokens
    return max(1, model.context_len - (ask.max_tokens or 1))


def _finish(model: ModelText, draft: _Draft, ids: list[int]) -> Prepared:
    ask = draft.ask
    most = _num_kept(model, ask)
    kept = ids if most is None else ids[-most:]
    echoed = ""
    if ask.echo:
        is_whole = most is None or len(kept) < most
        echoed = ask.raw if ask.raw is not None and is_whole else model.tokenizer.decode(kept)
    return Prepared(
        ask=ask,
        prompt_ids=tuple(kept),
        sampling=draft.sampling,
        grammar=draft.grammar,
        window=draft.window,
        continues=ask.raw is not None or ask.ids is not None or ask.continue_final_message,
        syntax=draft.tools.syntax,
        tool_names=draft.tools.names,
        is_forced=draft.tools.is_forced,
        is_named=draft.tools.is_named,
        echoed=echoed,
    )
