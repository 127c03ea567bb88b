"""What goes wrong around the journal in Redis: servers that forget, keys of others, gateways that stand still. A stream
that is kept has no gap, and has one owner."""

import asyncio
import time
from typing import Any

import pytest
import redis
from redis.asyncio import Redis

from headrace.core.errors import Unreachable
from headrace.streams.ended_streams import EndedStreams
from headrace.streams.journal import NOBODY, Call, Entry, Expired, Kept, Name
from headrace.streams.redis_scripts import CLAIM
from tests.unit.streams.journals import appended, by_name, entry, numbers, said, whole
from tests.unit.streams.test_redis_journal import S, address, expire_lease, folder, gateway, run, server, until

__all__ = ["address", "folder", "server"]
pytestmark = pytest.mark.unit


async def keys_of(address: str, kind: str) -> list[Any]:
    async with Redis.from_url(address) as client:
        return sorted(await client.keys(f"headrace:{kind}:*"))


def test_a_server_that_forgot_the_last_second_leaves_no_gap(address: str) -> None:
    """As after a failover to a replica that lagged."""

    async def story() -> None:
        async with gateway(address, "a") as a, Redis.from_url(address) as client:
            await appended(a, [entry(1)])
            await appended(a, [entry(number) for number in range(2, 6)])
            [records] = await keys_of(address, "r")
            await client.xdel(records, "4-0", "5-0")
            assert await appended(a, [entry(6), *whole("other")]) == NOBODY
            assert await a.find(*S) == Expired()
            assert numbers(await a.find("acme", "other")) == [1, 2, 3]
            assert await appended(a, [entry(7, is_end=True)]) == NOBODY

    run(story)


