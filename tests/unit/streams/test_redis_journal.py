"""The journal in Redis between several gateways: who owns a stream, who may take it, and what a lost server costs."""

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from headrace.core.errors import Unreachable
from headrace.streams.journal import NOBODY, Call, Entry, Expired, Kept
from headrace.streams.record import Record
from headrace.streams.redis_journal import RedisJournal
from tests.services import redis_server
from tests.unit.streams.journals import SECRET, appended, birth, by_name, entry, numbers, said, whole

pytestmark = pytest.mark.unit

S = ("acme", "s")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as address:
        yield address


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def address(server: str) -> str:
    async def empty() -> None:
        async with Redis.from_url(server) as client:
            await client.flushall()

    asyncio.run(empty())
    return server


@asynccontextmanager
async def gateway(address: str, name: str, secret: bytes = SECRET, **settings: Any) -> AsyncIterator[RedisJournal]:
    async with Redis.from_url(address) as client:
        journal = RedisJournal(client, secret, name, **settings)
        yield journal
        await journal.close()


async def expire_lease(address: str, name: str) -> None:
    """As Redis would, five seconds after that gateway was last heard of."""
    async with Redis.from_url(address) as client:
        assert await client.delete(f"headrace:l:{name}") == 1


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story())


def test_a_living_owner_keeps_its_streams_and_a_dead_ones_are_taken_once(address: str) -> None:
    async def story() -> None:
        # One that renews its lease so seldom that it will not while this test runs.
        async with (
            gateway(address, "a", renew_s=1e6) as a,
            gateway(address, "b") as b,
            gateway(address, "c") as c,
        ):
            await appended(a, [entry(1), entry(1, "t"), *whole("ended")])
            assert await b.recover() == []
            assert not await b.claim(*S, 1)
            await expire_lease(address, "a")
            taken = await asyncio.gather(b.recover(), c.recover())
            names = [name for kept in taken for name in by_name(kept)]
            assert sorted(names) == ["s", "t"]
            assert {one.epoch for kept in taken for one in kept} == {2}

    run(story)


