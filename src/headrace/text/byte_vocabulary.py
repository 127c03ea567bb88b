"""The vocabulary of a worker that has no model: every byte is a token, and the rest of the ids are short words.

Owns the pieces and a ChatML template with tools. Prompts become bytes, id = byte; words only ever come out, so that
most of what the fake says can be read.
"""

from itertools import product

from headrace.core.errors import InvalidModel
from headrace.weights.vocabulary import PieceKind, Vocabulary

END = "<|im_end|>"
_SPECIALS = ("<|endoftext|>", "<|im_start|>", END)
_NUM_BYTES = 256
_SYLLABLES = ("bdfghklmnprstvwz", "aeiou", ("", "n", "r", "s", "l", "m", "t"), ("", "a", "e", "o"))

TEMPLATE = """\
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if system %}{{- system + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\nThese functions can be called:\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
    {{- 'To call one, write:\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (message.role == 'system' and loop.first and tools) %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' }}
            {{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def byte_vocabulary(size: int = 512) -> Vocabulary:
    """`size` ids: 256 bytes, the special tokens, then as many words as there is room for."""
    least = _NUM_BYTES + len(_SPECIALS)
    words = [f"\u0120{''.join(parts)}" for parts in product(*_SYLLABLES)]
    if not least <= size:
        raise InvalidModel(f"a byte vocabulary has at least {least} ids, not {size}")
    # Taken from all over the list, so that a few words are not all of one letter.
    stride = 89
    spread = [words[place * stride % len(words)] for place in range(len(words))][: size - least]
    padding = [f"\u0120x{number}" for number in range(size - least - len(spread))]
    plain, special = int(PieceKind.NORMAL), int(PieceKind.CONTROL)
    return Vocabulary(
        model="gpt2",
        pre="gpt-2",
        pieces=(*_byte_pieces(), *_SPECIALS, *spread, *padding),
        kinds=(plain,) * _NUM_BYTES + (special,) * len(_SPECIALS) + (plain,) * (size - least),
        chat_template=TEMPLATE,
        eos_id=_NUM_BYTES + _SPECIALS.index(END),
        eos_token=END,
    )


def _byte_pieces() -> list[str]:
    """Each byte as GPT-2 writes it: itself where it is printable, else a character from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(_NUM_BYTES)]
