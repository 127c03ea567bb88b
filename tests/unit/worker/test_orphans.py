"""What a lost gateway leaves at a worker: it runs on, is attached once and wholly, or is freed."""

import pytest
from msgspec.structs import replace

from headrace.core.event import Outcome
from headrace.core.hashing import sequence_digest
from headrace.core.messages import Abort, Attach, AttachPart, Drain, End, Pause, Submit, SubmitPart
from headrace.core.request import Request, SamplingParams
from tests.builders import request
from tests.unit.worker.rig import truth_of
from tests.unit.worker.turning import TurnRig

MADE = request("r", 8, 12)
TRUTH = truth_of(MADE)


def begun(num_tokens: int, made: Request = MADE, **others: object) -> TurnRig:
    """A sequence of link 1 that has said so many tokens."""
    rig = TurnRig(**others)  # type: ignore[arg-type]
    rig.submit(1, made)
    while len(rig.ears[1].tokens.get(1, [])) < num_tokens:
        rig.turn()
    return rig


def undisturbed(made: Request = MADE) -> End:
    rig = begun(0, made)
    rig.run()
    return rig.ears[1].ended[1]


def assert_nothing_left(rig: TurnRig) -> None:
    rig.run()
    rig.engine.check()
    assert rig.loop._keys.count == 0 and len(rig.loop._orphans) == 0
    assert rig.engine.num_used_blocks == 0 and rig.engine.num_running == 0 and rig.engine.num_waiting == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_an_orphan_goes_on_and_is_attached_without_computing_anything_twice(depth: int) -> None:
    rig = begun(4, depth=depth)
    heard = len(rig.ears[1].frames)
    rig.leave(1)
    rig.turn(3)
    rig.attach(9, "r", 4)
    rig.run()
    ear = rig.ears[2]
    assert ear.accepted == [9] and [*TRUTH[:4], *ear.tokens[9]] == TRUTH
    assert len(rig.ears[1].frames) == heard
    assert ear.ended[9].counters == undisturbed().counters and ear.ended[9].counters.recomputed == 0
    assert_nothing_left(rig)


@pytest.mark.parametrize("index", range(13))
@pytest.mark.parametrize("has_ended", [False, True])
def test_it_is_attached_at_every_index_there_is(index: int, has_ended: bool) -> None:
    rig = begun(6)
    rig.leave(1)
    rig.turn(max(1, index - 6))
    if has_ended:
        rig.run()
    known = len(rig.loop._keys.of(0)[0].ids)
    rig.attach(9, "r", index)
    rig.turn()
    first = next(frame for link, frame in rig.frames if link == 2)
    assert first.accepted == (9,) and bool(first.ended) is (known == 12)
    assert [at for _, at, _ in first.rows()] == list(range(index, known))
    rig.run()
    assert rig.ears[2].tokens.get(9, []) == TRUTH[index:]
    assert rig.ears[2].ended[9].outcome is Outcome.FINISHED and rig.ears[2].ended[9].reason == "length"
    assert_nothing_left(rig)


@pytest.mark.parametrize("index", [0, 3, 5, 7])
def test_replayed_ids_count_as_tokens(index: int) -> None:
    rig = begun(0, replace(MADE, replay_ids=tuple(TRUTH[:5])))
    rig.ears[1].begins[1] = 5
    rig.turn(4)
    rig.leave(1)
    rig.run()
    rig.attach(9, "r", index)
    assert_nothing_left(rig)
    assert rig.ears[2].tokens[9] == TRUTH[index:]


def test_each_choice_is_attached_by_its_number() -> None:
    rig = TurnRig()
    rig.tell(Submit((SubmitPart((1, 2), MADE, None, 4), SubmitPart((3,), request("r", 5, 7, seed=3), None, 6))))
    rig.turn(3)
    rig.leave(1)
    for key, number in ((20, 6), (21, 5), (22, 4)):
        rig.attach(key, "r", 0, number=number)
    assert_nothing_left(rig)
    tokens = rig.ears[2].tokens
    assert tokens[22] == TRUTH and tokens[21] == truth_of(replace(MADE, choice=1))
    assert tokens[20] == truth_of(request("r", 5, 7, seed=3))


def refusal_of(rig: TurnRig, key: int = 9) -> tuple[str, str]:
    rig.turn()
    refusal = rig.ears[2].refused[key]
    return refusal.code, refusal.message


@pytest.mark.parametrize(
    "who", [AttachPart(9, "a", "s", 0, 0), AttachPart(9, "b", "r", 0, 0), AttachPart(9, "a", "r", 1, 0)]
)
def test_another_tenant_request_or_number_is_unknown(who: AttachPart) -> None:
    rig = begun(3)
    rig.leave(1)
    rig.tell(Attach((who,)), 2)
    assert refusal_of(rig) == ("not_attachable", "no such sequence is here")
    assert rig.engine.num_running == 1


