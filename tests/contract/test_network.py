"""What every network promises, over unix sockets, mutual TLS and memory, on both loops."""

import asyncio
import gc
import random
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import InvalidInput, TooLarge, Unreachable
from headrace.core.ports import Link
from headrace.transport.wire import Limits
from tests.unit.transport.rig import LOOPS, Ear, Foreign, Known, Note, Order, Party, echo, is_sound, make_network, run

Story = Callable[[Party, str], Awaitable[None]]


class Stage:
    """Runs a story with a network of one kind on one loop. The story opens the party; its listener is closed after."""

    def __init__(self, kind: str, loop: str, folder: Path) -> None:
        self.kind = kind
        self._loop = loop
        self._folder = folder

    def play(self, story: Story, limits: Limits | None = None) -> None:
        async def whole() -> None:
            network, address = make_network(self.kind, self._folder, limits)
            party = Party(network)
            await story(party, address)
            await party.close()

        run(self._loop, whole())


@pytest.fixture(params=[(kind, loop) for kind in ("unix", "tls", "memory") for loop in LOOPS], ids="-".join)
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    kind, loop = request.param
    tmp_path.chmod(0o700)
    return Stage(kind, loop, tmp_path)


def test_messages_arrive_in_order_both_ways(stage: Stage) -> None:
    async def story(party: Party, address: str) -> None:
        await party.open(address)
        here, there = await party.pair()
        for number in range(100):
            here.link.send(Note(number))
            there.link.send(Order((number, -number)))
        assert await there.heard(100) == [Note(number) for number in range(100)]
        assert await here.heard(100) == [Order((number, -number)) for number in range(100)]

    stage.play(story)


def test_ten_thousand_messages_of_any_size_come_back_as_they_went(stage: Stage) -> None:
    luck = random.Random(7)
    sizes = [luck.choice((0, 1, 30, 200, 900, 4000)) for _ in range(9_990)] + [
        luck.randrange(1 << 21) for _ in range(10)
    ]
    luck.shuffle(sizes)
    notes = [Note(number, luck.randbytes(size)) for number, size in enumerate(sizes)]

    async def story(party: Party, address: str) -> None:
        await party.open(address, echo)
        here = await party.dial()
        for note in notes:
            here.link.send(note)
            if note.number % 50 == 0:
                await asyncio.sleep(0)
        assert await here.heard(len(notes)) == notes
        assert here.link.pending_bytes == 0

    stage.play(story)


def test_what_a_thread_posts_arrives_in_order_whatever_is_sent_meanwhile(stage: Stage) -> None:
    luck = random.Random(8)
    notes = [Note(number, luck.randbytes(luck.choice((0, 200, 4000, 1 << 18)))) for number in range(600)]

    async def story(party: Party, address: str) -> None:
        await party.open(address)
        here, there = await party.pair()

        def post() -> None:
            for note in notes:
                here.link.post(note)

        posting = asyncio.create_task(asyncio.to_thread(post))
        sent: list[Note] = []
        while not posting.done():
            sent.append(Note(1000 + len(sent)))
            here.link.send(sent[-1])
            await asyncio.sleep(0)
        heard = await there.heard(len(notes) + len(sent))
        assert [note for note in heard if note.number < 1000] == notes
        assert [note for note in heard if note.number >= 1000] == sent
        while here.link.pending_bytes:
            await asyncio.sleep(0)

    stage.play(story, Limits(max_pending_bytes=256 << 20))


def test_what_is_posted_beyond_the_bound_closes_the_link_and_is_dropped_after(stage: Stage) -> None:
    async def story(party: Party, address: str) -> None:
        await party.open(address)
        here, there = await party.pair()
        for _ in range(64):
            here.link.post(Note(1, bytes(1 << 16)))
        assert "wait" in await here.end()
        here.link.post(Note(2))
        with pytest.raises(TooLarge):
            (await party.dial()).link.post(Note(3, bytes(3 << 20)))
        await there.end()
        assert here.link.pending_bytes == 0 and Note(2) not in there.messages

    stage.play(story, Limits(max_pending_bytes=1 << 20, max_message_bytes=2 << 20))


