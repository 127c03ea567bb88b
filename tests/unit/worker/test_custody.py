"""Sequences that go from hand to hand: masked ones, those told in several frames, and many at random."""

import random
from array import array
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from headrace.core.event import Counters, Outcome, StepFrame
from headrace.core.messages import GrammarText, Submit
from headrace.core.request import Request
from headrace.text.byte_vocabulary import byte_vocabulary
from headrace.text.lexicon import Lexicon
from headrace.text.matchers import Matchers
from headrace.text.tokenizer import Tokenizer
from headrace.worker.keys import Entry, KeyTable
from headrace.worker.lifecycle import NO_LOAD
from headrace.worker.packing import FramePacker
from tests.builders import engine_config, part, prompt, request
from tests.unit.worker.rig import truth_of
from tests.unit.worker.test_orphans import MADE, assert_nothing_left
from tests.unit.worker.turning import TurnRig


@pytest.fixture
def byte_rig() -> Iterator[TurnRig]:
    vocabulary = byte_vocabulary(512)
    assert vocabulary.eos_id is not None
    config = engine_config(vocab_size=512, eos_ids=(vocabulary.eos_id,))
    matchers = Matchers(Lexicon(Tokenizer(vocabulary), 512, config.eos_ids))
    yield TurnRig(config, matchers)
    matchers.close()


GRAMMAR = GrammarText("regex", "(ab){12}")


def test_a_masked_sequence_follows_its_grammar_wherever_it_is_attached(byte_rig: TurnRig) -> None:
    rig = byte_rig
    rig.submit(1, request("g", 8, 40, ids=prompt(8, 1, 256)), grammar=GRAMMAR)
    while len(rig.ears[1].tokens.get(1, [])) < 5:
        if not rig.loop.turn():
            assert rig.inbox.wait(10.0)
    rig.leave(1)
    rig.turn(4)
    rig.attach(9, "g", 5)
    rig.run()
    assert bytes([*rig.ears[1].tokens[1], *rig.ears[2].tokens[9][:-1]]) == b"ab" * 12
    assert_nothing_left(rig)


def test_one_whose_grammar_is_still_being_built_is_attached_or_refused_with_its_order(byte_rig: TurnRig) -> None:
    rig = byte_rig
    made = request("g", 8, 40, ids=prompt(8, 1, 256))
    rig.submit(1, made, grammar=GRAMMAR)
    bad = replace(made, request_id="bad")
    rig.tell(Submit((part(2, bad, GrammarText("choice", "this is no list"), n=2),)))
    rig.leave(1)
    rig.attach(9, "g", 0)
    rig.attach(10, "bad", 0, number=1)
    while not all(rig.ears[2].is_over(key) for key in (9, 10)):
        if not rig.loop.turn() and not all(rig.ears[2].is_over(key) for key in (9, 10)):
            assert rig.inbox.wait(10.0)
    assert bytes(rig.ears[2].tokens[9][:-1]) == b"ab" * 12
    assert rig.ears[2].refused[10].keys == (10,)
    assert_nothing_left(rig)


def test_what_is_too_much_for_a_frame_is_told_in_several() -> None:
    table = KeyTable()
    packer = FramePacker(table, lambda _: None, most_rows=10)
    for key, count in ((1, 25), (2, 3), (3, 9)):
        entry = Entry(7, key, 0.0, MADE, ("a", "r", key), key, array("i", range(count)))
        table.add(entry)
        packer.tell_again(entry, 1, Counters(emitted=count))
    frames = [frame for _, frame in packer.pack(StepFrame(-1), NO_LOAD)]
    rows = [row for frame in frames for row in frame.rows()]
    assert rows == [(key, at, at) for key, count in ((1, 25), (2, 3), (3, 9)) for at in range(1, count)]
    assert [len(frame.rows()) for frame in frames] == [10, 10, 6, 8]
    assert [frame.accepted for frame in frames] == [(1, 2, 3), (), (), ()]
    assert frames[0].counter_rows()[0].tolist() == [0, 0, 25, 0, 0, 0]


class Custody:
    """Gateways that come, take over and go at random; each sequence belongs to whoever had it last."""

    def __init__(self, seed: int) -> None:
        self.luck = random.Random(seed)
        self.rig = TurnRig(engine_config(slots=4, blocks=64), depth=1 + seed % 2, orphan_s=1e6)
        self.made: dict[str, Request] = {}
        self.holder: dict[str, tuple[int, int] | None] = {}
        self.links = [1, 2, 3]
        self.next_link = 4
        self.keys = iter(range(10**6))

    def submit(self) -> None:
        name = f"r{len(self.made)}"
        link, key = self.luck.choice(self.links), next(self.keys)
        self.made[name] = request(name, self.luck.randint(1, 20), self.luck.randint(1, 25))
        self.holder[name] = (link, key)
        self.rig.submit(key, self.made[name], link)

    def lose(self) -> None:
        """A connection breaks, and a new gateway comes."""
        place = self.luck.randrange(len(self.links))
        gone, self.links[place] = self.links[place], self.next_link
        self.next_link += 1
        self.rig.turn()  # what it was sent before it broke
        self.rig.leave(gone)
        for name, held in self.holder.items():
            if held is not None and held[0] == gone and held[1] not in self.rig.ears[gone].ended:
                self.holder[name] = None
        self.rig.turn()

    def attach(self) -> None:
        open_names = [name for name, held in self.holder.items() if held is None or not self.is_over(held)]
        if open_names:
            name, link, key = self.luck.choice(open_names), self.luck.choice(self.links), next(self.keys)
            self.holder[name] = (link, key)
            self.rig.attach(key, name, 0, link)
            self.rig.turn()

    def is_over(self, held: tuple[int, int]) -> bool:
        return self.rig.ears[held[0]].is_over(held[1])


@pytest.mark.parametrize("seed", range(4))
def test_random_losses_and_attachments_end_every_sequence_once_for_who_had_it_last(seed: int) -> None:
    """250 losses or attachments each: a thousand in all."""
    story = Custody(seed)
    for _ in range(250):
        story.submit()
        story.luck.choice((story.lose, story.attach))()
        story.rig.turn(story.luck.randint(0, 3))
    while any(held is None or not story.is_over(held) for held in story.holder.values()):
        story.attach()
    for name, held in story.holder.items():
        assert held is not None
        ear = story.rig.ears[held[0]]
        assert held[1] not in ear.refused, f"{name} was lost"
        assert ear.ended[held[1]].outcome is Outcome.FINISHED
        assert ear.tokens[held[1]] == truth_of(story.made[name])
    finished = sum(end.outcome is Outcome.FINISHED for ear in story.rig.ears.values() for end in ear.ended.values())
    assert finished == len(story.made)
    assert_nothing_left(story.rig)
