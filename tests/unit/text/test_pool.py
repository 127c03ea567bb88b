"""The pool encodes off the loop, keeps its bound, and lets small texts past large ones."""

import asyncio
import gc
import weakref
from collections.abc import Coroutine, Sequence
from threading import Event
from typing import Any, cast

import pytest

from headrace.core.errors import InvalidInput, QueueFull, Refused
from headrace.text.pool import TokenizerPool
from headrace.text.tokenizer import Piece, Tokenizer
from tests.unit.text.real_vocabularies import tokenizer


class GatedTokenizer:
    """Encodes a text into its length; one that begins with `wait` only once the gate is open."""

    def __init__(self) -> None:
        self.gate = Event()
        self.begun = Event()
        self.seen: list[str] = []

    def encode_batch(self, prompts: Sequence[Sequence[Piece]], *, one_by_one: bool = False) -> list[list[int]]:
        texts = [str(parts[0]) for parts in prompts]
        self.seen += texts
        if texts[0].startswith("wait"):
            self.begun.set()
            assert self.gate.wait(timeout=30), "the test never opened the gate"
        return [[len(text)] for text in texts]


def gated(**options: int) -> tuple[TokenizerPool, GatedTokenizer]:
    tokens = GatedTokenizer()
    return TokenizerPool(cast(Tokenizer, tokens), **options), tokens


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, timeout=60))


async def begun(tokens: GatedTokenizer) -> None:
    assert await asyncio.to_thread(tokens.begun.wait, 30)


def test_the_pool_gives_what_the_tokeniser_gives() -> None:
    async def story() -> None:
        smollm2 = tokenizer("smollm2")
        pool = TokenizerPool(smollm2, large_bytes=1000)
        prompts: list[list[Piece]] = [[1, "Hi <|im_end|>", 2], ["x" * 2000, 1, "é" * 600], []]
        assert await pool.encode_batch(prompts) == smollm2.encode_batch(prompts)
        assert await asyncio.gather(*map(pool.encode, prompts)) == smollm2.encode_batch(prompts)
        assert pool.pending_bytes == 0
        pool.close()

    run(story())


def test_a_large_text_does_not_stand_in_front_of_small_ones() -> None:
    async def story() -> None:
        pool, tokens = gated(num_threads=1, large_bytes=100)
        large = [asyncio.create_task(pool.encode(["wait" + "x" * 100])) for _ in range(3)]
        await begun(tokens)
        assert await pool.encode(["small"]) == [5]
        assert not any(task.done() for task in large)
        tokens.gate.set()
        assert await asyncio.gather(*large) == [[104]] * 3
        pool.close()

    run(story())


def test_what_waits_is_bounded_in_bytes() -> None:
    async def story() -> None:
        pool, tokens = gated(num_threads=1, max_pending_bytes=100)
        held = asyncio.create_task(pool.encode(["wait" + "x" * 56]))
        await begun(tokens)
        with pytest.raises(QueueFull) as refusal:
            await pool.encode(["é" * 11])
        assert refusal.value.retry_after_s > 0
        fits = asyncio.create_task(pool.encode(["é" * 10]))
        await asyncio.sleep(0)
        assert pool.pending_bytes == 100
        tokens.gate.set()
        assert (await held, await fits) == ([60], [10])
        assert pool.pending_bytes == 0
        pool.close()

    run(story())


def test_a_text_that_can_never_fit_is_the_callers_fault() -> None:
    async def story() -> None:
        pool, _ = gated(max_pending_bytes=100)
        with pytest.raises(InvalidInput, match="100 bytes"):
            await pool.encode(["x" * 101])
        pool.close()

    run(story())


def test_a_cancelled_text_that_waits_is_never_encoded_and_frees_its_bytes() -> None:
    async def story() -> None:
        pool, tokens = gated(num_threads=1)
        running = asyncio.create_task(pool.encode(["wait"]))
        await begun(tokens)
        waiting = asyncio.create_task(pool.encode(["never"]))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert pool.pending_bytes == 4
        tokens.gate.set()
        assert await running == [4]
        assert await pool.encode(["after"]) == [5]
        assert tokens.seen == ["wait", "after"]
        pool.close()

    run(story())


def test_a_cancelled_text_that_runs_keeps_its_bytes_until_it_ends() -> None:
    async def story() -> None:
        pool, tokens = gated(num_threads=1)
        running = asyncio.create_task(pool.encode(["wait"]))
        await begun(tokens)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert pool.pending_bytes == 4
        tokens.gate.set()
        assert await pool.encode(["after"]) == [5]
        assert pool.pending_bytes == 0
        pool.close()

    run(story())


def test_an_error_of_one_text_reaches_its_caller_and_frees_its_bytes() -> None:
    async def story() -> None:
        pool = TokenizerPool(tokenizer("smollm2"))
        with pytest.raises(InvalidInput, match="surrogate"):
            await pool.encode(["\ud83d"])
        assert pool.pending_bytes == 0
        pool.close()

    run(story())


def test_a_text_that_was_refused_is_not_kept_for_the_garbage_collector() -> None:
    async def story() -> None:
        pool = TokenizerPool(tokenizer("smollm2"))
        refused: list[weakref.ref[InvalidInput]] = []
        try:
            await pool.encode(["\ud83d"])
        except InvalidInput as error:
            refused.append(weakref.ref(error))
        pool.close()
        await asyncio.sleep(0)
        assert [error() for error in refused] == [None]

    gc.disable()
    try:
        run(story())
    finally:
        gc.enable()


def test_closing_refuses_what_waits_and_what_comes() -> None:
    async def story() -> None:
        pool, tokens = gated(num_threads=1)
        running = asyncio.create_task(pool.encode(["wait"]))
        await begun(tokens)
        waiting = asyncio.create_task(pool.encode(["never"]))
        await asyncio.sleep(0)
        pool.close()
        with pytest.raises(Refused, match="shutting down"):
            await waiting
        with pytest.raises(Refused, match="shutting down"):
            await pool.encode(["late"])
        tokens.gate.set()
        assert await running == [4]
        pool.close()

    run(story())