def test_records_that_were_evicted_are_not_taken_for_the_whole(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a") as a, Redis.from_url(address) as client:
            await appended(a, [entry(1), entry(2)])
            await client.delete(*await keys_of(address, "r"))
            await appended(a, [entry(3, is_end=True)])
            assert await a.find(*S) == Expired()

    run(story)


def test_a_server_that_is_full_holds_nobody_up_and_has_it_all_when_there_is_room(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a") as a, Redis.from_url(address) as client:
            await appended(a, [entry(1)])
            await client.config_set("maxmemory", 1)
            try:
                for number in range(2, 6):
                    assert await appended(a, [entry(number)]) == NOBODY
                assert not a.is_keeping
            finally:
                await client.config_set("maxmemory", 0)
            await until(lambda: a.is_keeping)
            await appended(a, [entry(6, is_end=True)])
            assert numbers(await a.find(*S)) == [1, 2, 3, 4, 5, 6]

    run(story)


def test_an_append_that_was_given_up_leaves_no_gap_behind_it(address: str) -> None:
    """What waits behind it was packed before that was known."""

    async def story() -> None:
        async with gateway(address, "a") as a, Redis.from_url(address) as client:
            await appended(a, [entry(1), entry(1, "t")])
            # Redis is not as the script wants it, for a while.
            await client.rename("headrace:g", "headrace:elsewhere")
            await client.set("headrace:g", "not a set")
            a.append([entry(2), entry(1, "new")], lambda lost: None)
            a.append([entry(3), entry(2, "t")], lambda lost: None)
            await until(lambda: bool(a.is_keeping and not a._line._flying and not a._line._unsent))
            assert numbers(await a.find(*S)) == [1, 2, 3] and await a.find("acme", "new") in (None, Expired())

    run(story)


def test_a_key_of_somebody_else_costs_one_stream_and_not_the_others(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a", renew_s=1e6) as a, gateway(address, "b") as b:
            await appended(a, [entry(1)])
            await appended(a, [entry(1, "t")])
            async with Redis.from_url(address) as client:
                [first, *_] = [key for key in await keys_of(address, "m") if key.endswith(_hex("s"))]
                await client.set(first, "not a hash")
            assert await appended(a, [entry(2), entry(2, "t")]) == NOBODY
            assert a.is_keeping and numbers(await a.find("acme", "t")) == [1, 2]
            assert await b.find(*S) in (None, Expired())
            await expire_lease(address, "a")
            assert by_name(await b.recover()) == {"t": [1, 2]}
            assert await b.recover() == []

    run(story)


def _hex(stream: str) -> bytes:
    from headrace.streams.redis_sealed import key_of

    return key_of(("acme", stream))[0].encode()


def test_a_birth_that_is_sent_again_after_the_stream_was_taken_is_refused(address: str) -> None:
    """Its answer was lost, and meanwhile another gateway took it: the first must not believe that it has it."""

    async def story() -> None:
        async with gateway(address, "a", renew_s=1e6) as a, gateway(address, "b") as b:
            sent: list[Any] = []
            send = a._line.send

            def noted(tag: Any, command: Any) -> None:
                sent.append(command)
                send(tag, command)

            a._line.send = noted  # type: ignore[method-assign]
            await appended(a, [entry(1)])
            await expire_lease(address, "a")
            assert await b.claim(*S, 1)
            async with Redis.from_url(address) as client:
                assert await client.evalsha(*sent[0][1:]) == [[1], []]

    run(story)


def test_who_was_not_asked_for_a_while_is_told_that_its_stream_was_taken_with_the_next(address: str) -> None:
    """Redis did not answer, so that what was appended was told at once; it was refused later."""

    async def story() -> None:
        async with gateway(address, "a", renew_s=1e6, reply_s=0.3) as a, gateway(address, "b") as b:
            await appended(a, [entry(1), entry(1, "t")])
            await until(lambda: not a._line._flying and not a._line._unsent)
            await expire_lease(address, "a")
            assert await b.claim(*S, 1)
            async with Redis.from_url(address) as client:
                await client.client_pause(1500)
                assert await appended(a, [entry(2)]) == NOBODY
            await until(lambda: a.is_keeping)
            assert await appended(a, [entry(2, "t")]) == NOBODY
            assert await appended(a, [entry(3, "t"), entry(3)]) == {S}
            assert numbers(await b.find("acme", "t")) == [1, 2, 3] and numbers(await b.find(*S)) == [1]

    run(story)


def test_that_a_stream_was_taken_is_not_kept_for_who_has_written_its_end(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a", renew_s=1e6, reply_s=0.3) as a, gateway(address, "b") as b:
            await appended(a, [entry(1)])
            await until(lambda: not a._line._flying and not a._line._unsent)
            await expire_lease(address, "a")
            assert await b.claim(*S, 1)
            async with Redis.from_url(address) as client:
                await client.client_pause(1500)
                assert await appended(a, [entry(2), entry(3, is_end=True)]) == NOBODY
            await until(lambda: a.is_keeping)
            # The id was given away again: this one was never taken.
            assert await appended(a, [entry(1)]) == NOBODY

    run(story)


def test_a_gateway_that_stood_still_says_nothing_of_what_was_taken_meanwhile(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a", renew_s=1e6, reply_s=0.05) as a:
            await appended(a, [entry(1)])
            await until(lambda: not a._line._flying and not a._line._unsent)
            told: dict[int, frozenset[Name]] = {}
            a.append([entry(2)], lambda lost: told.update({2: lost}))
            while a._line._unsent:
                await asyncio.sleep(0)
            # Here the process stands still; another gateway finds its lease gone.
            with redis.Redis.from_url(address) as other:
                other.delete("headrace:l:a")
                other.set("headrace:l:b", "0b")
                assert other.eval(CLAIM, 0, "headrace:", "b:0b", _hex("s").decode(), "", "") == 2
            time.sleep(0.2)
            a.append([entry(3)], lambda lost: told.update({3: lost}))
            await until(lambda: len(told) == 2)
            assert told[3] == {S} and a.is_keeping

    run(story)


def test_what_was_claimed_and_could_not_be_read_is_taken_up_with_the_next_look(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a", renew_s=1e6) as a, gateway(address, "b") as b, gateway(address, "c") as c:
            await appended(a, [entry(1), entry(1, "t")])
            await expire_lease(address, "a")
            read = b._read

            async def fails(keys: Any) -> Any:
                raise redis.ConnectionError("gone")

            b._read = fails  # type: ignore[method-assign]
            with pytest.raises(Unreachable):
                await b.recover()
            assert await c.recover() == []  # they are b's
            b._read = read  # type: ignore[method-assign]
            assert numbers(await b.find(*S)) == [1]  # by somebody who only looks
            assert by_name(await b.recover()) == {"s": [1], "t": [1]}
            assert await b.recover() == []
            assert await appended(b, [Entry("acme", "s", said(2))]) == NOBODY

    run(story)


def test_what_was_claimed_for_a_client_and_could_not_be_read_is_not_left_without_an_owner(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a", renew_s=1e6) as a, gateway(address, "b") as b:
            await appended(a, [entry(1), entry(1, "t")])
            await expire_lease(address, "a")
            assert await b.claim(*S, 1) and await b.claim("acme", "t", 1)
            assert numbers(await b.find("acme", "t")) == [1]  # this one was read
            assert by_name(await b.recover()) == {"s": [1]}

    run(story)


def test_what_is_not_kept_to_its_end_is_not_there_to_be_waited_for(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a", max_waiting_bytes=2000, renew_s=0.01) as a, gateway(address, "b") as b:
            await appended(a, [entry(1), entry(1, "t")])
            for number in range(2, 40):
                a.append([entry(number)], lambda lost: None)
            await until(lambda: a.is_keeping)
            async with asyncio.timeout(60):
                while await b.knows(*S):
                    await asyncio.sleep(0.01)
            assert await b.find(*S) == Expired() and [record async for record in b.tail(*S, 1)] == []
            assert await b.call([Call(*S), Call("acme", "t")]) == [False, True]
            await appended(a, [entry(2, "t", is_end=True)])
            assert numbers(await b.find("acme", "t")) == [1, 2]

    run(story)


def test_a_reader_of_what_it_cannot_open_does_not_ask_for_ever(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a") as a, gateway(address, "b", b"another secret, as long as it must be") as b:
            await appended(a, [entry(1), entry(2)])
            async with asyncio.timeout(60):
                assert [record async for record in b.tail(*S, 0)] == []

    run(story)


def test_who_fails_to_be_told_keeps_nobody_else_waiting(address: str, caplog: pytest.LogCaptureFixture) -> None:
    def fails(lost: frozenset[Name]) -> None:
        raise ZeroDivisionError

    async def story() -> None:
        async with gateway(address, "a") as a:
            a.append([entry(1)], fails)
            assert await appended(a, [entry(1, "t")]) == NOBODY
            assert a.is_keeping and numbers(await a.find(*S)) == [1]
        assert "ZeroDivisionError" in caplog.text

    run(story)


def test_what_nobody_foresaw_does_not_stop_the_line(address: str, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with gateway(address, "a") as a:
            await appended(a, [entry(1)])
            converse, broken = a._line._converse, iter([ZeroDivisionError()])

            async def once() -> None:
                for error in broken:
                    raise error
                await converse()

            a._line._converse = once  # type: ignore[method-assign]
            async with Redis.from_url(address) as client:
                await client.client_kill_filter(_type="normal", skipme=True)
            await appended(a, [entry(2)])
            await until(lambda: a.is_keeping and "ZeroDivisionError" in caplog.text)
            assert numbers(await a.find(*S)) == [1, 2]

    run(story)


def test_all_that_was_said_to_a_gateway_is_heard_however_much(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a") as a, gateway(address, "b") as b:
            await appended(a, [entry(1)])
            for _ in range(3):
                await b.call([Call(*S)] * 500)
            await b.call([Call(*S, is_cancel=True)])
            heard = await a.calls()
            assert len(heard) == 1501 and heard[-1].is_cancel

    run(story)


def test_of_what_ended_only_so_much_is_kept_and_the_oldest_goes(address: str) -> None:
    async def story() -> None:
        async with gateway(address, "a", max_bytes=2000, renew_s=0.01) as a:
            await appended(a, [entry(1, "open")])
            for number in range(10):
                await appended(a, whole(f"s{number}"))
            async with asyncio.timeout(60):
                while await a.knows("acme", "s0"):
                    await asyncio.sleep(0.01)
            found = [await a.find("acme", f"s{number}") for number in range(10)]
            kept = [isinstance(each, Kept) for each in found]
            assert kept == sorted(kept) and 0 < sum(kept) < 10 and found[0] == Expired()
            assert numbers(await a.find("acme", "open")) == [1]

    run(story)


def test_what_is_gone_by_itself_makes_room() -> None:
    ended = EndedStreams(100, 10.0)
    assert ended.add("a", 60, 0.0) == [] and ended.add("b", 40, 5.0) == []
    assert ended.add("c", 60, 10.0) == [] and len(ended) == 2
    assert ended.add("d", 1, 10.0) == ["b"] and ended.add("e", 1000, 11.0) == ["c", "d", "e"]


def test_wrong_clocks_neither_end_a_lease_nor_keep_a_stream(address: str) -> None:
    async def story() -> None:
        async with (
            gateway(address, "a", wall_s=lambda: 0.0, window_s=100) as a,
            gateway(address, "b", wall_s=lambda: 4e9, window_s=100) as b,
            Redis.from_url(address) as client,
        ):
            await appended(a, [entry(1), *whole("over")])
            assert await b.recover() == [] and not await b.claim(*S, 1)
            assert numbers(await b.find("acme", "over")) == [1, 2, 3]
            lives = [await client.ttl(key) for key in await keys_of(address, "m")]
            assert sorted(lives) == [100, 3600]

    run(story)
