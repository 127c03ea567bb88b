"""A worker's connections: greets gateways, passes their commands on, sends them frames and heartbeats.

Lives on the I/O loop, which no step can hold up; only `deliver` is called from the engine's thread: frames leave from
there, so that no other thread must be woken and given the interpreter first. Owns the outboxes; knows nothing of the
engine.
"""

import itertools
import logging
from collections.abc import Iterable
from functools import partial

from msgspec.structs import replace

from headrace.core.errors import HeadraceError
from headrace.core.messages import PROTOCOL, Ack, Beat, Drain, Frame, FromGateway, Goodbye, Hello, Welcome
from headrace.core.ports import Clock, Link
from headrace.worker.inbox import Crowded, Greeted, Inbox, Left, Order
from headrace.worker.lifecycle import Lifecycle
from headrace.worker.outbox import DEFAULT_BYTES, Outbox

log = logging.getLogger("headrace.worker")

# A gateway whose outbox grows on while its sequences are paused is not reading at all.
_HOPELESS = 4


class Links:
    def __init__(self, lifecycle: Lifecycle, inbox: Inbox, clock: Clock, max_outbox_bytes: int = DEFAULT_BYTES) -> None:
        self._lifecycle = lifecycle
        self._inbox = inbox
        self._clock = clock
        self._max_bytes = max_outbox_bytes
        self._ids = itertools.count(1)
        self._greeted: dict[int, GatewayLink] = {}

    def accept(self, link: Link) -> "GatewayLink":
        return GatewayLink(self, link, next(self._ids))

    def greet(self, newcomer: "GatewayLink", hello: Hello) -> None:
        """One connection per gateway: an older one is half dead, and is closed. The engine's side hears of its end
        before it hears of the newcomer."""
        for other in [other for other in self._greeted.values() if other.gateway == hello.gateway]:
            self.leave(other.number)
            other.link.close()
        self._inbox.put(Greeted(hello.gateway, hello.attaches))
        newcomer.gateway = hello.gateway
        newcomer.outbox = Outbox(partial(self.crowded, newcomer.number), self._max_bytes)
        self._greeted[newcomer.number] = newcomer
        newcomer.link.send(Welcome(PROTOCOL, self._lifecycle.card, self._lifecycle.state))
        newcomer.link.send(self._lifecycle.beat(0.0, {}))

    def command(self, number: int, message: FromGateway) -> None:
        """Who has left says nothing any more: what it began now would be nobody's."""
        if number not in self._greeted:
            return
        if isinstance(message, Drain):
            self._lifecycle.is_leaving = True
        self._inbox.put(Order(number, self._clock.now_s(), message))  # type: ignore[arg-type]

    def crowded(self, number: int, is_full: bool) -> None:
        self._inbox.put(Crowded(number, is_full))

    def leave(self, number: int, *, for_good: bool = False) -> None:
        gone = self._greeted.pop(number, None)
        if gone is not None:
            self._inbox.put(Left(number, gone.gateway, for_good))

    def deliver(self, frames: Iterable[tuple[int, Frame]]) -> None:
        """Number them and send them. Called by the engine's thread; waits for nobody. Frames for those who left are
        dropped; what the engine's side does for them ends when it hears of it."""
        for number, frame in frames:
            gateway = self._greeted.get(number)
            if gateway is None or gateway.outbox is None:
                continue
            numbered = gateway.outbox.add(frame)
            try:
                gateway.link.post(numbered)
            except HeadraceError as error:  # its gateway finds a number missing, and closes
                log.error("frame %d for %s is lost: %s", numbered.number, gateway.link.peer, error.message)

    @property
    def count(self) -> int:
        return len(self._greeted)

    def send(self, beat: Beat) -> None:
        """To every gateway the same, but the service to one alone: each would tell the other replicas of it."""
        for gateway in list(self._greeted.values()):
            if gateway.outbox is not None and gateway.outbox.size_bytes > _HOPELESS * self._max_bytes:
                log.warning("%s acknowledges nothing: closed", gateway.link.peer)
                gateway.link.close()
                continue
            gateway.link.send(beat)
            beat = replace(beat, service={})

    @property
    def is_settled(self) -> bool:
        """Everything sent was acknowledged."""
        return all(gateway.outbox is None or gateway.outbox.is_empty for gateway in self._greeted.values())


class GatewayLink:
    """One gateway's connection. Meets the contract of `core.ports.Receiver`."""

    def __init__(self, links: Links, link: Link, number: int) -> None:
        self._links = links
        self.link = link
        self.number = number
        self.gateway = ""
        self.outbox: Outbox | None = None

    def received(self, message: FromGateway) -> None:
        if self.outbox is None:
            self._greet(message)
        elif isinstance(message, Ack):
            self.outbox.acknowledge(message.frame)
        elif isinstance(message, Hello):
            self._refuse("greets twice")
        elif isinstance(message, Goodbye):
            self._links.leave(self.number, for_good=True)
            self.link.close()
        else:
            self._links.command(self.number, message)

    def closed(self, why: str) -> None:
        self._links.leave(self.number)

    def _greet(self, message: FromGateway) -> None:
        if not isinstance(message, Hello):
            self._refuse("does not say hello first")
        elif message.protocol != PROTOCOL:
            self._refuse(f"speaks protocol {message.protocol}, not {PROTOCOL}")
        else:
            self._links.greet(self, message)

    def _refuse(self, why: str) -> None:
        log.warning("%s %s: closed", self.link.peer, why)
        self.link.close()
