"""What occupants of slots ask of sampling that the graph does not do, and their rows' packet.

Enters what a request forbids, favours and penalises into its slot's lines when it begins; a step then only names the
lines. Never waits for the device. An occupant that finds no memory for its lines fails alone.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.config import EngineConfig
from headrace.core.plan import IntArray, Masks, RowStatus, SlotStart
from headrace.core.request import SamplingParams
from headrace.runner.cuda.host_slots import HostSlots
from headrace.runner.cuda.lane import Lane
from headrace.runner.cuda.odd_space import FIELDS, OddSpace, mask_words
from headrace.runner.cuda.shortage import fits_at_last
from headrace.runner.torch import penalties

WordArray = NDArray[np.int32]
_NO_WORDS = np.zeros((0, 0), np.int32)
# Sections of a packet: those that are the same for every row of a slot, but for its mask and while stops are forbidden.
_TABLE = slice(FIELDS.index("bias"), len(FIELDS))
_PLACES, _SLOTS, _LIMITS, _MASKS = (FIELDS.index(name) for name in ("places", "slots", "limits", "masks"))
_SCORED, _ALTERNATIVES = len(FIELDS), len(FIELDS) + 1


class ScoredSamples(NamedTuple):
    """Rows of the plan whose tokens are scored, in the order of the answer: the place of each token in its sequence, and
    how many alternatives it has."""

    rows: NDArray[np.int64]
    positions: IntArray
    alternatives: IntArray


class OddPacket(NamedTuple):
    """`letter` names so many rows under rules, and those that are scored, if any are."""

    letter: Tensor
    num_ruled: int
    scored: ScoredSamples | None

    @property
    def num_scored(self) -> int:
        return 0 if self.scored is None else len(self.scored.rows)


class OddRows:
    """What a packet says of each slot: its lines, -1 for none, and the factors of its penalties; and the alternatives that
    it asked for, -1: no scores."""

    def __init__(self, config: EngineConfig, slots: HostSlots, space: OddSpace, lane: Lane) -> None:
        self._slots = slots
        self._space = space
        self._lane = lane
        self._eos_ids = tuple(config.eos_ids)
        self._words = mask_words(config.vocab_size)
        self._table = np.full((_TABLE.stop - _TABLE.start, config.slots), -1, np.int32)
        self._bias, self._limits, self._counts = self._table[:3]
        self._factors = self._table[3:6].view(np.float32)
        self._alternatives = np.full(config.slots, -1, np.int32)
        # Before this position another limit holds, that of the next line; and slots that have one.
        self._stops_from = np.zeros(config.slots, np.int64)
        self._waiting: set[int] = set()
        self._masked = np.zeros(config.slots, np.bool_)
        # Whether there are rules whatever the position.
        self._ruled = np.zeros(config.slots, np.bool_)

    def begin(self, start: SlotStart) -> None:
        """An occupant that there is no memory for has failed before its first row."""
        slot = start.slot
        self._forget(slot)
        if not self._slots.special_until[slot]:
            return
        if not fits_at_last(lambda: self._enter(slot, start.sampling, start.num_prompt), self._lane.free_bytes):
            self._forget(slot)
            self._slots.failed[slot] = RowStatus.OUT_OF_ROOM
            self._slots.special_until[slot] = 0
            self._slots.prompt_alternatives[slot] = -1

    def lay_out(
        self, places: NDArray[np.intp], slots: IntArray, ends: IntArray, rows: NDArray[np.intp], masks: Masks | None
    ) -> OddPacket:
        """The samples at `places` of a step, which are these rows of the plan; `ends` are their tokens' positions."""
        is_ruled = self._ruled[slots]
        early = ends < self._stops_from[slots] if self._waiting else None
        if early is not None:
            is_ruled |= early
        ruled = np.flatnonzero(is_ruled)
        scored = np.flatnonzero(self._alternatives[slots] >= 0)
        of, count, layout = slots[ruled], len(ruled), self._space.layout
        bits = self._mask_bits(of, rows[ruled], masks)
        letter = self._lane.letter(layout.masks_at + bits.size)
        words: WordArray = letter.numpy()
        sections = words[: layout.masks_at].reshape(layout.shape)
        if count:
            sections[_PLACES, :count] = places[ruled]
            sections[_SLOTS, :count] = of
            sections[_TABLE, :count] = self._table.take(of, 1)
        if early is not None:
            sections[_LIMITS, :count][early[ruled]] = 2 * slots[early] + 1
        if bits.size:
            sections[_MASKS, :count][self._masked[of]] = np.arange(len(bits))
            words[layout.masks_at :] = bits.reshape(-1)
        if not len(scored):
            return OddPacket(letter, count, None)
        told = ScoredSamples(rows[scored].astype(np.int64), ends[scored], self._alternatives[slots[scored]])
        sections[_SCORED, : len(scored)] = places[scored]
        sections[_ALTERNATIVES, : len(scored)] = told.alternatives
        return OddPacket(letter, count, told)

    def _mask_bits(self, slots: IntArray, rows: NDArray[np.intp], masks: Masks | None) -> WordArray:
        """[masked rows, words]. Whoever waits for a mask and has none may take nothing."""
        waiting = rows[self._masked[slots]].tolist()
        if not waiting:
            return _NO_WORDS
        bits = np.zeros((len(waiting), self._words), np.int32)
        if masks is not None:
            entry_of = {row: entry for entry, row in enumerate(masks.rows.tolist())}
            width = min(self._words, masks.words.shape[1])
            for line, row in enumerate(waiting):
                if row in entry_of:
                    bits[line, :width] = masks.words[entry_of[row], :width].view(np.int32)
        return bits

    def _forget(self, slot: int) -> None:
        self._table[:, slot] = self._alternatives[slot] = -1
        self._stops_from[slot] = 0
        self._waiting.discard(slot)
        self._masked[slot] = self._ruled[slot] = False

    def _enter(self, slot: int, sampling: SamplingParams, num_prompt: int) -> None:
        if sampling.logit_bias:
            self._enter_bias(slot, sampling)
        self._enter_limits(slot, sampling, num_prompt)
        if penalties.asks(sampling):
            held = self._slots.ids[slot, : self._slots.known[slot]]
            self._space.set_counts(slot, self._letter(held), num_prompt)
            self._counts[slot] = slot
            factors = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
            self._factors[:, slot] = factors
        self._masked[slot] = sampling.masked
        self._ruled[slot] = sampling.masked or (self._table[:3, slot] >= 0).any()
        if sampling.logprobs is not None:
            self._alternatives[slot] = sampling.logprobs

    def _enter_bias(self, slot: int, sampling: SamplingParams) -> None:
        # An id named twice has the sum of its biases.
        bias: dict[int, float] = {}
        for token, value in sampling.logit_bias:
            bias[token] = bias.get(token, 0.0) + value
        values = np.array(list(bias.values()), np.float32)
        letter = self._letter(np.concatenate((np.array(list(bias), np.int32), values.view(np.int32))))
        self._space.set_bias(slot, letter[: len(bias)], letter[len(bias) :].view(torch.float32))
        self._bias[slot] = slot

    def _enter_limits(self, slot: int, sampling: SamplingParams, num_prompt: int) -> None:
        """What may be taken at all; and what before stops are allowed."""
        stops = sampling.stop_ids if sampling.ignore_eos else (*sampling.stop_ids, *self._eos_ids)
        waits = bool(sampling.min_tokens and stops)
        if not sampling.allowed_ids and not waits:
            return
        bits = np.full(32 * self._words, not sampling.allowed_ids, np.uint8)
        bits[list(sampling.allowed_ids)] = 1
        if sampling.allowed_ids:
            self._space.set_limit(2 * slot, self._packed(bits))
            self._limits[slot] = 2 * slot
        if waits:
            bits[list(stops)] = 0
            self._space.set_limit(2 * slot + 1, self._packed(bits))
            self._stops_from[slot] = num_prompt + sampling.min_tokens
            self._waiting.add(slot)

    def _packed(self, bits: NDArray[np.uint8]) -> Tensor:
        return self._letter(np.packbits(bits, bitorder="little").view(np.int32))

    def _letter(self, words: WordArray) -> Tensor:
        letter = self._lane.letter(len(words))
        letter.numpy()[:] = words
        return letter
