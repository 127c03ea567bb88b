"""An event loop's end of one limited process: the loop itself writes a job to it and reads the answer, with no thread
between them.

Owns a descriptor of its own, so that the process may be replaced while the loop still watches it. Only the plain
case is dealt with: a small job, answered in time. Whatever else happens is the trouble of a thread, which can wait.
"""

import asyncio
import os
import select
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

from headrace.text.limited_process import LimitedProcess, Talk
from headrace.text.limited_ticket import Ticket
from headrace.text.limited_wire import Answer, body_of

# More than this is neither written nor read by a loop, which others wait for.
INLINE_BYTES = 64 << 10

OnAnswer = Callable[["Listener", Ticket[Any], Answer], None]
OnTrouble = Callable[["Listener", Ticket[Any], Talk], None]


class Listener:
    """`on_answer` and `on_trouble` get the process back, the latter with a talk to be concluded; `on_end` is told that
    it ended without a job. Use from the loop alone."""

    __slots__ = (
        "_due_s",
        "_fd",
        "_on_answer",
        "_on_end",
        "_on_trouble",
        "_talk",
        "_ticket",
        "_timer",
        "loop",
        "process",
    )

    def __init__(
        self,
        process: LimitedProcess,
        loop: asyncio.AbstractEventLoop,
        on_answer: OnAnswer,
        on_trouble: OnTrouble,
        on_end: Callable[[LimitedProcess], None],
    ) -> None:
        self.process = process
        self.loop = loop
        self._on_answer = on_answer
        self._on_trouble = on_trouble
        self._on_end = on_end
        self._fd = -1
        self._ticket: Ticket[Any] | None = None
        self._talk: Talk | None = None
        # One timer for all jobs: most are over long before it is due.
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    @property
    def ticket(self) -> Ticket[Any] | None:
        """Of the job that runs."""
        return self._ticket

    def post(self, ticket: Ticket[Any]) -> None:
        """Have a process that is ready do this."""
        if self._fd < 0:
            self._fd = self.process.dup()
            self.loop.add_reader(self._fd, self._read)
        talk = self.process.open(ticket.frame, ticket.subject, ticket.limit_s)
        self._ticket, self._talk = ticket, talk
        try:
            talk.unsent = talk.unsent[os.write(self._fd, talk.unsent) :]
        except OSError:
            return self.give_up()
        if talk.unsent:
            return self.give_up()
        if self._timer is None or talk.until_s < self._due_s:
            self._wake_at(talk.until_s, ticket.limit_s)

    def give_up(self) -> None:
        """A thread concludes the job that runs, if one does; whoever waits for it is told by that."""
        ticket, talk = self._ticket, self._talk
        self.detach()
        if ticket is not None and talk is not None:
            self._on_trouble(self, ticket, talk)

    def detach(self) -> None:
        """Watch the process no longer, until the next job."""
        self._ticket = self._talk = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._fd >= 0:
            with suppress(RuntimeError):  # the loop is closed, and watches nothing
                self.loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> None:
        ticket, talk = self._ticket, self._talk
        if ticket is None or talk is None:
            # It ended, or talks to a thread: what it says is not for us.
            has_ended = _has_ended(self._fd)
            self.detach()
            return self._on_end(self.process) if has_ended else None
        try:
            received = os.read(self._fd, INLINE_BYTES)
            talk.received += received
            body = body_of(talk.received, INLINE_BYTES)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            return self.give_up()
        if body is None:
            return None if received else self.give_up()
        answer = self.process.read(body)
        if answer is None:
            return self.give_up()
        self._ticket = self._talk = None
        self._on_answer(self, ticket, answer)

    def _wake_at(self, due_s: float, after_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = due_s
        self._timer = self.loop.call_later(after_s, self._look)

    def _look(self) -> None:
        """Whether the job that runs is late."""
        self._timer = None
        talk = self._talk
        if talk is None:
            return
        left_s = talk.until_s - monotonic()
        if left_s <= 0.0:
            self._read()  # the loop itself may have been the one that was late
            if self._talk is talk:
                self.give_up()
        elif self._timer is None:
            self._wake_at(talk.until_s, left_s)


def _has_ended(fd: int) -> bool:
    """The other end was closed. That there is something to read says nothing of that: it may be a thread's answer."""
    poller = select.poll()
    poller.register(fd, select.POLLRDHUP)
    return bool(poller.poll(0))
