"""Whatever a client of a socket says or does not say: its connection ends, the others do not notice."""

import asyncio
import pickle
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from headrace.transport.unix import UnixNetwork
from headrace.transport.wire import MAGIC, PREAMBLE, Limits
from tests.unit.transport.raw import RawClient
from tests.unit.transport.rig import LOOPS, Foreign, Note, Party, echo, is_sound, run

QUICK = Limits(greeting_s=0.3, message_s=0.3, linger_s=0.3)
Attack = Callable[[Party, RawClient], Awaitable[None]]
Siege = Callable[..., None]


@pytest.fixture(params=LOOPS)
def siege(request: pytest.FixtureRequest, tmp_path: Path) -> Siege:
    """Plays an attack beside a good link that must not notice."""

    def play(attack: Attack, limits: Limits | None = None) -> None:
        async def whole() -> None:
            party = Party(UnixNetwork(limits))
            address = await party.open(str(tmp_path / "s"), echo)
            good = await party.dial()
            async with RawClient(address) as client:
                await attack(party, client)
                assert await is_sound(good)
            assert await is_sound(await party.dial())
            await party.close()

        run(request.param, whole())

    tmp_path.chmod(0o700)
    return play


def framed(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


def strangers() -> dict[str, bytes]:
    return {
        "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "pickle": pickle.dumps({"a": list(range(1000))}),
        "garbage": random.Random(1).randbytes(100_000),
        "zeros": bytes(100_000),
        "message without preamble": framed(Note(1)),
        "another version": MAGIC + b"\x07" + framed(Note(1)),
    }


@pytest.mark.parametrize("data", strangers().values(), ids=strangers())
def test_a_stranger_is_turned_away_and_meets_no_receiver(siege: Siege, data: bytes) -> None:
    async def attack(party: Party, client: RawClient) -> None:
        await client.say(data)
        assert await client.hear_all() in (PREAMBLE, b"")
        assert len(party.guests) == 1

    siege(attack)


def insiders() -> dict[str, tuple[bytes, str]]:
    return {
        "4 GiB": (b"\xff\xff\xff\xff", "4294967295 bytes is longer"),
        "65 MiB": ((65 << 20).to_bytes(4, "big"), "longer than 67108864"),
        "pickle": (framed(Note(5)) + pickle.dumps(list(range(9)), protocol=4), "longer than"),
        "pickle in a message": ((40).to_bytes(4, "big") + pickle.dumps(["x" * 100])[:40], "does not understand"),
        "other union": (framed(Foreign(1)), "does not understand"),
        "empty message": (bytes(4), "does not understand"),
        "trailing bytes": (
            (len(framed(Note(1))) - 3).to_bytes(4, "big") + framed(Note(1))[4:] + b"x",
            "not understand",
        ),
    }


@pytest.mark.parametrize(("data", "why"), insiders().values(), ids=insiders())
def test_one_who_knows_the_preamble_gets_no_further(siege: Siege, data: bytes, why: str) -> None:
    async def attack(party: Party, client: RawClient) -> None:
        await client.say(PREAMBLE + data)
        victim = await party.guest(1)
        assert why in await victim.end()
        await client.hear_all()
        assert len(victim.reasons) == 1

    siege(attack)


def test_random_bytes_after_the_preamble(siege: Siege) -> None:
    async def attack(party: Party, client: RawClient) -> None:
        luck = random.Random(11)
        assert party.listener is not None
        for count in range(1, 40):
            async with RawClient(party.listener.address) as other:
                await other.say(PREAMBLE + bytes([0, 0, 0]) + luck.randbytes(luck.randrange(1, 3000)))
                other.leave()
                victim = await party.guest(count)
                assert await victim.end() and not victim.messages

    siege(attack)


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 20])
def test_a_message_cut_short(siege: Siege, cut: int) -> None:
    async def attack(party: Party, client: RawClient) -> None:
        await client.say(PREAMBLE + framed(Note(1)) + framed(Note(2, b"x" * 50))[:cut])
        client.leave()
        victim = await party.guest(1)
        assert await victim.end() == "the other end left in the middle of a message"
        assert victim.messages == [Note(1)] and len(victim.reasons) == 1

    siege(attack)


def test_silence(siege: Siege) -> None:
    async def attack(party: Party, client: RawClient) -> None:
        assert await client.hear_all() == PREAMBLE
        assert len(party.guests) == 1

    siege(attack, QUICK)


async def drip(client: RawClient, data: bytes) -> bool:
    """Whether every byte of it was taken, one every 90 ms."""
    for byte in data:
        if not await client.say(bytes([byte])):
            return False
        await asyncio.sleep(0.09)
    return True


def test_a_preamble_that_drips(siege: Siege) -> None:
    async def attack(party: Party, client: RawClient) -> None:
        assert not await drip(client, PREAMBLE + framed(Note(1)))
        assert len(party.guests) == 1

    siege(attack, QUICK)


def test_a_message_that_drips(siege: Siege) -> None:
    async def attack(party: Party, client: RawClient) -> None:
        await client.say(PREAMBLE + framed(Note(1)))
        assert not await drip(client, framed(Note(2, b"x" * 50)))
        victim = await party.guest(1)
        assert "not complete within 0.3 s" in await victim.end() and victim.messages == [Note(1)]

    siege(attack, QUICK)


def test_whole_messages_may_take_their_time(siege: Siege) -> None:
    notes = [Note(number) for number in range(12)]
    data = b"".join(map(framed, notes))
    step = len(data) // len(notes)

    async def attack(party: Party, client: RawClient) -> None:
        await client.say(PREAMBLE + data[:7])
        for at in range(7, len(data), step):  # there is always a message half received, and never the same one
            await client.say(data[at : at + step])
            await asyncio.sleep(0.2)
        assert await (await party.guest(1)).heard(12) == notes

    siege(attack, Limits(message_s=2.0))


def test_one_who_never_reads(siege: Siege) -> None:
    async def attack(party: Party, client: RawClient) -> None:
        await client.say(PREAMBLE)
        victim = await party.guest(1)
        most = 0
        while not victim.reasons:
            victim.link.send(Note(1, bytes(10_000)))
            most = max(most, victim.link.pending_bytes)
            await asyncio.sleep(0)
        assert most <= 1 << 20 and victim.link.pending_bytes == 0
        assert "1048576 bytes wait" in victim.reasons[0] and len(victim.reasons) == 1

    siege(attack, Limits(max_pending_bytes=1 << 20))


def test_half_a_close_with_much_unread_is_not_waited_for(siege: Siege) -> None:
    async def attack(party: Party, client: RawClient) -> None:
        await client.say(PREAMBLE)
        victim = await party.guest(1)
        victim.link.send(Note(1, bytes(8 << 20)))
        client.leave()
        assert await victim.end() == "the other end left"
        while victim.link.pending_bytes:
            await asyncio.sleep(0)
        assert len(await client.hear_all()) < 8 << 20

    siege(attack, QUICK)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_listener_that_closes_does_not_wait_for_one_who_never_reads(loop: str, tmp_path: Path) -> None:
    async def story() -> None:
        party = Party(UnixNetwork(QUICK))
        async with RawClient(await party.open(str(tmp_path / "s"))) as client:
            await client.say(PREAMBLE)
            victim = await party.guest(0)
            victim.link.send(Note(1, bytes(8 << 20)))
            await party.close()
            assert victim.reasons == ["closed by this end"]

    tmp_path.chmod(0o700)
    run(loop, story())
