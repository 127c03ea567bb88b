"""Applies the result of a step: tokens to sequences, ends, failures, published blocks, learned cost.

The fast path touches decode rows all at once; only those whose occupant changed since the launch, chunks,
ends and failures are looked at one by one. Knows no runner and no queue order.
"""

import numpy as np
from msgspec.structs import replace

from headrace.core.event import Counter, Outcome, StepFrame
from headrace.core.plan import IntArray, RowStatus, Scores, StepResult
from headrace.engine.draft import Chunk, Flight, SlotArray
from headrace.engine.sequence import Phase, Sequence
from headrace.engine.slots import every, some
from headrace.engine.state import State

_NO_ROWS = StepFrame(-1)

# Number, index, token and counters.
Row = tuple[int, int, int, list[int]]


class Applier:
    def __init__(self, state: State) -> None:
        self._state = state
        self._vocab_size = state.config.vocab_size
        self._unsigned_vocab_size = np.array(state.config.vocab_size, np.uint32)

    def apply(self, flight: Flight, result: StepResult, now_s: float) -> StepFrame:
        state = self._state
        plan = flight.plan
        assert result.step == plan.step, f"result of step {result.step} for plan {plan.step}"
        state.model.observe(plan.work, result.elapsed_s)
        state.step_applied(plan.step)
        scores = None if result.scores is None else self._scores(flight, result, result.scores)
        rows: list[Row] = []
        num_decode = len(flight.slots) - len(flight.chunks)
        frame = self._apply_decode(flight, num_decode, result, rows, now_s) if num_decode else _NO_ROWS
        for row, chunk in flight.chunks:
            self._apply_chunk(flight, row, chunk, result, rows, now_s)
        if rows:
            return _joined(plan.step, frame, rows, scores)
        is_whole = scores is None and frame is not _NO_ROWS
        return frame if is_whole else replace(frame, step=plan.step, scores=scores)

    def _apply_decode(
        self, flight: Flight, num_rows: int, result: StepResult, rows: list[Row], now_s: float
    ) -> StepFrame:
        """The first rows of the step; what comes of those that are not as they were expected goes to `rows`."""
        slots, tokens, statuses = flight.slots[:num_rows], result.tokens[:num_rows], result.statuses[:num_rows]
        # One comparison for both bounds: a negative id is a huge one when unsigned.
        good = tokens.view(np.uint32) < self._unsigned_vocab_size
        good &= self._state.table.generation[slots] == flight.generations[:num_rows]
        if statuses.tobytes().count(RowStatus.OK) != num_rows:
            good &= statuses == RowStatus.OK
        if every(good):
            return self._emit(flight.plan.step, slots, tokens, now_s)
        frame = self._emit(flight.plan.step, slots[good], tokens[good], now_s) if some(good) else _NO_ROWS
        for row in (~good).nonzero()[0].tolist():
            self._apply_odd(flight, row, result, rows, now_s)
        return frame

    def _emit(self, step: int, slots: SlotArray, tokens: IntArray, now_s: float) -> StepFrame:
        """Rows whose occupant is still there and whose token is good."""
        state = self._state
        table = state.table
        numbers = table.number[slots]
        indices, counters = table.append(slots, tokens)
        stopped = table.stopped(slots, tokens)
        if some(stopped):
            for row in stopped.nonzero()[0].tolist():
                sequence: Sequence = table.sequences[slots[row]]
                if indices[row] + 1 >= sequence.request.sampling.min_tokens:
                    state.end(sequence, Outcome.FINISHED, "stop", now_s)
        return StepFrame(step, numbers, indices, tokens, counters)

    def _apply_chunk(
        self, flight: Flight, row: int, chunk: Chunk, result: StepResult, rows: list[Row], now_s: float
    ) -> None:
        table, sequence = self._state.table, chunk.sequence
        slot = flight.slots.item(row)
        is_live = table.generation.item(slot) == flight.generations.item(row)
        is_sound = self._status(flight, row, result) == RowStatus.OK
        if sequence.phase is not Phase.ENDED:
            self._count_chunk(chunk, is_live=is_live, is_sound=is_sound, now_s=now_s)
        if not (is_live and is_sound):
            self._apply_odd(flight, row, result, rows, now_s)
        elif chunk.is_last:
            token = result.tokens.item(row)
            index, counters = table.append_one(slot, token)
            rows.append((sequence.number, index, token, counters))
            if index + 1 >= sequence.request.sampling.min_tokens and self._is_stop(sequence, token):
                self._state.end(sequence, Outcome.FINISHED, "stop", now_s)

    def _count_chunk(self, chunk: Chunk, *, is_live: bool, is_sound: bool, now_s: float) -> None:
        """A chunk was computed: count it, and make its full blocks findable."""
        sequence = chunk.sequence
        counters = self._state.table.counters[sequence.slot] if is_live else sequence.counters
        counters[Counter.RECOMPUTED] += chunk.again
        counters[Counter.PROMPT_COMPUTED] += chunk.prompt
        if is_sound and (is_live or sequence.phase is Phase.LEAVING):
            sequence.num_applied = chunk.start + chunk.count
            self._state.publish_prompt(sequence)
            if sequence.num_applied >= sequence.num_tokens:
                self._state.caught_up(sequence, now_s)

    def _apply_odd(self, flight: Flight, row: int, result: StepResult, rows: list[Row], now_s: float) -> None:
        """A row that failed, or whose sequence has left its slot since the launch."""
        sequence: Sequence = flight.sequences[row]
        if sequence.phase is Phase.ENDED:
            if sequence.finished:
                self._refund(sequence, flight.charge_s(row))
            return
        status = self._status(flight, row, result)
        if status != RowStatus.OK:
            self._state.end(sequence, Outcome.FAILED, RowStatus.NAMES[status], now_s, RowStatus.WORDS[status])
        elif flight.plan.samples[row]:
            token = result.tokens.item(row)
            self._append_late(sequence, token, now_s)
            rows.append((sequence.number, len(sequence.outputs) - 1, token, sequence.counters))

    def _status(self, flight: Flight, row: int, result: StepResult) -> int:
        """What the runner says of a row, and what its token does."""
        status = result.statuses.item(row)
        if status != RowStatus.OK:
            return status if status < len(RowStatus.NAMES) else RowStatus.FAILED
        if flight.plan.samples.item(row) and not 0 <= result.tokens.item(row) < self._vocab_size:
            return RowStatus.OUT_OF_RANGE
        return RowStatus.OK

    def _is_stop(self, sequence: Sequence, token: int) -> bool:
        sampling = sequence.request.sampling
        return token in sampling.stop_ids or (token in self._state.config.eos_ids and not sampling.ignore_eos)

    def _append_late(self, sequence: Sequence, token: int, now_s: float) -> None:
        """The token of a sequence that ended by length or gave up its slot while it was computed."""
        state = self._state
        sequence.outputs.append(token)
        sequence.counters[Counter.EMITTED] += 1
        if len(sequence.outputs) >= sequence.request.sampling.min_tokens and self._is_stop(sequence, token):
            state.end(sequence, Outcome.FINISHED, "stop", now_s)
        elif sequence.num_tokens >= sequence.limit:
            state.end(sequence, Outcome.FINISHED, "length", now_s)

    def _refund(self, sequence: Sequence, seconds: float) -> None:
        """A wasted row: computed for a sequence that had ended. Its token is dropped and not charged."""
        tenants = self._state.tenants
        if tenants.names[sequence.tenant] == sequence.request.tenant:
            tenants.charge_one(sequence.tenant, -seconds)
            self._state.line.refunded(sequence.tenant)

    def _scores(self, flight: Flight, result: StepResult, scores: Scores) -> Scores | None:
        """The scores by sequence, without failed rows, ended sequences and prompt ids scored before."""
        entries: list[int] = []
        owners: list[int] = []
        for entry, (row, position) in enumerate(zip(scores.owners.tolist(), scores.positions.tolist(), strict=True)):
            sequence: Sequence = flight.sequences[row]
            if sequence.phase is Phase.ENDED or position <= sequence.num_scored:
                continue
            if self._status(flight, row, result) != RowStatus.OK:
                continue
            if position < sequence.num_prompt:
                sequence.num_scored = position
            entries.append(entry)
            owners.append(sequence.number)
        return scores.take(np.array(entries, np.intp), np.array(owners, np.int64)) if entries else None


def _joined(step: int, frame: StepFrame, rows: list[Row], scores: Scores | None) -> StepFrame:
    """The frame of the step: `rows` after those of decode rows."""
    columns = zip(*rows, strict=True)
    numbers, indices, tokens, counters = map(np.array, columns, (np.int64, np.int32, np.int32, np.int32))
    if len(frame.numbers):
        numbers = np.concatenate([frame.numbers, numbers])
        indices = np.concatenate([frame.indices, indices])
        tokens = np.concatenate([frame.tokens, tokens])
        counters = np.concatenate([frame.counters, counters])
    return StepFrame(step, numbers, indices, tokens, counters, scores=scores)
