"""One worker of the virtual world: a real engine over a fake runner, and what its frames say.

Owns per-sequence arrays indexed by sequence number, so that a frame is a handful of vector
operations however many rows it has. Knows its clients; decides nothing about them.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.core.event import StepFrame
from headrace.engine.loop import Engine
from headrace.runner.fake import FakeRunner
from headrace.sim.clients import Client
from headrace.sim.clock import NS
from headrace.sim.meter import Flight
from headrace.sim.record import Gaps

_NEVER = 2**31 - 1
# Who waits for a moment is not backlogged.
_BACKLOG_NS = NS


@dataclass(slots=True)
class Delivery:
    """What a frame's tokens mean for single clients; empty lists for most frames."""

    first: list[Client]
    reached: list[Client]
    slow: list[Client]


class Replica:
    def __init__(self, index: int, engine: Engine, runner: FakeRunner, *, keep_tokens: bool, keep_times: bool) -> None:
        self.index = index
        self.engine = engine
        self.runner = runner
        self.dead = False
        # An event for the end of the oldest step, for the next plan, is on its way.
        self.stepping = False
        self.kicked = False
        self.wake_ns = -1
        self.num_steps = 0
        self.slowness = 1.0
        self.ended_ns = 0
        self.flights: deque[Flight] = deque()
        self.slot_tenants = np.zeros(engine.slot_numbers.size, np.int64)
        self.slot_ordinals = np.zeros(engine.slot_numbers.size, np.int64)
        # Per tenant: how many of its sequences have not been in a slot yet, and since when there are any.
        self._unstarted = np.zeros(1, np.int64)
        self._waiting_since_ns = np.zeros(1, np.int64)
        self.clients: dict[int, Client] = {}
        self._last_ns = np.zeros(64, np.int64)
        self._seen = np.zeros(64, np.int32)
        # A client that leaves after so many tokens, and readers, are looked at; others never.
        self._leave_at = np.full(64, _NEVER, np.int64)
        self._num_watched = 0
        self._tokens = TokenStore(keep_times) if keep_tokens or keep_times else None

    def submit(self, client: Client, now_ns: int) -> None:
        """Raises what the engine raises; on success the client belongs to this replica."""
        request = client.request
        number = self.engine.submit(request, now_ns / NS)
        if number >= len(self._seen):
            self._grow(number)
        client.worker = self.index
        client.number = number
        row = client.row
        if row.ends == "stop":
            self.runner.script(request.request_id, request.choice, row.output_tokens)
        self.clients[number] = client
        self._await_start(client, now_ns)
        self._seen[number] = len(client.delivered)
        self._last_ns[number] = client.last_ns
        watched = row.cancel_after_tokens is not None or row.reader_tokens_per_s is not None
        if watched:
            # A slow reader is looked at with every token: the first one is already too late to leave.
            leave_at = row.cancel_after_tokens or _NEVER
            self._leave_at[number] = 0 if row.reader_tokens_per_s is not None else leave_at
            self._num_watched += 1
        if len(client.delivered) and self._tokens is not None:
            self._tokens.open(number, client.delivered, client.delivered_ns)

    def start(self, number: int, slot: int) -> None:
        """A plan gives the slot to that sequence."""
        client = self.clients[number]
        self.slot_tenants[slot] = client.tenant
        self.slot_ordinals[slot] = client.ordinal
        if not client.started:
            client.started = True
            self._unstarted[client.tenant] -= 1

    def backlogged(self, now_ns: int) -> NDArray[np.int64]:
        """Tenants that have had something waiting for a while without a break."""
        return np.flatnonzero((self._unstarted > 0) & (self._waiting_since_ns <= now_ns - _BACKLOG_NS))

    def absorb(self, frame: StepFrame, now_ns: int, gaps: Gaps) -> Delivery | None:
        """Take a frame's tokens in. None when they concern no client in particular."""
        numbers, indices = frame.numbers, frame.indices
        seen = self._seen[numbers]
        # Bytes first: comparing small arrays takes ten times as long.
        if seen.tobytes() != indices.tobytes() and (seen != indices).any():
            raise AssertionError(f"worker {self.index}: a token was repeated or lost in step {frame.step}")
        self._seen[numbers] = seen + 1
        gap_ns = now_ns - self._last_ns[numbers]
        self._last_ns[numbers] = now_ns
        first: list[Client] = []
        if np.count_nonzero(indices) < len(indices):
            began = indices == 0
            first = [self.clients[number] for number in numbers[began].tolist()]
            gap_ns = gap_ns[~began]
        gaps.add(gap_ns)
        if self._tokens is not None:
            self._tokens.add(frame, now_ns, first)
        if self._num_watched:
            return self._watch(numbers, seen, first)
        return Delivery(first, [], []) if first else None

    def _watch(self, numbers: NDArray[np.int64], seen: NDArray[np.int32], first: list[Client]) -> Delivery:
        noticed = numbers[seen + 1 >= self._leave_at.take(numbers)].tolist()
        reached: list[Client] = []
        slow: list[Client] = []
        for number in noticed:
            client = self.clients[number]
            leave_at = client.row.cancel_after_tokens
            if leave_at is not None and self.num_delivered(client) >= leave_at:
                reached.append(client)
            elif client.row.reader_tokens_per_s is not None:
                slow.append(client)
        return Delivery(first, reached, slow)

    def num_delivered(self, client: Client) -> int:
        return int(self._seen[client.number])

    def received(self, client: Client) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Tokens and their instants, those of earlier workers included."""
        if self._tokens is None:
            return client.delivered, client.delivered_ns
        return self._tokens.close(client.number, self.num_delivered(client))

    def release(self, client: Client) -> None:
        """The client's sequence has ended here."""
        del self.clients[client.number]
        if not client.started:
            self._unstarted[client.tenant] -= 1
        if client.row.ends == "stop":
            self.runner.lengths.pop((client.request.request_id, client.request.choice), None)
        if self._leave_at[client.number] != _NEVER:
            self._leave_at[client.number] = _NEVER
            self._num_watched -= 1
        client.number = -1

    def hand_over(self, client: Client, now_ns: int) -> None:
        """This worker is gone: make the client ready for another one, to go on after what was delivered."""
        client.last_ns = int(self._last_ns[client.number])
        client.delivered, client.delivered_ns = self.received(client)
        self.release(client)
        client.replays += 1
        client.paused = False
        client.num_pauses += 1
        deadline_s = client.row.deadline_s
        if deadline_s is not None:
            deadline_s = max(1e-9, deadline_s - (now_ns - client.arrival_ns) / 1e9)
        replay_ids = tuple(client.delivered.tolist())
        client.request = replace(client.request, replay_ids=replay_ids, deadline_s=deadline_s)

    def forget_gap(self, client: Client, now_ns: int) -> None:
        """What its reader held up is no gap between tokens."""
        self._last_ns[client.number] = now_ns

    def _await_start(self, client: Client, now_ns: int) -> None:
        client.started = False
        tenant = client.tenant
        if tenant >= len(self._unstarted):
            more = np.zeros(tenant + 1 - len(self._unstarted), np.int64)
            self._unstarted = np.concatenate([self._unstarted, more])
            self._waiting_since_ns = np.concatenate([self._waiting_since_ns, more])
        if self._unstarted[tenant] == 0:
            self._waiting_since_ns[tenant] = now_ns
        self._unstarted[tenant] += 1

    def _grow(self, number: int) -> None:
        more = max(number + 1, 2 * len(self._seen)) - len(self._seen)
        self._last_ns = np.concatenate([self._last_ns, np.zeros(more, np.int64)])
        self._seen = np.concatenate([self._seen, np.zeros(more, np.int32)])
        self._leave_at = np.concatenate([self._leave_at, np.full(more, _NEVER, np.int64)])