@pytest.mark.parametrize("closer", [0, 1])
def test_a_close_from_either_side_is_heard_once_by_both(stage: Stage, closer: int) -> None:
    async def story(party: Party, address: str) -> None:
        await party.open(address)
        ends = await party.pair()
        ends[closer].link.close()
        ends[closer].link.close()
        assert not ends[closer].reasons  # never inside the call
        assert await ends[closer].end() == "closed by this end"
        assert await ends[1 - closer].end() == "the other end left"
        ends[closer].link.send(Note(1))
        ends[1 - closer].link.send(Note(2))
        ends[1 - closer].link.close()
        await party.close()
        assert [len(end.reasons) for end in ends] == [1, 1]
        assert not ends[0].messages and not ends[1].messages

    stage.play(story)


def test_who_listened_to_a_link_that_is_over_is_not_kept_for_the_garbage_collector(stage: Stage) -> None:
    async def story(party: Party, address: str) -> None:
        await party.open(address)
        here, there = await party.pair()
        over = weakref.ref(there)
        here.link.close()
        await there.end()
        party.guests.clear()
        del there
        while over() is not None:
            await asyncio.sleep(0.001)

    gc.disable()
    try:
        stage.play(story)
    finally:
        gc.enable()


def test_what_was_sent_before_a_close_arrives(stage: Stage) -> None:
    notes = [Note(number, bytes(5000)) for number in range(400)]

    async def story(party: Party, address: str) -> None:
        await party.open(address)
        here, there = await party.pair()
        for note in notes:
            here.link.send(note)
        here.link.close()
        await there.end()
        assert there.messages == notes

    stage.play(story)


def test_a_receiver_that_closes_while_it_receives_hears_no_more(stage: Stage) -> None:
    async def story(party: Party, address: str) -> None:
        await party.open(address, lambda link, _: link.close())
        here, there = await party.pair()
        for number in range(10):
            here.link.send(Note(number))
        await there.end()
        await here.end()
        assert there.messages == [Note(0)] and len(there.reasons) == 1

    stage.play(story)


def test_nothing_is_delivered_inside_a_send(stage: Stage) -> None:
    async def story(party: Party, address: str) -> None:
        await party.open(address)
        here, there = await party.pair()
        here.link.send(Note(1))
        assert not there.messages
        # The first of a turn may have been taken by the system already.
        here.link.send(Note(2))
        assert not there.messages and here.link.pending_bytes > 0
        assert await there.heard(2) == [Note(1), Note(2)]

    stage.play(story)


def test_to_dial_nobody_is_unreachable(stage: Stage) -> None:
    async def story(party: Party, address: str) -> None:
        await party.open(address)
        await party.close()
        with pytest.raises(Unreachable, match="nobody answers"):
            await party.dial()

    stage.play(story)


def test_an_address_is_taken_once_and_free_again_after_a_close(stage: Stage) -> None:
    async def story(party: Party, address: str) -> None:
        taken = await party.open(address, echo)
        with pytest.raises(InvalidInput, match=r"somebody listens|cannot listen"):
            await party.network.listen(taken, Ear, Known)
        assert await is_sound(await party.dial())
        await party.close()
        await party.open(taken, echo)
        assert await is_sound(await party.dial())

    stage.play(story)


def test_a_listener_that_closes_closes_its_links(stage: Stage) -> None:
    async def story(party: Party, address: str) -> None:
        await party.open(address)
        pairs = [await party.pair() for _ in range(3)]
        await party.close()
        await party.close()
        for here, there in pairs:
            assert there.reasons == ["closed by this end"]
            assert await here.end() == "the other end left"

    stage.play(story)


def test_links_are_independent(stage: Stage) -> None:
    async def story(party: Party, address: str) -> None:
        await party.open(address, echo)
        ears = [await party.dial() for _ in range(20)]
        for index, ear in enumerate(ears):
            for number in range(50):
                ear.link.send(Note(1000 * index + number))
        for ear in ears[::2]:
            ear.link.close()
        for index, ear in enumerate(ears):
            if index % 2:
                assert await ear.heard(50) == [Note(1000 * index + number) for number in range(50)]
            else:
                await ear.end()
        assert await is_sound(ears[1])

    stage.play(story)


def test_more_than_the_bound_closes_that_link_alone(stage: Stage) -> None:
    async def story(party: Party, address: str) -> None:
        await party.open(address, echo)
        good, (here, there) = await party.dial(), await party.pair()
        for _ in range(16):
            here.link.send(Note(1, bytes(1 << 16)))
        assert not here.link.is_open and good.link.is_open
        assert here.link.pending_bytes <= 1 << 20 and "wait" in await here.end()
        await there.end()
        here.link.send(Note(2))
        assert here.link.pending_bytes == 0
        assert len(here.reasons) == len(there.reasons) == 1
        assert await is_sound(good)

    stage.play(story, Limits(max_pending_bytes=1 << 20))


