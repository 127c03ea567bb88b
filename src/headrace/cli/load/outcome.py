"""What became of one request, as its client saw it. Owns the record; the figures are made of many of them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.cli.load.plan import Shot


class State(StrEnum):
    """The one way a request ended."""

    FINISHED = "finished"
    # An HTTP error instead of a reply.
    REFUSED = "refused"
    # A reply that broke off with an error of its own.
    FAILED = "failed"
    # The client went away, as the plan wanted.
    LEFT = "left"
    # The client gave up, as the plan wanted.
    TIMED_OUT = "timed_out"
    # No connection, a connection that closed, bytes that mean nothing.
    BROKEN = "broken"
    # Nothing more came for as long as the load tool is patient.
    HUNG = "hung"


@dataclass(slots=True)
class Outcome:
    """Times are of one monotonic clock; latencies count from `intended_s`, not from when we got round to sending."""

    shot: Shot
    intended_s: float
    counted: bool
    sent_s: float | None = None
    ended_s: float | None = None
    # When each piece came that brought tokens.
    pieces_s: array[float] = field(default_factory=lambda: array("d"))
    state: State | None = None
    status: int = 0
    code: str = ""
    message: str = ""
    request_id: str = ""
    frames: int = 0
    size_bytes: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    ids: dict[int, list[int]] = field(default_factory=dict)
    # What the server did that it promised never to do; empty for a reply in good order.
    violation: str = ""

    @property
    def ttft_s(self) -> float | None:
        return self.pieces_s[0] - self.intended_s if self.pieces_s else None

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.intended_s

    @property
    def mean_itl_s(self) -> float | None:
        """Per token where the server said how many there were, else per piece."""
        steps = max(len(self.pieces_s), self.output_tokens) - 1
        return (self.pieces_s[-1] - self.pieces_s[0]) / steps if len(self.pieces_s) > 1 else None
