"""Holds what clients received against what the fake runner must say to their prompts alone."""

from headrace.core.config import EngineConfig
from headrace.runner.truth import truth
from headrace.sim.book import Book
from headrace.sim.clients import Stream


def verify_streams(book: Book, config: EngineConfig) -> int:
    """Compare every stream kept; returns how many. AssertionError names the first that is wrong.

    A finished stream must be the whole truth, any other the beginning of it.
    """
    for ordinal, stream in sorted(book.streams.items()):
        expected = _expected(stream, config)
        received = stream.tokens.tolist()
        if received != expected:
            place = next(
                (index for index, pair in enumerate(zip(received, expected, strict=False)) if pair[0] != pair[1]),
                min(len(received), len(expected)),
            )
            raise AssertionError(
                f"request {ordinal}: {len(received)} tokens received, {len(expected)} expected, first wrong at {place}"
            )
    return len(book.streams)


def _expected(stream: Stream, config: EngineConfig) -> list[int]:
    request = stream.request
    num_prompt = len(request.prompt_ids)
    most = len(stream.tokens)
    if stream.finished:
        room = max(1, min(config.context_len, config.blocks * config.block_size) - num_prompt)
        most = room if request.max_tokens is None else request.max_tokens
    return truth(
        request.prompt_ids,
        most,
        vocab_size=config.vocab_size,
        eos_ids=config.eos_ids,
        seed=request.sampling.seed,
        choice=request.choice,
        scripted=stream.scripted,
    )
