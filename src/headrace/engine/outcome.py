"""Applies the result of a step: tokens to sequences, ends, failures, published blocks, learned cost.

The fast path touches whole rows at once; only rows whose occupant changed since the launch, chunks,
ends and failures are looked at one by one. Knows no runner and no queue order.
"""

import numpy as np
from msgspec.structs import replace

from headrace.core.event import Counter, Outcome, StepFrame
from headrace.core.plan import BoolArray, RowStatus, Scores, StepResult
from headrace.engine.draft import Chunk, Flight
from headrace.engine.sequence import Phase, Sequence
from headrace.engine.slots import every, extended, some
from headrace.engine.state import State

_NO_ROWS = StepFrame(-1)

# Number, index, token and counters.
LateRow = tuple[int, int, int, list[int]]


class Applier:
    def __init__(self, state: State) -> None:
        self._state = state
        self._vocab_size = np.array(state.config.vocab_size, np.uint32)

    def apply(self, flight: Flight, result: StepResult, now_s: float) -> StepFrame:
        state = self._state
        plan = flight.plan
        assert result.step == plan.step, f"result of step {result.step} for plan {plan.step}"
        state.model.observe(plan.work, result.elapsed_s)
        state.step_applied(plan.step)
        tokens = result.tokens
        # One comparison for both bounds: a negative id is a huge one when unsigned.
        sound = tokens.view(np.uint32) < self._vocab_size
        if not flight.samples_all:
            sound |= ~plan.samples
        if result.statuses.tobytes().count(RowStatus.OK) != len(tokens):
            sound &= result.statuses == RowStatus.OK
        scores = None if result.scores is None else _scores_of(flight, result.scores, sound)
        live = state.table.generation[flight.slots] == flight.generations
        for row, chunk in flight.chunks:
            self._count_chunk(chunk, live=live.item(row), sound=sound.item(row), now_s=now_s)
        good = live & sound
        odd = not every(good)
        if not flight.samples_all:
            frame = self._emit(flight, good & plan.samples, result, now_s)
        else:
            frame = self._emit(flight, good if odd else None, result, now_s)
        if odd:
            frame = self._apply_odd_rows(flight, result, frame, ~good, sound, now_s)
        return frame if scores is None else replace(frame, scores=scores)

    def _count_chunk(self, chunk: Chunk, *, live: bool, sound: bool, now_s: float) -> None:
        """A chunk was computed: count it, and make its full blocks findable."""
        sequence = chunk.sequence
        if sequence.phase is Phase.ENDED:
            return
        counters = self._state.table.counters[sequence.slot] if live else sequence.counters
        counters[Counter.RECOMPUTED] += chunk.again
        counters[Counter.PROMPT_COMPUTED] += chunk.prompt
        if sound and (live or sequence.phase is Phase.LEAVING):
            sequence.num_applied = chunk.start + chunk.count
            self._state.publish_prompt(sequence)
            if sequence.num_applied >= sequence.num_tokens:
                self._state.caught_up(sequence, now_s)

    def _emit(self, flight: Flight, emitting: BoolArray | None, result: StepResult, now_s: float) -> StepFrame:
        """The rows whose occupant is still there and whose token is good; None: all of them."""
        state = self._state
        table = state.table
        slots, tokens = flight.slots, result.tokens
        if emitting is not None:
            if not some(emitting):
                return replace(_NO_ROWS, step=flight.plan.step)
            slots, tokens = slots[emitting], tokens[emitting]
        numbers = table.number[slots]
        indices, counters = table.append(slots, tokens)
        stopped = table.stopped(slots, tokens)
        if some(stopped):
            for row in stopped.nonzero()[0].tolist():
                sequence: Sequence = table.sequences[slots[row]]
                if indices[row] + 1 >= sequence.request.sampling.min_tokens:
                    state.end(sequence, Outcome.FINISHED, "stop", now_s)
        return StepFrame(flight.plan.step, numbers, indices, tokens, counters)

    def _apply_odd_rows(
        self, flight: Flight, result: StepResult, frame: StepFrame, odd: BoolArray, sound: BoolArray, now_s: float
    ) -> StepFrame:
        """Rows that failed, and rows whose sequence has left its slot since the launch."""
        state = self._state
        late: list[LateRow] = []
        for row in odd.nonzero()[0].tolist():
            sequence: Sequence = flight.sequences[row]
            if sequence.phase is Phase.ENDED:
                if sequence.finished:
                    self._refund(sequence, flight.charge_s(row))
            elif not sound[row]:
                status = int(result.statuses[row]) or RowStatus.OUT_OF_RANGE
                if status >= len(RowStatus.NAMES):
                    status = RowStatus.FAILED
                state.end(sequence, Outcome.FAILED, RowStatus.NAMES[status], now_s, RowStatus.WORDS[status])
            elif flight.plan.samples[row]:
                token = result.tokens.item(row)
                self._append_late(sequence, token, now_s)
                late.append((sequence.number, len(sequence.outputs) - 1, token, sequence.counters))
        return _extended(frame, late) if late else frame

    def _append_late(self, sequence: Sequence, token: int, now_s: float) -> None:
        """The token of a sequence that ended by length or gave up its slot while it was computed."""
        state = self._state
        sequence.outputs.append(token)
        sequence.counters[Counter.EMITTED] += 1
        sampling = sequence.request.sampling
        stops = sampling.stop_ids if sampling.ignore_eos else sampling.stop_ids + state.config.eos_ids
        if token in stops and len(sequence.outputs) >= sampling.min_tokens:
            state.end(sequence, Outcome.FINISHED, "stop", now_s)
        elif sequence.num_tokens >= sequence.limit:
            state.end(sequence, Outcome.FINISHED, "length", now_s)

    def _refund(self, sequence: Sequence, seconds: float) -> None:
        """A wasted row: computed for a sequence that had ended. Its token is dropped and not charged."""
        tenants = self._state.tenants
        if tenants.names[sequence.tenant] == sequence.request.tenant:
            tenants.charge_one(sequence.tenant, -seconds)
            self._state.line.refunded(sequence.tenant)


def _scores_of(flight: Flight, scores: Scores, sound: BoolArray) -> Scores | None:
    """The scores by sequence, without failed rows, ended sequences and prompt ids scored before."""
    entries: list[int] = []
    owners: list[int] = []
    for entry, (row, position) in enumerate(zip(scores.owners.tolist(), scores.positions.tolist(), strict=True)):
        sequence: Sequence = flight.sequences[row]
        if not sound[row] or sequence.phase is Phase.ENDED or position <= sequence.num_scored:
            continue
        if position < sequence.num_prompt:
            sequence.num_scored = position
        entries.append(entry)
        owners.append(sequence.number)
    return scores.take(np.array(entries, np.intp), np.array(owners, np.int64)) if entries else None


def _extended(frame: StepFrame, late: list[LateRow]) -> StepFrame:
    """The frame with the late rows after its own."""
    numbers, indices, tokens, counters = zip(*late, strict=True)
    return StepFrame(
        frame.step,
        extended(frame.numbers, numbers),
        extended(frame.indices, indices),
        extended(frame.tokens, tokens),
        extended(frame.counters, counters),
    )
