"""What every journal that keeps anything promises, over each of them; and the one that keeps nothing."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
from redis.asyncio import Redis

from headrace.streams.file_journal import FileJournal
from headrace.streams.journal import NOBODY, Entry, Expired, Journal, Kept, MemoryJournal
from headrace.streams.redis_journal import RedisJournal
from tests.services import redis_server
from tests.unit.streams.journals import SECRET, Wall, appended, birth, by_name, entry, numbers, said, whole

pytestmark = pytest.mark.unit

WINDOW_S = 300.0


class Kind(Protocol):
    """A kind of journal, with what it needs."""

    def life(self) -> AbstractAsyncContextManager[Journal]:
        """One life of one gateway, that ends well."""

    async def pass_window(self) -> None: ...


class Files:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._wall = Wall()

    @asynccontextmanager
    async def life(self) -> AsyncIterator[Journal]:
        journal = FileJournal(self._folder, SECRET, window_s=WINDOW_S, clock=self._wall, wall_s=self._wall)
        yield journal
        await journal.close()

    async def pass_window(self) -> None:
        self._wall.time_s += WINDOW_S


class InRedis:
    def __init__(self, address: str) -> None:
        self._address = address

    @asynccontextmanager
    async def life(self) -> AsyncIterator[Journal]:
        async with Redis.from_url(self._address) as client:
            journal = RedisJournal(client, SECRET, "gateway", window_s=WINDOW_S)
            yield journal
            await journal.close()

    async def pass_window(self) -> None:
        """As Redis would by itself: what is to be gone by then goes."""
        async with Redis.from_url(self._address) as client:
            for key in await client.keys("*"):
                if 0 <= await client.ttl(key) <= WINDOW_S:
                    await client.delete(key)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as address:
        yield address


@pytest.fixture(params=["file", "redis"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    if request.param == "file":
        return Files(tmp_path)
    address = request.getfixturevalue("address")

    async def empty() -> None:
        async with Redis.from_url(address) as client:
            await client.flushall()

    asyncio.run(empty())
    return InRedis(address)


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story())


def test_what_was_appended_is_found_by_its_tenant_alone(kind: Kind) -> None:
    async def story() -> None:
        async with kind.life() as journal:
            assert await journal.recover() == []
            await appended(journal, [entry(1, "a"), entry(1, "b")])
            await appended(journal, [entry(2, "a", is_end=True), entry(2, "b")])
            a, b = await journal.find("acme", "a"), await journal.find("acme", "b")
            assert isinstance(a, Kept) and isinstance(b, Kept)
            assert (a.birth, b.birth) == (birth("a"), birth("b"))
            assert (a.records, b.records) == ([said(1), entry(2, is_end=True).record], [said(1), said(2)])
            assert a.ended_s is not None and b.ended_s is None
            assert await journal.find("rival", "a") is None
            assert await journal.find("acme", "c") is None
            assert journal.is_keeping

    run(story)


def test_one_append_may_hold_several_records_of_a_stream_and_of_tenants_with_equal_ids(kind: Kind) -> None:
    async def story() -> None:
        async with kind.life() as journal:
            await appended(journal, [*whole(), *whole(tenant="rival", length=2), entry(1, "cme", "as")])
            assert numbers(await journal.find("acme", "s")) == [1, 2, 3]
            assert numbers(await journal.find("rival", "s")) == [1, 2]
            assert await journal.find("a", "scme") is None

    run(story)


def test_each_append_is_answered_once_and_in_order(kind: Kind) -> None:
    async def story() -> None:
        async with kind.life() as journal:
            order: list[int] = []
            for number in range(1, 100):
                journal.append([entry(number)], lambda refused, number=number: order.append(number))  # type: ignore[misc]
            await appended(journal, [])
            assert order == list(range(1, 100))
            assert numbers(await journal.find("acme", "s")) == order

    run(story)


def test_the_next_life_speaks_for_what_has_not_ended_and_its_records_join_on(kind: Kind) -> None:
    async def story() -> None:
        for life in range(4):
            async with kind.life() as journal:
                kept = {one.birth.stream: one for one in await journal.recover()}
                if life:
                    assert numbers(kept["s"]) == list(range(1, 2 * life + 1))
                    assert (kept["s"].ended_s, kept["s"].birth) == (None, birth())
                await appended(journal, [entry(2 * life + 1)])
                await appended(journal, [entry(2 * life + 2)])
        async with kind.life() as journal:
            assert by_name(await journal.recover()) == {"s": [1, 2, 3, 4, 5, 6, 7, 8]}
            await appended(journal, [entry(9, is_end=True)])
            assert numbers(await journal.find("acme", "s")) == list(range(1, 10))

    run(story)


def test_an_ended_stream_is_found_in_its_window_and_then_has_expired(kind: Kind) -> None:
    async def story() -> None:
        async with kind.life() as journal:
            await appended(journal, [*whole("ended"), entry(1, "open")])
        async with kind.life() as journal:
            await journal.recover()
            assert numbers(await journal.find("acme", "ended")) == [1, 2, 3]
            await appended(journal, [entry(2, "open")])
            await kind.pass_window()
            assert await journal.find("acme", "ended") == Expired()
            assert await journal.find("rival", "ended") is None
            assert numbers(await journal.find("acme", "open")) == [1, 2]

    run(story)


def test_a_claim_needs_the_epoch_that_the_stream_has(kind: Kind) -> None:
    async def story() -> None:
        async with kind.life() as journal:
            await journal.recover()
            await appended(journal, [entry(1)])
        async with kind.life() as journal:
            [kept] = await journal.recover()
            assert not await journal.claim("acme", "s", kept.epoch + 1)
            assert await journal.claim("acme", "s", kept.epoch)
            assert not await journal.claim("rival", "s", kept.epoch)
            await appended(journal, [entry(2)])

    run(story)


def test_records_without_a_birth_before_them_are_not_kept(kind: Kind) -> None:
    async def story() -> None:
        async with kind.life() as journal:
            await appended(journal, [entry(2, "orphan"), entry(1)])
            assert await journal.find("acme", "orphan") is None
            assert numbers(await journal.find("acme", "s")) == [1]

    run(story)


def test_any_text_is_kept_even_what_utf_8_cannot_hold(kind: Kind) -> None:
    async def story() -> None:
        async with kind.life() as journal:
            record = said(1, "漢\ud800\0é")
            await appended(journal, [Entry("té\udc80", "\0s", record, birth())])
            found = await journal.find("té\udc80", "\0s")
            assert isinstance(found, Kept) and found.records == [record]

    run(story)


def test_a_closed_journal_still_answers(kind: Kind) -> None:
    async def story() -> None:
        async with kind.life() as journal:
            await appended(journal, [entry(1)])
            await journal.close()
            await appended(journal, [entry(2)])
        async with kind.life() as journal:
            assert by_name(await journal.recover()) == {"s": [1]}

    run(story)


def test_the_journal_in_memory_keeps_nothing_and_says_yes_to_everything() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        assert await appended(journal, whole()) == NOBODY
        assert (await journal.recover(), await journal.find("acme", "s"), journal.is_keeping) == ([], None, True)
        assert not await journal.claim("acme", "s", 0)
        await journal.close()

    run(story)
