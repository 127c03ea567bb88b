"""One end's receiver, guarded: whatever it raises or the other end sends, the harm stays with this link.

Owns the order of calls (messages, then `closed`, once). Knows no sockets.
"""

import logging
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.core.ports import Link, Receiver

log = logging.getLogger("headrace.transport")

ReceiverFactory = Callable[[Link], Receiver]


class Reception:
    """Raises nothing: what went wrong is returned as a reason to close the link, empty when all is well."""

    def __init__(self, factory: ReceiverFactory, incoming: Any) -> None:
        self._factory = factory
        self._decoder = msgspec.msgpack.Decoder(incoming)

    def greet(self, link: Link) -> "Guest | str":
        """A receiver for a link whose other end has shown that it speaks the protocol."""
        try:
            return Guest(link, self._factory(link), self._decoder)
        except Exception as error:  # noqa: BLE001 the receiver is another package's; its failure is one link's
            return _blame(link, "could not be made", error)


class Guest:
    """One receiver and the messages meant for it."""

    def __init__(self, link: Link, receiver: Receiver, decoder: "msgspec.msgpack.Decoder[Any]") -> None:
        self._link = link
        self._receiver = receiver
        self._decoder = decoder
        self._is_told = False

    def deliver(self, body: bytes | memoryview) -> str:
        try:
            message = self._decoder.decode(body)
        except (ValueError, RecursionError, OverflowError, MemoryError) as error:
            return f"a message that this end does not understand ({type(error).__name__})"
        try:
            self._receiver.received(message)
        except Exception as error:  # noqa: BLE001 the receiver is another package's; its failure is one link's
            return _blame(self._link, f"failed on {type(message).__name__}", error)
        return ""

    def tell_closed(self, why: str) -> None:
        if self._is_told:
            return
        self._is_told = True
        try:
            self._receiver.closed(why)
        except Exception as error:  # noqa: BLE001 the receiver is another package's; its failure is one link's
            _blame(self._link, "failed on the end of its link", error)


def _blame(link: Link, what: str, error: Exception) -> str:
    """Log where a receiver failed, without the error's text: that may quote a prompt."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    why = f"the receiver {what}: {type(error).__name__}"
    log.error("link to %s: %s at %s:%s", link.peer, why, place.filename, place.lineno)
    return why
