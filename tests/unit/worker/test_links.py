"""A worker's connections: who hears what."""

from typing import Any

from headrace.core.messages import PROTOCOL, Beat, Hello
from headrace.worker.inbox import Inbox
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
