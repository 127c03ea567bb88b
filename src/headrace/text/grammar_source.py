"""A grammar in the words of llguidance, and the limits that every matcher is built under.

Owns the translation. Knows no token: a matcher is made of this and a lexicon.
"""

import json
import re
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits

from headrace.core.errors import InvalidInput
from headrace.text.grammar import SUBJECTS, CallForm, Grammar, check_repeats, read_choices, read_schema

# Loose enough for indented JSON, but a sequence cannot go on for ever with spaces between two values.
_WHITESPACE = r"\x20|\n\x20{0,32}"
_MAX_MESSAGE = 300
_LINE = "\n"
_LINES = re.compile(r"^\s*\d+ \|", re.MULTILINE)
# All options: a schema could set them itself under "x-guidance".
_ANSWERS: Any = {
    "whitespace_flexible": True,
    "whitespace_pattern": _WHITESPACE,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
# Spaces are where models were taught to write them, and nowhere else: one that is made to call a tool against its will
# wanders off into white space if it may.
_CALLS: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}


def grammar_source(grammar: Grammar) -> str:
    """Raises InvalidInput for what can be seen to be wrong without compiling it."""
    match grammar.kind:
        case "json_schema":
            return _from_schema(read_schema(grammar.source))
        case "json_object":
            return _from_schema({"type": "object"})
        case "regex":
            check_repeats(grammar.source, SUBJECTS["regex"])
            return LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            return LLMatcher.grammar_from_regex(_choice(grammar.source))
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.source)
        case "calls":
            return LLMatcher.grammar_from_lark(_calls(msgspec.json.decode(grammar.source, type=CallForm)))


def matcher_limits(grammar: Grammar) -> LLParserLimits:
    """About 15 ms for a mask and 40 MB for a matcher at the very most; ordinary schemas use a hundredth of it.

    A row of the parser has some items for each property of an object that may come next. Only Lark grammars can be
    so ambiguous that a row's items cost their square, so they get fewer.
    """
    return LLParserLimits(
        max_items_in_row=250 if grammar.kind == "lark" else 2_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=30_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def explain(grammar: Grammar, error: str) -> str:
    """llguidance's complaint in one line, without the parser state it appends."""
    first = error.partition("<non-verbose/>")[0].partition("<state>")[0].partition(". Enable")[0]
    # Lines of what was made of it say nothing to who did not write them.
    reason = " ".join((_LINES.split(first)[0] if grammar.kind == "calls" else first).split())
    if reason in ("", "NoExtension", "NoExtensionBias"):
        reason = "it matches nothing"
    return f"{SUBJECTS[grammar.kind]} cannot be used: {reason[:_MAX_MESSAGE]}"


def _from_schema(schema: object) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_ANSWERS)


def _calls(form: CallForm) -> str:
    call = "body"
    if form.close_tag:
        call = f"{json.dumps(form.open_tag + _LINE)} body {json.dumps(_LINE + form.close_tag)}"
    more = f" ({json.dumps(_LINE)} call){{0,{form.most - 1}}}" if form.most > 1 else ""
    lines = [f"calls: call{more}", f"call: {call}", f"body: {_inline(form.schema, _CALLS)}"]
    if form.answer is None:
        return _LINE.join(["start: calls", *lines, ""])
    return _LINE.join(["start: calls | answer", *lines, f"answer: {_inline(form.answer, _ANSWERS)}", ""])


def _inline(schema: object, options: dict[str, Any]) -> str:
    return f"%json {json.dumps({**read_schema(json.dumps(schema)), 'x-guidance': options})}"


def _choice(source: str) -> str:
    """As one expression, so that the choices are one automaton rather than as many items of a parser's row."""
    try:
        choices = read_choices(source)
    except msgspec.DecodeError:
        raise InvalidInput("the choice is not a list of texts") from None
    return "|".join("".join(map(_escape, choice)) for choice in dict.fromkeys(choices))


def _escape(character: str) -> str:
    plain = character.isascii() and character.isalnum()
    return character if plain else f"\\x{{{ord(character):x}}}"