def test_the_owner_before_is_refused_and_told_which_are_not_its_any_more(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a", renew_s=1e6) as a, gateway(address, "b") as b:
            await appended(a, [entry(1), entry(1, "t"), *[entry(1, f"u{number}") for number in range(3)]])
            await expire_lease(address, "a")
            assert await b.claim(*S, 1)
            assert await appended(a, [entry(2, "u0"), entry(2), entry(2, "t")]) == {S}
            assert await appended(a, [entry(3), entry(3, "t")]) == NOBODY  # it was told; nothing of it is sent
            assert await appended(b, [Entry("acme", "s", said(2, "b's"))]) == NOBODY
            found = await a.find(*S)
            assert isinstance(found, Kept)
            assert (found.epoch, found.records) == (2, [said(1), said(2, "b's")])
            assert numbers(await b.find("acme", "t")) == [1, 2, 3]

    run(story)


def test_of_many_that_claim_one_stream_one_gets_it(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a", renew_s=1e6) as a, gateway(address, "b") as b, gateway(address, "c") as c:
            await appended(a, [entry(1)])
            await expire_lease(address, "a")
            won = await asyncio.gather(*[journal.claim(*S, 1) for journal in [b, c]])
            assert sorted(won) == [False, True]
            assert not await c.claim("acme", "unknown", 1)

    run(story)


def test_a_new_life_of_a_gateway_takes_over_at_once_and_one_that_leaves_lets_go(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a") as first:
            await appended(first, [entry(1)])
            async with gateway(address, "a") as second:
                assert by_name(await second.recover()) == {"s": [1]}
                assert await appended(first, [entry(2)]) == {S}
        async with gateway(address, "b") as other:
            [kept] = await other.recover()
            assert (numbers(kept), kept.epoch) == ([1], 3)

    run(story)


def test_the_lease_is_renewed_while_the_gateway_lives(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a", renew_s=0.01) as a, Redis.from_url(address) as client:
            await appended(a, [entry(1)])
            assert 0 < await client.pttl("headrace:l:a") <= 5000
            await client.delete("headrace:l:a")
            async with asyncio.timeout(60):
                while not await client.exists("headrace:l:a"):
                    await asyncio.sleep(0.01)
        async with Redis.from_url(address) as client:
            assert not await client.exists("headrace:l:a")

    run(story)


def test_everything_has_a_time_to_live_and_leaves_a_mark(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a", window_s=100) as a, Redis.from_url(address) as client:
            await appended(a, [entry(1, "open")])
            lives = {key[:11]: await client.ttl(key) for key in await client.keys("headrace:[mrt]:*")}
            assert lives == {b"headrace:m:": 3600, b"headrace:r:": 3600, b"headrace:t:": 7200}
            await appended(a, [entry(2, "open", is_end=True)])
            lives = {key[:11]: await client.ttl(key) for key in await client.keys("headrace:[mrt]:*")}
            assert lives == {b"headrace:m:": 100, b"headrace:r:": 100, b"headrace:t:": 3700}
            assert await client.keys("headrace:o:*") == []
            for key in await client.keys("headrace:[mr]:*"):
                await client.delete(key)
            assert await a.find("acme", "open") == Expired()

    run(story)


def test_nothing_that_was_said_nor_who_said_it_can_be_read_there(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a") as a, Redis.from_url(address) as client:
            await appended(a, [Entry("acme", "my-id", said(1, "a very private word"), birth("my-id"))])
            keys: Any = await client.keys("*")
            stored = b"".join(keys) + b"".join([await client.dump(key) or b"" for key in keys])
            assert len(stored) > 300
            assert not any(word in stored for word in (b"private", b"acme", b"my-id"))

    run(story)


def test_another_secret_or_a_changed_record_is_nothing_and_said(address: str, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with gateway(address, "a") as a, Redis.from_url(address) as client:
            await appended(a, whole() + whole("t"))
            async with gateway(address, "b", SECRET[::-1]) as b:
                assert await b.find(*S) is None
            records: Any = await client.keys("headrace:r:*")
            one, other = records
            await client.copy(one, other, replace=True)  # another stream's records under this one's name
            found = [await a.find("acme", stream) for stream in "st"]
            assert sorted(isinstance(kept, Kept) for kept in found) == [False, True]
        assert "another key" in caplog.text

    run(story)


def test_a_reader_at_another_gateway_follows_to_the_ending(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a") as a, gateway(address, "b") as b:
            await appended(a, [entry(1), entry(2)])
            found: list[Record] = []

            async def follow() -> None:
                async for record in b.tail("acme", "s", 1):
                    found.append(record)

            following = asyncio.create_task(follow())
            await until(lambda: len(found) == 1)
            await appended(a, [entry(3), entry(4, is_end=True)])
            await following
            assert [record.number for record in found] == [2, 3, 4] and found[-1].ending is not None
            assert [record async for record in b.tail("acme", "unknown", 0)] == []

    run(story)


def test_while_redis_is_gone_inference_goes_on_and_afterwards_the_journal_does(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        caplog.set_level(logging.INFO)
        with redis_server(folder) as address:
            journal = RedisJournal(Redis.from_url(address), SECRET, "a")
            await appended(journal, [entry(1, "before")])
        for number in range(2, 30):
            assert await appended(journal, [entry(number, "before")]) == NOBODY
        assert not journal.is_keeping
        with pytest.raises(Unreachable, match="does not answer"):
            await journal.find("acme", "before")
        await appended(journal, [entry(1, "during")])
        with redis_server(folder):
            await until(lambda: journal.is_keeping)
            await appended(journal, [entry(2, "during"), entry(30, "before"), *whole("after")])
            assert numbers(await journal.find("acme", "during")) == [1, 2]  # it had waited
            assert numbers(await journal.find("acme", "after")) == [1, 2, 3]
            assert await journal.find("acme", "before") is None  # that server forgot everything
            await journal.close()
        ours = [record.levelname for record in caplog.records if record.name == "headrace.streams"]
        assert ours == ["ERROR", "INFO"]
        await journal._client.aclose()

    run(story)


def test_a_connection_that_breaks_loses_nothing_and_repeats_nothing(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a") as a, Redis.from_url(address) as client:
            for number in range(1, 301):
                a.append([entry(number)], lambda refused: None)
                if number % 50 == 0:
                    await client.client_kill_filter(_type="normal", skipme=True)
                    await until(lambda: a.is_keeping)
            await until(lambda: a.is_keeping)
            await appended(a, [entry(301, is_end=True)])
            await until(lambda: a.is_keeping)  # a break may be noticed with the last append
            assert numbers(await a.find(*S)) == list(range(1, 302))

    run(story)


def test_a_server_that_hangs_holds_nobody_up(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a", reply_s=0.05) as a, Redis.from_url(address) as client:
            await appended(a, [entry(1)])
            await client.client_pause(400)
            assert await appended(a, [entry(2)]) == NOBODY
            assert not a.is_keeping
            await until(lambda: a.is_keeping)
            await appended(a, [entry(3)])
            assert numbers(await a.find(*S)) == [1, 2, 3]

    run(story)


def test_what_waits_for_redis_is_bounded_and_what_was_dropped_leaves_no_gap(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a", max_waiting_bytes=2000) as a:
            await appended(a, [entry(1), entry(1, "t")])
            answers: list[int] = []
            for number in range(2, 40):
                a.append([entry(number)], lambda refused: answers.append(0))
            a.append([entry(2, "t")], lambda refused: answers.append(0))
            assert len(answers) == 39 and not a.is_keeping  # nothing waits for what does not fit
            await until(lambda: a.is_keeping)
            await appended(a, [entry(40), *whole("new")])
            found = await a.find(*S)
            kept = [] if found == Expired() else numbers(found)  # it is forgotten soon
            assert kept == list(range(1, len(kept) + 1)) and len(kept) < 39
            assert numbers(await a.find("acme", "new")) == [1, 2, 3]

    run(story)


def test_scripts_that_were_flushed_are_loaded_again(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a") as a, Redis.from_url(address) as client:
            await appended(a, [entry(1)])
            await client.script_flush()
            await appended(a, [entry(2)])
            await until(lambda: a.is_keeping)
            await appended(a, [entry(3)])
            assert numbers(await a.find(*S)) == [1, 2, 3]

    run(story)


def test_an_id_that_another_living_gateway_uses_is_left_to_it(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a") as a, gateway(address, "b") as b:
            await appended(a, [entry(1)])
            assert await appended(b, [entry(1), entry(1, "t")]) == NOBODY
            assert await appended(b, [entry(2), entry(2, "t")]) == NOBODY
            await appended(a, [Entry("acme", "s", said(2, "a's"))])
            found = await b.find(*S)
            assert isinstance(found, Kept) and found.records[1] == said(2, "a's")
            assert numbers(await a.find("acme", "t")) == [1, 2]

    run(story)


def test_what_one_gateway_says_of_a_stream_is_heard_by_its_owner_alone(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a") as a, gateway(address, "b") as b:
            await appended(a, [entry(1)])
            assert await b.call([Call(*S), Call(*S, is_cancel=True), Call("acme", "none")]) == [True, True, False]
            assert await b.calls() == []
            assert await a.calls() == [Call(*S), Call(*S, is_cancel=True)]
            assert await a.calls() == []

    asyncio.run(story())


def test_of_a_stream_that_ended_or_whose_owner_is_gone_nothing_can_be_said(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a") as a, gateway(address, "b") as b:
            for one in [*whole("over"), entry(1)]:
                await appended(a, [one])
            assert await b.call([Call("acme", "over"), Call(*S)]) == [False, True]
            await expire_lease(address, "a")
            assert await b.call([Call(*S)]) == [False]

    asyncio.run(story())


def test_a_call_that_was_not_written_by_a_gateway_of_this_server_is_not_heard(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a") as a, gateway(address, "b", b"another secret, as long as it must be") as b:
            await appended(a, [entry(1)])
            assert await b.call([Call(*S, is_cancel=True)]) == [True]
            assert await a.calls() == []

    asyncio.run(story())


def test_a_stream_is_known_to_all_gateways(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a") as a, gateway(address, "b") as b:
            await appended(a, [entry(1)])
            assert [await b.knows(*S), await b.knows("other", "s"), await b.knows("acme", "t")] == [True, False, False]

    asyncio.run(story())
