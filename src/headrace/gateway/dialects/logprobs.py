"""Log-probabilities in the words of chat, of completions and of vLLM's prompt_logprobs. Pure."""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator

from headrace.gateway.schemas.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from headrace.streams.record import Part, Score

# JSON has no infinity; this is what OpenAI says for "hardly possible".
LEAST_LOGPROB = -9999.0
# A token whose characters an echo has in another form, composed or not, stands for so many of them each, and for so many
# in all: what is further on is another place.
_MOST_FORMS = 4
_MOST_SKIPPED = 64
_INNER_BYTES = bytes(range(0x80, 0xC0))

_Utf8Decoder = getincrementaldecoder("utf-8")


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
    """Gathers the parallel lists of one choice. An offset counts the characters that the tokens before completed."""

    def __init__(self) -> None:
        self.found = CompletionLogprobs([], [], [], [])

    def add(self, part: Part) -> None:
        self.found.text_offset.extend(_offsets(part))
        for score in part.scores:
            self.found.tokens.append(token_text(score.data))
            self.found.token_logprobs.append(None if score.logprob is None else finite(score.logprob))
            self.found.top_logprobs.append(_by_text(score))


def _offsets(part: Part) -> Iterator[int]:
    """Tokens are looked for in the text: one that is not there, like most special ones, takes none of it."""
    text, data = part.text, b"".join([score.data for score in part.scores])
    utf8 = _Utf8Decoder("replace")
    utf8.decode(_begun(data, text))
    at, skipped = _num_held(data, text), 0
    for score in part.scores:
        state = utf8.getstate()
        said = utf8.decode(score.data)
        if not part.offset + at and not text.startswith(said):
            # The space that encoding puts before a text.
            said = said.removeprefix(" ")
        place = text.find(said, at, at + skipped + len(said))
        yield part.offset + max(place, at)
        if place < 0:
            utf8.setstate(state)
            skipped = min(skipped + _MOST_FORMS * len(said), _MOST_SKIPPED)
        elif said:
            at, skipped = place + len(said), 0


def _begun(data: bytes, text: str) -> bytes:
    """What tokens of an earlier part had of the character that this one completes."""
    inner = data[: len(data) - len(data.lstrip(_INNER_BYTES))]
    first = text[:1].encode()
    return first[: -len(inner)] if inner and first.endswith(inner) else b""


def _num_held(data: bytes, text: str) -> int:
    """Characters that earlier tokens said, and that were held back for what might have been a stop string."""
    said = token_text(data)
    return len(text) - len(said) if said and text.endswith(said) else 0


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