def test_pending_bytes_go_down_as_the_other_end_reads(stage: Stage) -> None:
    async def story(party: Party, address: str) -> None:
        await party.open(address)
        here, there = await party.pair()
        here.link.send(Note(0, bytes(4 << 20)))
        assert here.link.pending_bytes >= 4 << 20
        await there.heard(1)
        while here.link.pending_bytes:
            await asyncio.sleep(0)
        for number in range(10):  # ten times what the bound allows at once
            here.link.send(Note(number, bytes(4 << 20)))
            await there.heard(number + 2)
        assert not here.reasons

    stage.play(story, Limits(max_pending_bytes=5 << 20))


def test_a_message_beyond_the_bound_is_not_sent(stage: Stage) -> None:
    async def story(party: Party, address: str) -> None:
        await party.open(address, echo)
        here = await party.dial()
        here.link.send(Note(1))
        with pytest.raises(TooLarge):
            here.link.send(Note(2, bytes(1 << 16)))
        with pytest.raises(TypeError):
            here.link.send(object())
        here.link.send(Note(3))
        assert await here.heard(2) == [Note(1), Note(3)]

    stage.play(story, Limits(max_message_bytes=1 << 16))


@pytest.mark.parametrize("message", [Foreign(1), Order(("one",)), b"bytes", None], ids=["tag", "type", "bytes", "nil"])  # type: ignore[arg-type]
def test_a_message_of_another_union_closes_that_link_alone(stage: Stage, message: Any) -> None:
    async def story(party: Party, address: str) -> None:
        await party.open(address, echo)
        good, (here, there) = await party.dial(), await party.pair()
        here.link.send(Note(1))
        here.link.send(message)
        here.link.send(Note(2))
        assert "does not understand" in await there.end()
        await here.end()
        assert there.messages == [Note(1)] and len(there.reasons) == len(here.reasons) == 1
        assert await is_sound(good)

    stage.play(story)


def test_a_receiver_that_raises_closes_its_link_alone(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    def answer(link: Link, message: Any) -> None:
        if message.data:
            raise KeyError(message.data)
        link.send(message)

    async def story(party: Party, address: str) -> None:
        await party.open(address, answer)
        good, (here, there) = await party.dial(), await party.pair()
        here.link.send(Note(1, b"secret"))
        assert await there.end() == "the receiver failed on Note: KeyError"
        await here.end()
        assert await is_sound(good)

    stage.play(story)
    assert "KeyError" in caplog.text and "secret" not in caplog.text
    assert {record.name for record in caplog.records} == {"headrace.transport"}


def test_a_receiver_that_cannot_be_made_closes_its_link_alone(stage: Stage) -> None:
    def fail(link: Link) -> Ear:
        raise RuntimeError("no")

    async def story(party: Party, address: str) -> None:
        await party.open(address, echo)
        good = await party.dial()
        assert party.listener is not None
        with pytest.raises(Unreachable):
            await party.network.dial(party.listener.address, fail, Known)
        assert await (await party.guest(1)).end()
        assert await is_sound(good)

    stage.play(story)


def test_a_receiver_may_speak_or_close_while_it_is_made(stage: Stage) -> None:
    async def story(party: Party, address: str) -> None:
        ears: list[Ear] = []

        def greet(link: Link) -> Ear:
            link.send(Note(len(ears)))
            ears.append(Ear(link))
            if len(ears) == 2:
                link.close()
            return ears[-1]

        party.listener = await party.network.listen(address, greet, Known)
        assert await (await party.dial()).heard(1) == [Note(0)]
        second = await party.dial()
        assert await second.heard(1) == [Note(1)]
        await second.end()
        assert ears[1].reasons == ["closed by this end"] and not ears[0].reasons

    stage.play(story)


def test_links_beyond_the_bound_are_not_taken(stage: Stage) -> None:
    async def story(party: Party, address: str) -> None:
        await party.open(address, echo)
        first, second = await party.dial(), await party.dial()
        with pytest.raises(Unreachable):
            await party.dial()
        assert await is_sound(first)
        second.link.close()
        await party.guests[1].end()
        assert await is_sound(await party.dial())
        assert len(party.guests) == 3

    stage.play(story, Limits(max_links=2))
