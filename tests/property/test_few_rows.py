"""Steps of few rows, computed in plain numbers, against the same steps as vectors: tokens, memory and refusals are equal.

Slots share one long prompt, so that one may hit another's blocks. Some plans are wrong on purpose.
"""

from dataclasses import dataclass, field
from random import Random
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from headrace.core.errors import RunnerFailed
from headrace.core.plan import Masks, Plan, SlotStart
from headrace.runner import fake
from headrace.runner.device import FEW
from headrace.runner.fake import FakeRunner
from tests.unit.runner.plans import CONFIG, Row, begin, ints, plan, run

PROMPT = [7 * place % CONFIG.vocab_size for place in range(30)]
SIZE, SLOTS, OWN = CONFIG.block_size, FEW + 1, 12
KINDS = (
    "start",
    "count",
    "count",
    "samples",
    "slot",
    "twice",
    "freed",
    "freed",
    "freed",
    "stolen",
    "stolen",
    "one",
    "none",
)
STATE = ("_table", "_numbers", "_num_blocks", "_last_ids", "_lengths", "_computed", "_keys")


@dataclass
class Slot:
    """What a right plan knows of a slot; its own blocks are taken into use as it grows."""

    slot: int
    blocks: list[int] = field(default_factory=list)
    num_given: int = 0
    computed: int = 0
    length: int = 0

    def begin(self, chance: Random, number: int, other: "Slot") -> SlotStart:
        self.length = chance.randint(1, chance.choice([4, len(PROMPT)]))
        hit = min(other.computed, self.length - 1) // SIZE if other is not self and chance.random() < 0.2 else 0
        own = range(OWN * self.slot, OWN * self.slot + OWN)
        self.blocks = other.blocks[:hit] + chance.sample(own, OWN)
        self.num_given, self.computed = hit + chance.randint(0, 6), hit * SIZE
        ids, given = PROMPT[: self.length], self.blocks[: self.num_given]
        return begin(self.slot, ids, given, number=number, num_computed=self.computed, seed=number % 2)

    def row(self, chance: Random) -> Row:
        count = chance.choice(
            [
                1,
                self.length - self.computed,
                self.length - self.computed,
                chance.randint(1, self.length - self.computed),
            ]
        )
        samples = self.computed + count == self.length
        row = self.slot, self.computed, count, samples
        self.computed, self.length = self.computed + count, self.length + samples
        return row

    def grown(self) -> list[tuple[int, int]]:
        needed = -(-self.computed // SIZE)
        blocks = self.blocks[self.num_given : needed]
        self.num_given = max(self.num_given, needed)
        return [(self.slot, block) for block in blocks]


class Author:
    """Writes right plans, and with a small chance a wrong one. It does not know what tokens a slot was given, so that a hit
    may turn out to be none."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.slots = [Slot(slot) for slot in range(SLOTS)]
        self.number = 0

    def write(self, step: int) -> Plan:
        chance = self.chance
        rows: list[Row] = []
        begun: list[SlotStart] = []
        grown: list[tuple[int, int]] = []
        freed: list[int] = []
        for one in chance.sample(self.slots, chance.choice([1, 1, 1, 2, 3, FEW, SLOTS])):
            if not one.length or one.length > OWN * SIZE - 1 or chance.random() < 0.05:
                freed += [block for block in one.blocks[: one.num_given] if block // OWN == one.slot]
                begun.append(one.begin(chance, self.number, chance.choice(self.slots)))
                self.number += 1
            rows.append(one.row(chance))
            grown += one.grown()
        masked = [row for row in range(len(rows)) if chance.random() < 0.05]
        if chance.random() < 0.04:
            self.spoil(rows, grown, freed)
        return plan(step, rows, begun=begun, grown=grown, freed=freed, masked=masked)

    def spoil(self, rows: list[Row], grown: list[tuple[int, int]], freed: list[int]) -> None:
        chance = self.chance
        place = chance.randrange(len(rows))
        slot, start, count, samples = rows[place]
        block = self.slots[slot].blocks[max(0, start - chance.randint(0, 1)) // SIZE]
        match chance.choice(KINDS):
            case "start":
                rows[place] = slot, start + chance.choice([-1, 1]), count, samples
            case "count":
                rows[place] = slot, start, chance.choice([0, 0, count - 1, count + 1, 100]), chance.random() < 0.3
            case "samples":
                rows[place] = slot, start, count, not samples
            case "slot":
                rows[place] = chance.randrange(-1, CONFIG.slots), start, count, samples
            case "twice":
                rows.append(rows[place])
            case "freed":
                freed.append(block)
            case "stolen":
                grown.append((chance.randrange(SLOTS), block))
            case "one":
                grown[:] = [(slot, block) for slot, _ in grown]
            case "none":
                grown.clear()


def outcome(runner: FakeRunner, made: Plan, masks: Masks) -> tuple[object, ...]:
    try:
        result = run(runner, made, masks)
    except RunnerFailed as error:
        return type(error).__name__, error.message
    return (
        result.tokens.dtype,
        result.tokens.tolist(),
        result.statuses.dtype,
        result.statuses.tolist(),
        result.elapsed_s,
    )


def memory(runner: FakeRunner) -> list[object]:
    device = runner._device
    assert device is not None
    held = [device.store.values, device.store.states, device.store.owners]
    return [np.asarray(part).tolist() for part in held + [getattr(device, name) for name in STATE]]


def test_right_plans_of_few_rows_are_computed_in_plain_numbers() -> None:
    runner, author = FakeRunner(CONFIG), Author(Random(0))
    device = runner._device
    assert device is not None
    with patch.object(author, "spoil"):
        plans = [author.write(step) for step in range(25)]
    assert {len(made.slots) > FEW for made in plans} == {False, True}
    for made in plans:
        masks = Masks(made.masked_rows, np.full((len(made.masked_rows), 16), 2**32 - 1, np.uint32))
        with patch.object(device, "compute", wraps=device.compute) as vectors:
            run(runner, made, masks)
        assert vectors.called == (len(made.slots) > FEW)


@given(seed=st.integers(0, 2**32), luck=st.sampled_from([0.0, 0.2]), scripted=st.booleans())
@settings(max_examples=400)
def test_few_rows_are_what_vectors_say(seed: int, luck: float, scripted: bool) -> None:
    few, vectors = (FakeRunner(CONFIG, eos_probability=luck) for _ in range(2))
    for runner in (few, vectors):
        for number in range(0, 50, 2 if scripted else 50):
            runner.script(f"r{number}", 0, 3)
    chance = Random(seed)
    author = Author(chance)
    for step in range(40):
        made = author.write(step)
        words = np.full((1, 16), chance.choice([0, 2**32 - 1, 1 << 9]), np.uint32)
        masks = Masks(ints([0]), words)
        said = outcome(few, made, masks)
        with patch.object(fake, "FEW", -1):
            assert said == outcome(vectors, made, masks)
        assert memory(few) == memory(vectors)
        if isinstance(said[0], str):
            break
