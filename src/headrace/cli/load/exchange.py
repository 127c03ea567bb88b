"""One request on the wire, from intention to its one end. Owns the reading of replies and the leaving of clients.

Checks on the way what every reply promises: one terminal frame per choice, then `[DONE]`, and nothing after it.
"""

import asyncio
import time
from collections.abc import Callable

import msgspec
from msgspec import Struct

from headrace.cli.load.http import Connection
from headrace.cli.load.outcome import Outcome, State
from headrace.cli.load.sse import EventStream


class _Said(Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.reasoning or self.reasoning_content or self.refusal or self.tool_calls)


class _Choice(Struct, gc=False):
    index: int = 0
    delta: _Said | None = None
    message: _Said | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def brings_tokens(self) -> bool:
        said = self.delta or self.message
        return bool(self.text or self.token_ids) or (said is not None and not said.is_empty)


class _Usage(Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _Error(Struct, gc=False):
    message: str = ""
    type: str | None = None
    code: str | int | None = None


class _Reply(Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Reply).decode


class Exchange:
    """Calls `over` once, when the request has ended in whatever way."""

    __slots__ = (
        "_body",
        "_choices",
        "_connection",
        "_done",
        "_error",
        "_events",
        "_finished",
        "_loop",
        "_over",
        "_patience_s",
        "_timers",
        "is_over",
        "outcome",
    )

    def __init__(
        self,
        outcome: Outcome,
        over: Callable[["Exchange"], None],
        loop: asyncio.AbstractEventLoop,
        *,
        choices: int = 1,
        patience_s: float = 600.0,
    ) -> None:
        self.outcome = outcome
        self.is_over = False
        self._over = over
        self._loop = loop
        self._choices = choices
        self._patience_s = patience_s
        self._connection: Connection | None = None
        self._events: EventStream | None = None
        self._body: list[bytes] = []
        self._finished: dict[int, str] = {}
        self._error: _Error | None = None
        self._done = False
        self._timers: list[asyncio.TimerHandle] = []

    def start(self, *, streamed: bool, late_s: float = 0.0) -> None:
        """Set the clocks of a client that will not wait for ever. They run from the intended time."""
        shot = self.outcome.shot
        limits = [(self._patience_s, State.HUNG)]
        if shot.leave_after_s is not None and not (streamed and shot.leave_after_pieces):
            limits.append((shot.leave_after_s, State.LEFT))
        if shot.timeout_s is not None:
            limits.append((shot.timeout_s, State.TIMED_OUT))
        for limit_s, state in limits:
            self._timers.append(self._loop.call_later(max(0.0, limit_s - late_s), self._leave, state))

    def on_sent(self, connection: Connection, now_s: float) -> None:
        self._connection = connection
        self.outcome.sent_s = now_s

    def on_head(self, status: int, headers: dict[bytes, bytes], now_s: float) -> None:
        outcome = self.outcome
        outcome.status = status
        outcome.request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        if headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            self._events = EventStream()

    def on_data(self, data: bytes, now_s: float) -> None:
        self.outcome.size_bytes += len(data)
        if self._events is None:
            self._body.append(data)
            return
        for event in self._events.feed(data):
            self._take(event, now_s)
            if self.is_over:
                return

    def on_end(self, broken: str | None, now_s: float) -> None:
        if self.is_over:
            return
        if broken is not None:
            self.outcome.message = broken
            self._end(State.BROKEN, now_s)
        elif self._events is not None:
            self._end_stream(now_s)
        else:
            self._end_whole(now_s)

    def _take(self, event: bytes, now_s: float) -> None:
        outcome = self.outcome
        if self._done:
            self._blame("something came after [DONE]")
            return
        if event == b"[DONE]":
            self._done = True
            return
        outcome.frames += 1
        try:
            reply = _decode(event)
        except msgspec.MsgspecError as error:
            self._blame(f"a frame that is no reply: {error}")
            return
        if self._read(reply):
            outcome.pieces_s.append(now_s)
            if len(outcome.pieces_s) == outcome.shot.leave_after_pieces:
                self._leave(State.LEFT)

    def _read(self, reply: _Reply) -> bool:
        """Whether it brought tokens."""
        brought = False
        for choice in reply.choices:
            brought = brought or choice.brings_tokens
            if choice.index in self._finished and (choice.brings_tokens or choice.finish_reason):
                self._blame(f"choice {choice.index} went on after its finish_reason")
            if choice.token_ids is not None:
                self.outcome.ids.setdefault(choice.index, []).extend(choice.token_ids)
            if choice.finish_reason is not None:
                self._finished[choice.index] = choice.finish_reason
        if reply.usage is not None:
            self.outcome.prompt_tokens = reply.usage.prompt_tokens
            self.outcome.output_tokens = reply.usage.completion_tokens or 0
        if reply.error is not None:
            if self._error is not None:
                self._blame("a second error frame")
            self._error = reply.error
        return brought

    def _end_stream(self, now_s: float) -> None:
        assert self._events is not None
        if not self._done or not self._events.is_whole:
            self._blame("the stream ended without [DONE]")
        if self._error is not None:
            if len(self._finished) >= self._choices:
                self._blame("an error frame besides every finish_reason")
            self._end(State.FAILED, now_s)
            return
        self._check_finished()
        self._end(State.FINISHED if not self.outcome.violation else State.BROKEN, now_s)

    def _end_whole(self, now_s: float) -> None:
        outcome = self.outcome
        try:
            reply = _decode(b"".join(self._body))
        except msgspec.MsgspecError as error:
            reply = _Reply()
            if outcome.status < 400:
                self._blame(f"a body that is no reply: {error}")
        self._read(reply)
        if outcome.status >= 400 or self._error is not None:
            self._end(State.REFUSED, now_s)
            return
        if outcome.status != 200:
            self._blame(f"status {outcome.status}")
        self._check_finished()
        self._end(State.FINISHED if not outcome.violation else State.BROKEN, now_s)

    def _check_finished(self) -> None:
        if len(self._finished) != self._choices:
            self._blame(f"{len(self._finished)} of {self._choices} choices have a finish_reason")

    def _leave(self, state: State) -> None:
        """Our side ends it; what the server still says is not heard."""
        if self.is_over:
            return
        if state is State.HUNG:
            self.outcome.message = f"no end within {self._patience_s:g} s"
        if self._connection is not None:
            self._connection.drop(reset=state is State.LEFT)
        self._end(state, time.perf_counter())

    def _end(self, state: State, now_s: float) -> None:
        outcome = self.outcome
        self.is_over = True
        outcome.state, outcome.ended_s = state, now_s
        if self._error is not None:
            outcome.code = str(self._error.code or self._error.type or "error")
            outcome.message = self._error.message
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._connection = None
        self._over(self)

    def _blame(self, what: str) -> None:
        self.outcome.violation = self.outcome.violation or what