@pytest.mark.parametrize("index", [-1, 5, 2**40])
def test_an_index_that_is_not_there_is_refused_and_the_orphan_stays(index: int) -> None:
    rig = begun(3)
    rig.leave(1)
    rig.attach(9, "r", index)
    assert refusal_of(rig)[0] == "not_attachable"
    rig.attach(10, "r", 3)
    assert_nothing_left(rig)
    assert rig.ears[2].tokens[10] == TRUTH[3:]


def test_scores_are_told_once_so_who_missed_some_is_refused() -> None:
    scored = request("r", 8, 12, sampling=SamplingParams(logprobs=1))
    rig = begun(3, scored)
    rig.leave(1)
    rig.attach(9, "r", 2)
    assert refusal_of(rig)[0] == "not_attachable"
    assert_nothing_left(rig)


def test_who_missed_no_score_gets_the_rest() -> None:
    rig = begun(3, request("r", 8, 12, sampling=SamplingParams(logprobs=1)))
    rig.leave(1)
    rig.attach(9, "r", 3)
    rig.run()
    assert len(rig.ears[2].tokens[9]) == 9 and 9 in rig.ears[2].ended


def test_scores_of_a_prompt_that_may_have_been_told_are_refused() -> None:
    rig = begun(0, request("r", 8, 12, sampling=SamplingParams(prompt_logprobs=0)))
    rig.turn()
    rig.leave(1)
    rig.attach(9, "r", 0)
    assert refusal_of(rig)[0] == "not_attachable"


def test_of_two_that_attach_the_later_has_it_and_the_earlier_is_told() -> None:
    rig = begun(3)
    rig.leave(1)
    rig.attach(5, "r", 3, link=2)
    rig.attach(6, "r", 2, link=3)
    rig.run()
    assert (rig.ears[2].ended[5].outcome, rig.ears[2].ended[5].reason) == (Outcome.ABORTED, "taken")
    assert rig.ears[3].tokens[6] == TRUTH[2:] and rig.ears[3].ended[6].reason == "length"
    assert_nothing_left(rig)


def test_it_is_taken_from_a_gateway_that_still_seems_to_be_there() -> None:
    rig = begun(3)
    rig.attach(7, "r", 1)
    rig.turn(2)
    rig.tell(Abort(1))
    rig.tell(Pause(1))
    rig.run()
    assert rig.ears[1].ended[1].reason == "taken" and rig.ears[1].ended[1].counters.emitted == 3
    assert rig.ears[2].tokens[7] == TRUTH[1:]
    assert_nothing_left(rig)


def test_an_attachment_that_is_delivered_twice_is_answered_once() -> None:
    rig = begun(3)
    rig.leave(1)
    rig.attach(9, "r", 3)
    rig.attach(9, "r", 3)
    rig.run()
    assert rig.ears[2].accepted == [9] and rig.ears[2].tokens[9] == TRUTH[3:]


def test_a_goodbye_aborts_at_once_also_what_earlier_connections_left() -> None:
    rig = TurnRig()
    rig.submit(1, request("one", 8, 100))
    rig.turn(2)
    rig.leave(1)
    rig.submit(2, request("two", 8, 100))
    rig.turn(2)
    assert rig.engine.num_running == 2
    rig.leave(1, for_good=True)
    rig.turn()
    assert rig.engine.num_running == 0
    assert_nothing_left(rig)


@pytest.mark.parametrize("attaches", [False, True])
def test_a_gateway_that_greets_again_has_moved_its_sequences_unless_it_attaches(attaches: bool) -> None:
    rig = begun(3)
    rig.submit(1, request("other", 8, 100), 2)
    rig.turn()
    rig.leave(1)
    rig.leave(2)
    rig.greet(1, attaches=attaches)
    rig.turn()
    assert rig.engine.num_running == (2 if attaches else 1)
    rig.attach(9, "r", 0, link=3)
    rig.turn()
    assert (9 in rig.ears[3].accepted) is attaches


def test_who_submits_the_name_of_an_orphan_replays_it() -> None:
    rig = begun(3)
    rig.leave(1)
    rig.submit(8, replace(MADE, replay_ids=tuple(TRUTH[:3])), 2)
    rig.ears[2].begins[8] = 3
    rig.turn()
    assert rig.engine.num_running + rig.engine.num_waiting == 1
    assert_nothing_left(rig)
    assert rig.ears[2].tokens[8] == TRUTH[3:]