class TokenStore:
    """Tokens of the streams that have any: one row each, found by sequence number. Rows are used again."""

    def __init__(self, keep_times: bool) -> None:
        self._row_of = np.zeros(64, np.int64)
        self._tokens = np.zeros((16, 64), np.int32)
        self._times = np.zeros((16, 64) if keep_times else (0, 0), np.int64)
        self._keep_times = keep_times
        self._free = list(range(15, -1, -1))
        self._opened: set[int] = set()

    def open(self, number: int, tokens: NDArray[np.int32], times_ns: NDArray[np.int64]) -> None:
        """A row for a stream that has these tokens already."""
        if number >= len(self._row_of):
            self._row_of = np.concatenate([self._row_of, np.zeros(number + 1, np.int64)])
        if not self._free:
            self._add_rows()
        row = self._row_of[number] = self._free.pop()
        self._opened.add(number)
        count = len(tokens)
        self._fit(count)
        self._tokens[row, :count] = tokens
        if self._keep_times:
            self._times[row, :count] = times_ns

    def add(self, frame: StepFrame, now_ns: int, first: list[Client]) -> None:
        for client in first:
            self.open(client.number, client.delivered, client.delivered_ns)
        self._fit(int(frame.indices.max()) + 1)
        rows = self._row_of.take(frame.numbers)
        self._tokens[rows, frame.indices] = frame.tokens
        if self._keep_times:
            self._times[rows, frame.indices] = now_ns

    def close(self, number: int, count: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The stream's tokens; its row is free afterwards. A stream that never had a row has none."""
        if number not in self._opened:
            return np.zeros(0, np.int32), np.zeros(0, np.int64)
        self._opened.remove(number)
        row = int(self._row_of[number])
        self._free.append(row)
        times_ns = self._times[row, :count].copy() if self._keep_times else np.zeros(0, np.int64)
        return self._tokens[row, :count].copy(), times_ns

    def _add_rows(self) -> None:
        rows = len(self._tokens)
        self._free.extend(range(2 * rows - 1, rows - 1, -1))
        self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        if self._keep_times:
            self._times = np.concatenate([self._times, np.zeros_like(self._times)])

    def _fit(self, width: int) -> None:
        if width > self._tokens.shape[1]:
            more = ((0, 0), (0, max(width, 2 * self._tokens.shape[1]) - self._tokens.shape[1]))
            self._tokens = np.pad(self._tokens, more)
            if self._keep_times:
                self._times = np.pad(self._times, more)
