"""A worker's connections: who hears what."""

import gc
import weakref
from typing import Any

from headrace.core.errors import TooLarge
from headrace.core.messages import PROTOCOL, Abort, Ack, Beat, Frame, Goodbye, Hello
from headrace.worker.inbox import Greeted, Inbox, Left, Order
from headrace.worker.lifecycle import Lifecycle
from headrace.worker.links import Links
from tests.builders import TestClock
from tests.unit.worker.rig import card

TOO_LARGE = 99


class Wire:
    """A link that only remembers."""

    peer = "a gateway"
    is_open = True
    pending_bytes = 0

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def post(self, message: Any) -> None:
        if isinstance(message, Frame) and message.step == TOO_LARGE:
            raise TooLarge("no link carries this")
        self.sent.append(message)

    def close(self) -> None:
        self.is_open = False


def test_every_gateway_hears_the_beat_and_one_of_the_service() -> None:
    lifecycle = Lifecycle(card())
    links = Links(lifecycle, Inbox(), TestClock())
    wires = [Wire(), Wire(), Wire()]
    for index, wire in enumerate(wires):
        links.accept(wire).received(Hello(PROTOCOL, f"g{index}"))
    links.send(lifecycle.beat(0.5, {"acme": 2.0}))
    beats = [wire.sent[-1] for wire in wires]
    assert all(isinstance(beat, Beat) and beat.step_age_s == 0.5 for beat in beats)
    assert [beat.service for beat in beats] == [{"acme": 2.0}, {}, {}]


def test_the_end_of_a_gateways_old_connection_is_heard_before_its_new_one() -> None:
    inbox = Inbox()
    links = Links(Lifecycle(card()), inbox, TestClock())
    old, new = links.accept(Wire()), links.accept(Wire())
    old.received(Hello(PROTOCOL, "g"))
    new.received(Hello(PROTOCOL, "g", attaches=True))
    old.received(Abort(1))
    old.closed("closed by this end")
    assert inbox.take() == [Greeted("g", False), Left(1, "g"), Greeted("g", True)]


def test_what_a_gateway_did_not_acknowledge_goes_with_it() -> None:
    links = Links(Lifecycle(card()), Inbox(), TestClock())
    gateway = links.accept(Wire())
    gateway.received(Hello(PROTOCOL, "g"))
    links.deliver([(gateway.number, Frame(0, 1))])
    over = weakref.ref(gateway.outbox)
    gateway.closed("the other end left")
    gc.disable()
    try:
        del gateway
        assert over() is None
    finally:
        gc.enable()


def test_after_a_goodbye_nothing_more_is_heard() -> None:
    inbox, wire = Inbox(), Wire()
    links = Links(Lifecycle(card()), inbox, TestClock())
    leaving, other = links.accept(wire), links.accept(Wire())
    for index, gateway in enumerate((leaving, other)):
        gateway.received(Hello(PROTOCOL, f"g{index}"))
    inbox.take()
    for message in (Goodbye(), Abort(1)):
        leaving.received(message)
    leaving.closed("the other end left")
    other.received(Abort(2))
    assert inbox.take() == [Left(1, "g0", for_good=True), Order(2, 0.0, Abort(2))]
    assert links.count == 1


def test_frames_are_numbered_and_leave_at_once_and_one_that_no_link_carries_harms_no_other() -> None:
    links, wires = Links(Lifecycle(card()), Inbox(), TestClock()), [Wire(), Wire()]
    for index, wire in enumerate(wires):
        links.accept(wire).received(Hello(PROTOCOL, f"g{index}"))
    links.deliver([(1, Frame(0, TOO_LARGE)), (2, Frame(0, 7)), (3, Frame(0, 7))])
    links.deliver([(1, Frame(0, 8))])
    frames = [[(told.number, told.step) for told in wire.sent if isinstance(told, Frame)] for wire in wires]
    assert frames == [[(2, 8)], [(1, 7)]]


def test_a_gateway_that_acknowledges_nothing_is_given_up_at_a_beat() -> None:
    lifecycle, inbox, wires = Lifecycle(card()), Inbox(), [Wire(), Wire()]
    links = Links(lifecycle, inbox, TestClock(), max_outbox_bytes=1000)
    gateways = [links.accept(wire) for wire in wires]
    for index, gateway in enumerate(gateways):
        gateway.received(Hello(PROTOCOL, f"g{index}"))
    for number in range(1, 6):
        links.deliver([(link, Frame(0, 1, tokens=bytes(1000))) for link in (1, 2)])
        gateways[1].received(Ack(number))
    links.send(lifecycle.beat(0.0, {"acme": 1.0}))
    assert [wire.is_open for wire in wires] == [False, True]
    assert isinstance(wires[1].sent[-1], Beat) and wires[1].sent[-1].service == {"acme": 1.0}
