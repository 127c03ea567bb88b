"""Log-probabilities of a worker's frame, handed to the voices they are of. Owns nothing; knows the table's layout."""

from collections.abc import Iterator, Mapping

from headrace.core.messages import ScoreTable
from headrace.serving.voice import Voice
from headrace.streams.record import Alternative

# Its position among prompt and reply, its log-probability, and ids and log-probabilities of what else there was.
_Scored = tuple[int, float, list[int], list[float]]


def scored(table: ScoreTable, voices: Mapping[int, Voice]) -> Iterator[tuple[Voice, _Scored]]:
    """Whoever is not there any more is left out."""
    scores = table.unpack()
    tops = zip(scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True)
    entries = zip(scores.owners.tolist(), scores.positions.tolist(), scores.logprobs.tolist(), tops, strict=True)
    for owner, position, logprob, (ids, logprobs) in entries:
        voice = voices.get(owner)
        if voice is not None:
            yield voice, (position, logprob, ids, logprobs)


def tell_score(voice: Voice, score: _Scored) -> None:
    position, logprob, ids, logprobs = score
    data = voice.life.model.tokenizer.token_bytes
    top = tuple(
        Alternative(token, data(token), chance) for token, chance in zip(ids, logprobs, strict=True) if token >= 0
    )
    voice.score(position, logprob, top)
