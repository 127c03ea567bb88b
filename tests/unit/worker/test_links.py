"""A worker's connections: who hears what."""

from typing import Any

from headrace.core.messages import PROTOCOL, Abort, Beat, Goodbye, Hello
from headrace.worker.inbox import Greeted, Inbox, Left, Order
from headrace.worker.lifecycle import Lifecycle
from headrace.worker.links import Links
from tests.builders import TestClock
from tests.unit.worker.rig import card


class Wire:
    """A link that only remembers."""

    peer = "a gateway"
    is_open = True
    pending_bytes = 0

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def close(self) -> None: ...


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
