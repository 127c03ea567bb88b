"""Everything a `Tokenizer` is made of, whichever file it came from. Owns the record; reads no format."""

from dataclasses import dataclass

import tokenizers

from headrace.text.tokens import TokenTable


@dataclass(slots=True)
class Recipe:
    """`opening` encodes text at the start of a prompt, `following` text behind a special token.

    In neither do special tokens exist. They are the same object unless the vocabulary marks the start of a text.
    """

    opening: tokenizers.Tokenizer
    following: tokenizers.Tokenizer
    table: TokenTable
    special_ids: dict[str, int]
    # The one special id that text may become: what a word-piece vocabulary cannot spell.
    unknown_id: int | None = None
    # Ids that the model expects before and after a bare text.
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
