"""Plans steps: which slots compute how many tokens. No tensor, no clock, no chance: state and time in, plan out.

Every step: decode rows first, all of them; then prefill chunks of running and newly admitted sequences
in order of service, as far as the step's time allows. There is no prefill mode and no decode mode. A plan counts when
its launch is committed; one that was refused leaves nothing to take back but who was given slots and blocks for it.
"""

import math

import numpy as np

from headrace.core.errors import RunnerFailed
from headrace.core.event import Outcome
from headrace.core.plan import BoolArray, IntArray, Plan, RowStatus, Work
from headrace.engine.allotment import Allotment
from headrace.engine.budget import StepBudget, longest_step_s, step_target_s
from headrace.engine.draft import Chunk, DecodeRows, Draft, Flight, Growth, SlotArray, Tariff
from headrace.engine.line import Lane
from headrace.engine.memory import Memory
from headrace.engine.room import StepRoom
from headrace.engine.sequence import Sequence
from headrace.engine.slots import some
from headrace.engine.state import State

_NONE = np.zeros(0, np.int32)
_ONE = np.array(1, np.int32)
_NO_ROWS = DecodeRows(np.zeros(0, np.intp), _NONE, 0)


class Scheduler:
    def __init__(self, state: State) -> None:
        self._state = state
        self._memory = Memory(state)
        self._allotment = Allotment(state, self._memory)
        self.room = StepRoom(max(state.config.max_step_tokens, state.config.slots))
        self._step = 0
        self._last_s: float | None = None
        self._last_served: list[Lane] = []
        self._last_chunked: set[int] = set()
        # Kept until a plan has told the runner: a planning may come to nothing after rows have grown.
        self._grown: list[Growth] = []
        # Read-only rows of a pure decode plan.
        self._ones = np.ones(state.config.slots, np.int32)
        self._yes = np.ones(state.config.slots, np.bool_)
        # A product with these adds up faster than `sum`, and in floats nothing overflows.
        self._summands = np.ones(state.config.slots)

    def schedule(self, now_s: float) -> Flight | None:
        """The next step, or None when no row can run. It is for the caller to launch, and then to `commit` or `refuse`."""
        state = self._state
        self._pass_time(now_s)
        state.expire(now_s)
        state.planning += 1
        if not (state.table.num_running or state.line.count):
            self._last_served, self._last_chunked = [], set()
            return None
        decode = self._decode_rows(now_s)
        draft = Draft(self._budget(decode, now_s), now_s)
        if state.prefilling or state.line.count:
            before = state.num_preemptions
            self._allotment.fill(draft)
            if state.num_preemptions != before:
                decode = self._forget_preempted(decode, draft)
        self._last_served = draft.served
        self._last_chunked = {chunk.sequence.number for chunk in draft.chunks}
        if not len(decode.slots) and not draft.chunks:
            return None
        return self._assemble(decode, draft)

    def commit(self, flight: Flight, now_s: float) -> None:
        """The rows are launched: charge them and count their tokens; ends by length are known now."""
        self._step += 1
        self.room.launched()
        self._charge(flight)
        self._count(flight, now_s)

    def refuse(self, flight: Flight, now_s: float, *, is_alone: bool) -> None:
        """The device found no memory for these rows: they wait in their slots, for the step in flight to give its own
        back, or for smaller steps. The one row of the smallest step ends: it would never fit. Where that is so of row
        after row it is not the rows: the device is of no use, and others may have one that is."""
        if not is_alone:
            self.room.num_refused += 1
        elif not self.room.refused(int(flight.plan.counts.sum())):
            if self.room.has_ended_one:
                raise RunnerFailed("the device has no memory for a step of one token, whichever it is")
            self.room.restore()
            status = RowStatus.OUT_OF_ROOM
            words = RowStatus.WORDS[status]
            self._state.end(flight.sequences[0], Outcome.FAILED, RowStatus.NAMES[status], now_s, words)

    def rest(self) -> None:
        """Nothing waits or runs: what comes after has waited for nothing that was planned."""
        self._last_s = None

    def _pass_time(self, now_s: float) -> None:
        """Tell the line and starved prefills what the time since the last plan was."""
        state = self._state
        if self._last_s is not None and now_s > self._last_s:
            passed_s = now_s - self._last_s
            if state.line.count:
                state.line.pass_time(passed_s, self._last_served)
            for sequence in state.prefilling.values():
                if sequence.number not in self._last_chunked and sequence.since_s <= self._last_s:
                    sequence.prefill_others_s += passed_s
        self._last_s = now_s
        if state.line.count:
            state.line.age(now_s)

    def _decode_rows(self, now_s: float) -> DecodeRows:
        """Slots that have caught up and have a cell to write their next token to."""
        table = self._state.table
        slots = table.decoding.nonzero()[0] if table.num_running else _NO_ROWS.slots
        if not len(slots):
            return _NO_ROWS
        starts = table.computed[slots]
        short = starts >= table.grow_at[slots]
        if some(short):
            slots = self._grow(slots, slots[short].tolist(), now_s)
            starts = table.computed[slots]
        return self._in_turn(DecodeRows(slots, starts, int(starts.dot(self._summands[: len(slots)])) + len(slots)))

    def _grow(self, slots: SlotArray, short: list[int], now_s: float) -> SlotArray:
        """Give blocks to rows that need one, preempting where the pool is empty; guaranteed rows first."""
        state = self._state
        table = state.table
        size = state.config.block_size
        needy: list[Sequence] = [table.sequences[slot] for slot in short]
        if state.pool.num_available >= len(needy) and not state.tenants.reserving:
            self._remember_grown(needy, state.grow(needy))
            return slots
        needy.sort(key=lambda sequence: not sequence.guaranteed)
        stalled: list[int] = []
        before = state.num_preemptions
        for sequence in needy:
            slot = sequence.slot
            if slot < 0:
                continue
            if self._memory.make_room_to_grow(sequence, now_s):
                self._remember_grown([sequence], state.grow([sequence]))
            elif sequence.slot >= 0 and table.computed[slot] >= len(sequence.blocks) * size:
                stalled.append(slot)
        if state.num_preemptions != before:
            slots = slots[table.decoding[slots]]
        return slots[~np.isin(slots, stalled)] if stalled else slots

    def _remember_grown(self, sequences: list[Sequence], blocks: list[int]) -> None:
        for sequence, block in zip(sequences, blocks, strict=True):
            self._grown.append(Growth(sequence, block, sequence.begun_in))

    def _in_turn(self, rows: DecodeRows) -> DecodeRows:
        """Where even the decode rows alone would pass the longest step, or find no memory, take turns."""
        state = self._state
        model = state.model
        left_s = longest_step_s(model, state.config.max_step_s) - model.c0_s
        room = len(rows.slots)
        if self.room.is_short:
            room = self.room.rows(is_awaited=bool(state.prefilling or state.line.count))
        fits = model.c_out_s * len(rows.slots) + model.c_kv_s * rows.kv_tokens <= left_s
        if (fits and len(rows.slots) <= room) or len(rows.slots) < 2:
            return rows
        turn = -(self._step * 7919) % len(rows.slots)
        slots = np.roll(rows.slots, turn)
        costs = np.cumsum(model.c_out_s + model.c_kv_s * (np.roll(rows.starts, turn) + 1))
        most = min(room, max(1, int(np.searchsorted(costs, left_s, side="right"))))
        return self._rows_of(np.sort(slots[:most]))

    def _rows_of(self, slots: SlotArray) -> DecodeRows:
        starts = self._state.table.computed[slots]
        return DecodeRows(slots, starts, int(starts.sum()) + len(slots))

    def _budget(self, decode: DecodeRows, now_s: float) -> StepBudget:
        state = self._state
        model = state.model
        config = state.config
        rows = len(decode.slots)
        decode_s = model.c0_s + model.c_out_s * rows + model.c_kv_s * decode.kv_tokens
        itl_s = state.table.shortest_itl_s() if rows else math.inf
        longest_s = longest_step_s(model, config.max_step_s)
        target_s = step_target_s(model, itl_s, state.ttft_targets.shortest_s(now_s), longest_s)
        tokens = min(config.max_step_tokens, self.room.tokens) - rows
        return StepBudget(
            model,
            target_s,
            decode_s,
            tokens,
            config.block_size,
            longest_s if rows else math.inf,
            rows,
            decode_s if rows else math.inf,
            multiple=config.part_tokens or 1,
        )

    def _forget_preempted(self, decode: DecodeRows, draft: Draft) -> DecodeRows:
        """Claims made while filling preempted rows that were already drafted."""
        draft.chunks = [chunk for chunk in draft.chunks if chunk.sequence.slot >= 0]
        return self._rows_of(decode.slots[self._state.table.decoding[decode.slots]])

    def _assemble(self, decode: DecodeRows, draft: Draft) -> Flight:
        state = self._state
        chunks = draft.chunks
        grown, self._grown = [growth for growth in self._grown if growth.is_current()], []
        slots, starts, counts, samples = self._rows(decode, chunks)
        work = _work(decode, chunks)
        freed = state.pool.take_freed()
        plan = Plan(
            step=self._step,
            slots=slots.astype(np.int32),
            starts=starts,
            counts=counts,
            samples=samples,
            masked_rows=self._masked_rows(slots, samples) if state.table.num_masked else _NONE,
            begun=tuple(draft.begun),
            grown_slots=np.array([growth.sequence.slot for growth in grown], np.int32) if grown else _NONE,
            grown_blocks=np.array([growth.block for growth in grown], np.int32) if grown else _NONE,
            freed_blocks=np.array(freed, np.int32) if freed else _NONE,
            work=work,
            predicted_s=state.model.predict(work),
            budget_s=draft.budget.target_s,
        )
        rows = list(enumerate(chunks, len(decode.slots)))
        table, tariff = state.table, self._tariff(plan.predicted_s)
        return Flight(plan, slots, table.sequences[slots], table.generation[slots], rows, tariff)

    def _rows(self, decode: DecodeRows, chunks: list[Chunk]) -> tuple[SlotArray, IntArray, IntArray, BoolArray]:
        """Slots, starts, counts and who samples: decode rows first, then chunks."""
        num_decode = len(decode.slots)
        ones, yes = self._ones[:num_decode], self._yes[:num_decode]
        if not chunks:
            return decode.slots, decode.starts, ones, yes
        slots = np.array([chunk.sequence.slot for chunk in chunks], np.intp)
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        counts = np.array([chunk.count for chunk in chunks], np.int32)
        samples = np.array([chunk.is_last for chunk in chunks])
        if not num_decode:
            return slots, starts, counts, samples
        return (
            np.concatenate([decode.slots, slots]),
            np.concatenate([decode.starts, starts]),
            np.concatenate([ones, counts]),
            np.concatenate([yes, samples]),
        )

    def _masked_rows(self, slots: SlotArray, samples: BoolArray) -> IntArray:
        return np.flatnonzero(self._state.table.masked[slots] & samples).astype(np.int32)

    def _charge(self, flight: Flight) -> None:
        """Charge every row's tenant for its part of the predicted step, recomputation excepted."""
        tenants = self._state.tenants
        tariff, slots, chunks = flight.tariff, flight.slots, flight.chunks
        if tenants.num_active == 1:
            num_decode = len(slots) - len(chunks)
            positions = flight.plan.work.kv_tokens - num_decode
            for _, chunk in chunks:
                positions -= chunk.start + chunk.count
            seconds = num_decode * tariff.row_s + tariff.position_s * positions
            for _, chunk in chunks:
                seconds += tariff.chunk_s(chunk)
            tenants.charge_one(flight.sequences[0].tenant, seconds)
        else:
            charges = flight.plan.starts * tariff.position_s + tariff.row_s
            for row, chunk in chunks:
                charges[row] = tariff.chunk_s(chunk)
            tenants.charge(self._state.table.tenant[slots], charges)

    def _tariff(self, predicted_s: float) -> Tariff:
        model = self._state.model
        marginal_s = predicted_s - model.c0_s
        scale = predicted_s / marginal_s if marginal_s > 0.0 else 0.0
        return Tariff((model.c_out_s + model.c_kv_s) * scale, model.c_kv_s * scale, scale)

    def _count(self, flight: Flight, now_s: float) -> None:
        """Decode rows all at once, chunks one by one: they are few, and there is more to do for each."""
        num_decode = len(flight.slots) - len(flight.chunks)
        if num_decode:
            self._count_decode(flight, num_decode, now_s)
        for _, chunk in flight.chunks:
            self._count_chunk(chunk, flight.plan.step, now_s)

    def _count_decode(self, flight: Flight, num_rows: int, now_s: float) -> None:
        table = self._state.table
        slots = flight.slots[:num_rows]
        table.computed[slots] = flight.plan.starts[:num_rows] + _ONE
        tokens = table.tokens[slots] + _ONE
        table.tokens[slots] = tokens
        table.last_step[slots] = flight.plan.step
        ending = tokens >= table.limit[slots]
        if some(ending):
            for row in ending.nonzero()[0].tolist():
                self._state.finish_planned(flight.sequences[row], now_s)

    def _count_chunk(self, chunk: Chunk, step: int, now_s: float) -> None:
        state, sequence = self._state, chunk.sequence
        table, slot = state.table, sequence.slot
        end = chunk.start + chunk.count
        table.computed[slot] = end
        table.last_step[slot] = step
        if end > sequence.num_charged:
            sequence.num_charged = end
        if not chunk.is_last:
            return
        del state.prefilling[sequence.number]
        # It ends where its ids did; the one that it samples is the next.
        table.tokens[slot] = end + 1
        if end + 1 >= sequence.limit:
            state.finish_planned(sequence, now_s)
        else:
            table.decoding[slot] = True
            table.itl_changed = True


def _work(decode: DecodeRows, chunks: list[Chunk]) -> Work:
    """As `core.plan.measure_work` has it: a chunk of one token is a decode row."""
    prefill_tokens = attended = 0
    decode_rows, kv_tokens = len(decode.slots), decode.kv_tokens
    for chunk in chunks:
        end = chunk.start + chunk.count
        kv_tokens += end
        if chunk.count == 1:
            decode_rows += 1
        else:
            prefill_tokens += chunk.count
            attended += chunk.count * end
    return Work(prefill_tokens, decode_rows, kv_tokens, attended)