@pytest.mark.parametrize("has_ended", [False, True])
def test_what_nobody_attaches_expires_and_frees_all_it_had(has_ended: bool) -> None:
    rig = begun(3, request("r", 8, 5 if has_ended else 200), orphan_s=30.0)
    rig.leave(1)
    rig.turn(3)
    assert rig.loop.patience_s() <= 30.0
    rig.clock.time_s += 29.0
    rig.turn()
    assert rig.loop._keys.count == 1
    rig.clock.time_s += 2.0
    rig.turn(2)
    assert rig.engine.num_used_blocks == 0 and rig.loop._keys.count == 0
    rig.attach(9, "r", 3)
    assert refusal_of(rig)[0] == "not_attachable"


@pytest.mark.parametrize("by", ["wish", "crowd"])
def test_a_paused_orphan_stays_paused_and_goes_on_when_attached(by: str) -> None:
    rig = begun(3)
    if by == "wish":
        rig.tell(Pause(1))
    else:
        rig.crowd(True)
    rig.turn(2)
    said = rig.ears[1].tokens[1]
    rig.leave(1)
    rig.run()
    assert rig.loop._keys.of(0)[0].ids.tolist() == said
    rig.attach(9, "r", 0)
    assert_nothing_left(rig)
    assert rig.ears[2].tokens[9] == TRUTH


def test_attached_by_a_crowded_gateway_it_waits_for_room() -> None:
    rig = begun(3)
    rig.leave(1)
    rig.crowd(True, 2)
    rig.turn()
    rig.attach(9, "r", 3)
    rig.run()
    assert len(rig.ears[2].tokens[9]) < 9 and 9 not in rig.ears[2].ended
    rig.crowd(False, 2)
    assert_nothing_left(rig)
    assert rig.ears[2].tokens[9] == TRUTH[3:]


@pytest.mark.parametrize("grace_s", [0.05, 1e6])
def test_a_drain_waits_for_orphans_until_they_expire_or_its_grace_is_over(grace_s: float) -> None:
    rig = begun(3, request("r", 8, 200), orphan_s=1.0)
    rig.leave(1)
    rig.tell(Drain(grace_s))
    rig.turn(2)
    drained: list[bool] = []
    while not any(drained) and len(drained) < 200:
        drained.append(rig.loop.is_drained)
        rig.turn()
    assert drained[-1] and not drained[0] and rig.clock.now_s() < 1.5
    assert rig.engine.num_used_blocks == 0


def test_a_draining_worker_still_hands_its_orphans_over() -> None:
    rig = begun(3)
    rig.leave(1)
    rig.tell(Drain(1e6))
    rig.attach(9, "r", 3)
    rig.loop.run()
    assert rig.ears[2].tokens[9] == TRUTH[3:]


def test_who_means_another_sequence_of_the_same_name_is_refused() -> None:
    """A name may be given twice. Where what was said is not the same, what follows is another reply."""
    rig = begun(5)
    rig.leave(1)
    seed = MADE.sampling.seed
    right = sequence_digest(MADE.prompt_ids, seed, 0, TRUTH[:3])
    wrong = [
        sequence_digest(MADE.prompt_ids, seed, 0, [*TRUTH[:2], TRUTH[2] + 1]),
        sequence_digest(MADE.prompt_ids, seed + 1, 0, TRUTH[:3]),
        sequence_digest(MADE.prompt_ids, seed, 1, TRUTH[:3]),
        sequence_digest(MADE.prompt_ids[:-1], seed, 0, TRUTH[:3]),
        b"?",
    ]
    for key, digest in enumerate([*wrong, right], 9):
        rig.ears[2].begins[key] = 3
        rig.tell(Attach((AttachPart(key, "a", "r", 0, 3, digest),)), 2)
        rig.turn()
    rig.run()
    assert {key: refusal.message for key, refusal in rig.ears[2].refused.items()} == dict.fromkeys(
        range(9, 14), "another sequence has this name"
    )
    assert [*TRUTH[:3], *rig.ears[2].tokens[14]] == TRUTH
    assert_nothing_left(rig)


def test_what_nobody_may_come_for_is_freed_with_its_link() -> None:
    rig = TurnRig()
    rig.tell(Submit((SubmitPart((1,), MADE, outlives=False), SubmitPart((2,), request("s", 8, 12), first=1))))
    rig.turn(4)
    rig.leave(1)
    rig.turn()
    assert [entry.key for entry in rig.loop._keys] == [0] and rig.engine.num_running == 1
    rig.attach(9, "r", 0)
    rig.attach(10, "s", 0, number=1)
    rig.run()
    assert list(rig.ears[2].refused) == [9] and list(rig.ears[2].ended) == [10]
    assert_nothing_left(rig)
