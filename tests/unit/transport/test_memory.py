import asyncio
from typing import Any

from headrace.core.ports import Link
from headrace.transport.memory import MemoryNetwork
from headrace.transport.wire import Limits
from tests.unit.transport.rig import Note, Party, run


def test_an_end_that_overflows_while_the_other_receives_holds_nothing() -> None:
    async def story() -> None:
        party = Party(MemoryNetwork(Limits(max_pending_bytes=1000)))
        senders: list[Link] = []

        def overflow(link: Link, message: Any) -> None:
            senders[0].send(Note(9, bytes(990)))

        await party.open("here", overflow)
        here = await party.dial()
        senders.append(here.link)
        for number in range(3):
            here.link.send(Note(number))
        assert "1000 bytes wait" in await here.end()
        await party.guests[0].end()
        assert here.link.pending_bytes == 0 and party.guests[0].messages == [Note(0)]
        await party.close()

    run("asyncio", story())


def test_two_ends_that_answer_each_other_do_not_hold_up_the_loop() -> None:
    async def story() -> None:
        party = Party(MemoryNetwork())
        await party.open("here", lambda link, message: link.send(message))
        here = await party.dial(lambda link, message: link.send(message))
        here.link.send(Note(1))
        for _ in range(100):
            await asyncio.sleep(0)
        assert 20 < len(here.messages) <= 100
        here.link.close()
        await party.close()

    run("asyncio", story())
