"""The text side of one model: tokeniser, template, tool syntax, grammar check. Knows no weights and no worker.

Built from the model's vocabulary alone, so that a gateway has it without torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.text.grammar import GrammarDesk
from headrace.text.limited import LimitedPool
from headrace.text.pool import TokenizerPool
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.text.tools.syntax import pick_syntax
from headrace.weights.vocabulary import Vocabulary

# What is only to be counted may be longer than what can be answered, by so many times.
TOLD_CONTEXTS = 4


@dataclass(slots=True)
class ModelText:
    """`vocab_size` is the model's, which may be more than the tokeniser's. `syntax` is how it writes tool calls."""

    name: str
    tokenizer: Tokenizer
    encoders: TokenizerPool
    template: ChatTemplate | None
    desk: GrammarDesk
    syntax: str
    context_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    created_s: float = 0.0

    @staticmethod
    def build(
        name: str,
        vocabulary: Vocabulary,
        limited: LimitedPool,
        *,
        context_len: int,
        vocab_size: int,
        eos_ids: Sequence[int],
        aliases: Sequence[str] = (),
        architecture: str = "",
        created_s: float = 0.0,
        num_threads: int = 2,
    ) -> "ModelText":
        """InvalidModel where the vocabulary cannot be built."""
        tokenizer = Tokenizer(vocabulary)
        template = None
        if vocabulary.chat_template.strip():
            template = ChatTemplate(
                vocabulary.chat_template,
                tokenizer.special_ids,
                limited,
                bos_token=vocabulary.bos_token,
                eos_token=vocabulary.eos_token,
                encode=tokenizer.encode_behind,
            )
        return ModelText(
            name=name,
            tokenizer=tokenizer,
            encoders=TokenizerPool(tokenizer, num_threads=num_threads),
            template=template,
            desk=GrammarDesk(limited),
            syntax=pick_syntax(vocabulary.chat_template, architecture),
            context_len=context_len,
            vocab_size=vocab_size,
            eos_ids=tuple(eos_ids),
            aliases=tuple(aliases),
            created_s=created_s,
        )

    @property
    def most_told_tokens(self) -> int:
        """Of a text that is encoded or decoded for its own sake."""
        return TOLD_CONTEXTS * self.context_len

    def close(self) -> None:
        self.encoders.close()
