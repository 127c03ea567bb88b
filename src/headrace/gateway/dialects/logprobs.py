"""Log-probabilities in the words of chat, of completions and of vLLM's prompt_logprobs. Pure."""

from collections.abc import Iterable, Sequence

from headrace.gateway.schemas.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from headrace.streams.record import Score

# JSON has no infinity; this is what OpenAI says for "hardly possible".
LEAST_LOGPROB = -9999.0


def token_text(data: bytes) -> str:
    """A token may be part of a character: `bytes` has it exactly."""
    return data.decode(errors="replace")


def finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def chat_logprobs(scores: Iterable[Score]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            TokenLogprob(
                token_text(score.data),
                list(score.data),
                finite(score.logprob),
                [TopLogprob(token_text(top.data), list(top.data), finite(top.logprob)) for top in score.top],
            )
            for score in scores
            if score.logprob is not None
        ]
    )


class CompletionScores:
    """Gathers the parallel lists of one choice. Offsets go by the text said before each part."""

    def __init__(self) -> None:
        self.found = CompletionLogprobs([], [], [], [])

    def add(self, scores: Sequence[Score], offset: int) -> None:
        for score in scores:
            token = token_text(score.data)
            self.found.tokens.append(token)
            self.found.token_logprobs.append(None if score.logprob is None else finite(score.logprob))
            self.found.top_logprobs.append(_by_text(score))
            self.found.text_offset.append(offset)
            offset += len(token)


def _by_text(score: Score) -> dict[str, float] | None:
    """The alternatives and the token itself. Tokens that look alike are one entry, the likeliest's."""
    if score.logprob is None:
        return None
    found: dict[str, float] = {}
    for data, logprob in (*((top.data, top.logprob) for top in score.top), (score.data, score.logprob)):
        text = token_text(data)
        found[text] = max(found.get(text, LEAST_LOGPROB), finite(logprob))
    return found


def prompt_logprobs(scores: Iterable[Score]) -> PromptLogprobs:
    """Ranks are known of the alternatives, which come likeliest first, and of no other token."""
    found: PromptLogprobs = []
    for score in scores:
        if score.logprob is None:
            found.append(None)
            continue
        entry = {
            str(top.id): PromptLogprob(finite(top.logprob), rank, token_text(top.data))
            for rank, top in enumerate(score.top, start=1)
        }
        entry.setdefault(str(score.id), PromptLogprob(finite(score.logprob), None, token_text(score.data)))
        found.append(entry)
    return found
