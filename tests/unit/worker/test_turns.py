"""The engine's thread, turned by hand: every submission ends once, whatever comes when."""

import math
import random
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from headrace.core.config import CostProfile, TenantConfig
from headrace.core.errors import RunnerFailed
from headrace.core.event import Outcome
from headrace.core.messages import (
    Abort,
    Drain,
    GrammarText,
    Pause,
    Resume,
    Service,
    Submit,
    Tenants,
    Withdraw,
    WorkerState,
)
from headrace.core.request import Request, SamplingParams, Tier
from headrace.engine.sequence import Phase
from headrace.runner.faults import Faults
from headrace.text.byte_vocabulary import byte_vocabulary
from headrace.text.lexicon import Lexicon
from headrace.text.matchers import Matchers
from headrace.text.tokenizer import Tokenizer
from headrace.worker.inbox import TurnedAway
from tests.builders import engine_config, part, prompt, request
from tests.unit.worker.rig import truth_of
from tests.unit.worker.turning import TurnRig


def test_tokens_are_the_truth_and_acceptance_comes_before_the_first_step() -> None:
    rig = TurnRig()
    rig.submit(7, request("a", 8, 5))
    rig.turn()
    (_, first), (_, second) = rig.frames[:2]
    assert (first.accepted, first.step, first.keys) == ((7,), -1, b"")
    assert second.step == 0 and first.load is not None and first.load.waiting == 1
    rig.run()
    assert rig.ears[1].tokens[7] == truth_of(request("a", 8, 5))
    assert rig.ears[1].ended[7].outcome is Outcome.FINISHED


def test_where_steps_are_short_acceptance_comes_with_the_first_token_and_a_suspect_s_before_it() -> None:
    rig = TurnRig(engine_config(profile=CostProfile(c0_s=1e-4)))
    rig.submit(1, request("a", 8, 1))
    rig.run()
    assert [frame.accepted for _, frame in rig.frames] == [(1,), ()], "nothing is known of its steps yet"
    rig.submit(2, request("b", 8, 1))
    rig.run()
    ((_, together),) = rig.frames[2:]
    assert (together.accepted, len(together.rows()), [end.key for end in together.ended]) == ((2,), 1, [2])
    rig.tell(Submit((replace(part(3, request("c", 8, 1)), is_suspect=True),)))
    rig.turn()
    (_, proof), (_, step) = rig.frames[3:]
    assert (proof.accepted, proof.step, step.accepted) == ((3,), -1, ())


def test_a_prompt_that_will_take_long_is_accepted_before_its_step_and_a_refusal_beside_it_does_not_wait() -> None:
    rig = TurnRig(engine_config(profile=CostProfile(c0_s=1e-5, c_in_s=1e-4), context_len=64))
    rig.submit(1, request("a", 4, 1))
    rig.run()
    rig.submit(2, request("b", 40, 1))
    rig.submit(3, request("c", 80, 1))
    rig.turn()
    (_, early), (_, step) = rig.frames[2:]
    assert (early.accepted, [refusal.keys for refusal in early.refused], early.step) == ((2,), [(3,)], -1)
    assert len(step.rows()) == 1 and not step.refused


def test_a_step_that_takes_long_makes_the_next_acceptance_come_before_its_step() -> None:
    rig = TurnRig(engine_config(profile=CostProfile(c0_s=1e-4)))
    rig.submit(1, request("a", 8, 1))
    rig.run()
    rig.runner.speed = 100.0
    for key, name in ((2, "b"), (3, "c")):
        rig.submit(key, request(name, 8, 1))
        rig.run()
    assert [frame.accepted for _, frame in rig.frames[2:]] == [(2,), (3,), ()]


def test_short_ones_end_long_before_a_long_one_beside_them() -> None:
    rig = TurnRig(engine_config(slots=16, blocks=256, context_len=512))
    rig.submit(0, request("long", 8, 400))
    for key in range(1, 16):
        rig.submit(key, request(f"short {key}", 8, 10))
    rig.turn(20)
    assert sorted(rig.ears[1].order) == list(range(1, 16))
    rig.run()
    assert rig.ears[1].order[-1] == 0
    assert rig.ears[1].tokens[0] == truth_of(request("long", 8, 400))


def test_each_gateway_hears_of_its_own_sequences_only() -> None:
    rig = TurnRig()
    for link in (1, 2):
        rig.submit(5, request(f"of {link}", 8, 4), link)
    rig.submit(6, request("more", 8, 6), 2)
    rig.run()
    assert rig.ears[1].tokens == {5: truth_of(request("of 1", 8, 4))}
    assert rig.ears[2].tokens == {5: truth_of(request("of 2", 8, 4)), 6: truth_of(request("more", 8, 6))}


def hold_until(rig: TurnRig, stage: str) -> None:
    """Turn until sequence 0 of the engine stands there."""
    arrived: dict[str, Callable[[], bool]] = {
        "mid-prefill": lambda: rig.engine.phase_of(0) is Phase.RUNNING and not rig.ears[1].tokens.get(1),
        "decoding": lambda: len(rig.ears[1].tokens.get(1, [])) == 3,
        "last token": lambda: len(rig.ears[1].tokens.get(1, [])) == 7,
    }
    for _ in range(50):
        rig.turn()
        if arrived[stage]():
            return
    raise AssertionError(f"never {stage}")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("stage", ["queued", "mid-prefill", "decoding", "last token"])
def test_an_abort_frees_slot_and_blocks_within_one_step(stage: str, depth: int) -> None:
    rig = TurnRig(engine_config(slots=2, max_step_tokens=16), depth=depth)
    if stage == "queued":
        for key in (10, 11):
            rig.submit(key, request(f"other {key}", 8, 100))
        rig.turn(3)
        rig.submit(1, request("one", 100, 8))
        rig.turn()
        others, number = 2, 2
        assert rig.engine.phase_of(number) is Phase.WAITING
    else:
        rig.submit(1, request("one", 100, 8))
        hold_until(rig, stage)
        others = 0
    held = {10: rig.engine.num_used_blocks} if others else {}
    rig.tell(Abort(1))
    rig.turn()
    assert rig.ears[1].ended[1].outcome is Outcome.ABORTED
    assert rig.engine.num_running == others
    if depth == 2 and not others:
        rig.turn()  # the plan in flight names its blocks until it is applied
    assert rig.engine.num_used_blocks <= held.get(10, 0) + others
    rig.tell(Abort(10))
    rig.tell(Abort(11))
    rig.run()
    assert rig.engine.num_used_blocks == 0


def test_tokens_past_what_a_gateway_used_are_overrun() -> None:
    rig = TurnRig()
    rig.submit(1, request("a", 8, 50))
    while len(rig.ears[1].tokens.get(1, [])) < 9:
        rig.turn()
    rig.tell(Abort(1, used_tokens=6))
    rig.turn()
    counters = rig.ears[1].ended[1].counters
    assert (counters.emitted, counters.overrun) == (6, 3)


def test_what_has_not_started_can_be_withdrawn_and_nothing_else() -> None:
    rig = TurnRig(engine_config(slots=1))
    rig.submit(1, request("runs", 8, 20))
    rig.submit(2, request("waits", 8, 20))
    rig.turn(2)
    rig.tell(Withdraw(1))
    rig.tell(Withdraw(2))
    rig.run()
    assert rig.ears[1].ended[2].reason == "withdrawn"
    assert rig.ears[1].ended[1].outcome is Outcome.FINISHED


def test_a_pause_holds_until_the_gateway_resumes_and_the_outbox_has_room() -> None:
    rig = TurnRig()
    made = request("a", 8, 30)
    rig.submit(1, made)
    rig.turn(5)
    rig.tell(Pause(1))
    rig.turn(3)
    said = len(rig.ears[1].tokens[1])
    rig.crowd(True)
    rig.tell(Resume(1))
    rig.turn(3)
    assert len(rig.ears[1].tokens[1]) == said
    rig.crowd(False)
    rig.run()
    assert rig.ears[1].tokens[1] == truth_of(made)


def test_a_crowded_gateway_pauses_alone_and_newcomers_of_it_wait() -> None:
    rig = TurnRig()
    rig.submit(1, request("crowded", 8, 30), 1)
    rig.submit(1, request("other", 8, 30), 2)
    rig.turn(3)
    rig.crowd(True, 1)
    rig.turn()
    said = len(rig.ears[1].tokens[1])
    rig.submit(2, request("late", 8, 5), 1)
    rig.run()
    assert len(rig.ears[1].tokens[1]) == said and 2 not in rig.ears[1].tokens
    assert rig.ears[2].ended[1].outcome is Outcome.FINISHED
    rig.crowd(False, 1)
    rig.run()
    assert rig.ears[1].tokens[1] == truth_of(request("crowded", 8, 30))
    assert rig.ears[1].tokens[2] == truth_of(request("late", 8, 5))


def test_a_gateway_that_leaves_for_good_takes_its_sequences_with_it_and_no_others() -> None:
    rig = TurnRig()
    rig.submit(1, request("lost", 8, 30), 1)
    rig.submit(1, request("kept", 8, 30), 2)
    rig.turn(3)
    heard = len(rig.ears[1].frames)
    rig.leave(1, for_good=True)
    rig.turn()
    assert rig.engine.num_running == 1
    rig.run()
    assert len(rig.ears[1].frames) == heard
    assert rig.ears[2].tokens[1] == truth_of(request("kept", 8, 30))
    assert rig.engine.num_used_blocks == 0


def test_a_submission_that_is_delivered_twice_runs_once() -> None:
    rig = TurnRig()
    made = request("a", 8, 5)
    rig.submit(1, made)
    rig.submit(1, made)
    rig.turn()
    rig.submit(1, made)
    rig.run()
    assert rig.ears[1].accepted == [1]
    assert rig.ears[1].tokens[1] == truth_of(made)


def test_a_step_in_flight_when_it_came_counts_as_its_wait() -> None:
    rig = TurnRig()
    rig.submit(1, request("a", 8, 2))
    rig.clock.time_s += 0.25
    rig.run()
    waits = rig.ears[1].ended[1].waits
    assert waits.wait_capacity_s == pytest.approx(0.25)
    assert waits.prefill_s > 0.0 and waits.decode_s > 0.0


HOSTILE: list[Request] = [
    request("empty prompt", ids=()),
    request("foreign id", ids=(5, 1_000_000)),
    request("negative id", ids=(-1,)),
    request("huge id", ids=(2**63 - 1,)),
    request("too long", ids=prompt(300)),
    request("no room", max_tokens=2**62),
    request("nothing", max_tokens=0),
    request("less", max_tokens=-(2**63)),
    request("nan", sampling=SamplingParams(temperature=math.nan)),
    request("inf", sampling=SamplingParams(top_p=math.inf)),
    request("seed", sampling=SamplingParams(seed=2**64)),
    request("many", sampling=SamplingParams(stop_ids=tuple(range(65)))),
    request("bias", sampling=SamplingParams(logit_bias=((1, math.nan),))),
    request("logprobs", sampling=SamplingParams(logprobs=2**40)),
    request("masked", sampling=SamplingParams(masked=True)),
    request("deadline", deadline_s=math.nan),
    request("target", ttft_target_s=-1.0),
    request("timeout", queue_timeout_s=math.inf),
    request("replay", replay_ids=(2**63 - 1,)),
    request("replay past", replay_ids=prompt(8)),
]
STRANGE: list[Request] = [
    request("", max_tokens=3),
    request("choice", max_tokens=3, choice=2**63 - 1),
    request("negative choice", max_tokens=3, choice=-(2**63)),
    request("hashes", max_tokens=3, prefix_root=b"x", block_hashes=(b"", b"", b"y" * 1000)),
    request("nobody", max_tokens=3, tenant=""),
    request("long name" * 1000, max_tokens=3, tenant="t" * 10_000),
    request("low", max_tokens=3, tier=Tier.BATCH),
]


def test_nothing_that_a_request_carries_harms_a_neighbour() -> None:
    rig = TurnRig()
    rig.submit(0, request("neighbour", 8, 40))
    rig.turn(2)
    for key, made in enumerate(HOSTILE, 100):
        rig.submit(key, made)
    for key, made in enumerate(STRANGE, 200):
        rig.submit(key, made)
    for command in (Abort(-(2**63)), Abort(0 - 1, -(2**63)), Pause(2**63 - 1), Resume(99), Withdraw(99)):
        rig.tell(command)
    rig.tell(Tenants((TenantConfig("x", weight=math.nan),)))
    rig.run()
    ear = rig.ears[1]
    assert sorted(ear.refused) == list(range(100, 100 + len(HOSTILE)))
    assert sorted(key for key in ear.ended if key >= 200) == list(range(200, 200 + len(STRANGE)))
    assert all(refusal.code and refusal.message for refusal in ear.refused.values())
    assert ear.tokens[0] == truth_of(request("neighbour", 8, 40))


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    rig = TurnRig(engine_config(slots=1, max_waiting=1))
    for key in range(3):
        rig.submit(key, request(f"r{key}", 8, 20))
        rig.turn()
    refusal = rig.ears[1].refused[2]
    assert refusal.code == "queue_full" and refusal.retry_after_s is not None and refusal.retry_after_s > 0.0


def test_a_drain_finishes_what_there_is_and_refuses_the_new() -> None:
    rig = TurnRig()
    rig.submit(1, request("a", 8, 20))
    rig.turn(2)
    rig.tell(Drain(1e6))
    rig.submit(2, request("late", 8, 5))
    rig.turn()
    refusal = rig.ears[1].refused[2]
    assert (refusal.code, rig.lifecycle.state) == ("draining", WorkerState.DRAINING)
    assert refusal.retry_after_s is not None and not rig.loop.is_drained
    rig.loop.run()
    assert rig.ears[1].tokens[1] == truth_of(request("a", 8, 20))


def test_what_is_left_after_the_grace_is_aborted_even_if_paused() -> None:
    rig = TurnRig()
    rig.submit(1, request("runs", 8, 100))
    rig.submit(2, request("paused", 8, 100))
    rig.turn(2)
    rig.tell(Pause(2))
    rig.tell(Drain(0.05))
    rig.turn(10)
    assert rig.loop.is_drained
    assert {end.outcome for end in rig.ears[1].ended.values()} == {Outcome.ABORTED}
    assert sorted(rig.ears[1].ended) == [1, 2]


def test_other_weights_hold_from_now_on_and_bad_ones_change_nothing() -> None:
    rig = TurnRig(engine_config(slots=2))
    rig.tell(Tenants((TenantConfig("a", weight=3.0), TenantConfig("b"))))
    rig.tell(Tenants((TenantConfig("a", reserved_slots=3),)))
    for key in range(60):
        rig.submit(key, request(f"r{key}", 8, 20, tenant="ab"[key % 2]))
    rig.turn(150)
    served = rig.lifecycle.take_service()
    assert served["a"] > 1.8 * served["b"] > 0.0


def test_a_dead_device_ends_the_loop() -> None:
    faults = Faults()
    faults.die(3)
    rig = TurnRig(faults=faults)
    rig.submit(1, request("a", 8, 20))
    with pytest.raises(RunnerFailed):
        rig.run()


def test_a_timeout_ends_a_sequence_that_nobody_serves() -> None:
    rig = TurnRig(engine_config(slots=1))
    rig.submit(1, request("runs", 8, 200))
    rig.submit(2, request("waits", 8, 5, queue_timeout_s=0.05))
    rig.turn(10)
    assert rig.ears[1].ended[2].reason == "timed_out"


@pytest.fixture
def byte_rig() -> Iterator[TurnRig]:
    vocabulary = byte_vocabulary(512)
    assert vocabulary.eos_id is not None
    config = engine_config(vocab_size=512, eos_ids=(vocabulary.eos_id,))
    matchers = Matchers(Lexicon(Tokenizer(vocabulary), 512, config.eos_ids))
    yield TurnRig(config, matchers)
    matchers.close()


def settle(rig: TurnRig, keys: list[int]) -> None:
    """Matchers come from another thread: wait for it, then turn."""

    def is_over() -> bool:
        return all(rig.ears[1].is_over(key) for key in keys)

    while not is_over():
        if not rig.loop.turn() and not is_over():
            assert rig.inbox.wait(10.0), "nothing comes any more"


def test_a_grammar_is_built_aside_and_followed(byte_rig: TurnRig) -> None:
    made = request("g", 8, 20, ids=prompt(8, 1, 256))
    byte_rig.submit(1, made, grammar=GrammarText("choice", '["yes","no"]'))
    byte_rig.submit(2, made, grammar=GrammarText("choice", "this is no list"))
    byte_rig.submit(3, made, grammar=GrammarText("poem", "a"))
    settle(byte_rig, [1, 2, 3])
    ear = byte_rig.ears[1]
    assert bytes(ear.tokens[1][:-1]).decode() in ("yes", "no")
    assert {key: refusal.code for key, refusal in ear.refused.items()} == {2: "invalid_request", 3: "invalid_request"}


def test_an_abort_while_the_grammar_is_built_ends_it_once(byte_rig: TurnRig) -> None:
    made = request("g", 8, 20, ids=prompt(8, 1, 256))
    byte_rig.submit(1, made, grammar=GrammarText("regex", "[a-z]{1,20}"))
    byte_rig.submit(2, made, grammar=GrammarText("regex", "[a-z]{1,20}"))
    byte_rig.tell(Abort(1))
    byte_rig.tell(Withdraw(2))
    byte_rig.turn()
    assert [byte_rig.ears[1].ended[key].reason for key in (1, 2)] == ["aborted", "withdrawn"]
    byte_rig.submit(3, made, grammar=GrammarText("regex", "[a-z]{1,4}"))
    settle(byte_rig, [3])
    assert sorted(byte_rig.ears[1].ended) == [1, 2, 3]
    assert byte_rig.engine.num_used_blocks == 0


@pytest.mark.parametrize("seed", range(5))
def test_random_lives_end_exactly_once(seed: int) -> None:
    luck = random.Random(seed)
    rig = TurnRig(engine_config(slots=4, blocks=48), depth=1 + seed % 2)
    keys: dict[int, list[int]] = {1: [], 2: [], 3: []}
    gone: set[int] = set()
    for key in range(300):
        link = luck.choice([link for link in keys if link not in gone])
        keys[link].append(key)
        rig.submit(key, request(f"r{key}", luck.randint(1, 40), luck.randint(1, 30)), link)
        for _ in range(luck.randint(0, 3)):
            other = luck.choice(keys[link])
            commands = (
                Abort(other),
                Pause(other),
                Resume(other),
                Withdraw(other),
                Submit((part(other, request("again", 4, 4)),)),
            )
            rig.tell(luck.choice(commands[: 4 if other in rig.ears[link].ended else 5]), link)
        if luck.random() < 0.1:
            rig.crowd(luck.random() < 0.5, link)
        if key == 200:
            gone.add(3)
            rig.leave(3)
        rig.turn(luck.randint(0, 3))
    for link in keys:
        rig.crowd(False, link)
        for key in keys[link]:
            rig.tell(Resume(key), link)
    rig.run()
    for link in (1, 2):
        ear = rig.ears[link]
        assert sorted([*ear.ended, *ear.refused]) == keys[link]
    assert rig.engine.num_used_blocks == 0 and rig.engine.num_running == 0


def test_told_to_drain_one_that_has_nothing_leaves_at_once() -> None:
    rig = TurnRig()
    rig.tell(Drain(3600.0))

    def wait(timeout_s: float) -> bool:
        raise AssertionError(f"waits for {timeout_s} s")

    rig.inbox.wait = wait  # type: ignore[method-assign]
    rig.loop.run()
    assert rig.loop.is_drained


def choice_of(made: Request, choice: int) -> list[int]:
    return truth_of(replace(made, choice=choice))


def test_an_order_is_taken_in_as_one_and_each_choice_is_its_own() -> None:
    rig = TurnRig()
    first, second = request("a", 8, 5), request("b", 8, 6, choice=2)
    rig.tell(Submit((part(1, first, n=3), part(7, second, n=2))))
    rig.turn()
    assert rig.frames[0][1].accepted == (1, 2, 3, 7, 8)
    rig.run()
    tokens = rig.ears[1].tokens
    assert [tokens[key] for key in (1, 2, 3)] == [choice_of(first, choice) for choice in range(3)]
    assert [tokens[key] for key in (7, 8)] == [choice_of(second, choice) for choice in (2, 3)]


def test_an_order_is_refused_as_one() -> None:
    rig = TurnRig()
    rig.tell(Submit((part(1, request("a", 8, 5), n=2), part(3, request("b", ids=())))))
    rig.run()
    ((_, frame),) = rig.frames
    assert [refusal.keys for refusal in frame.refused] == [(1, 2, 3)] and not frame.accepted
    assert rig.loop._keys.count == 0 and rig.engine.num_waiting == 0


def test_an_order_that_comes_twice_is_taken_once() -> None:
    rig = TurnRig()
    made = Submit((part(1, request("a", 8, 5), n=2),))
    rig.tell(made)
    rig.tell(made)
    rig.run()
    assert rig.ears[1].accepted == [1, 2] and sorted(rig.ears[1].ended) == [1, 2]


def test_what_the_inbox_had_no_room_for_is_told_to_come_again() -> None:
    rig = TurnRig()
    rig.inbox.put(TurnedAway(1, (4, 5)))
    rig.run()
    refusal = rig.ears[1].refused[4]
    assert (refusal.keys, refusal.code, refusal.retry_after_s) == ((4, 5), "queue_full", 1.0)


def test_nothing_is_left_after_the_step_that_brought_the_last_end() -> None:
    rig = TurnRig()
    rig.submit(1, request("a", 8, 1))
    assert not rig.loop.turn()
    assert rig.ears[1].ended[1].outcome is Outcome.FINISHED and rig.engine.idle


def test_the_service_of_the_last_step_is_told_soon_after_it() -> None:
    """Not before its frame is sent, and not only when the next request comes."""
    rig = TurnRig()
    for key in range(2):
        rig.submit(key, request(f"r{key}", 8, 1))
        rig.run()
    told_s = sum(rig.lifecycle.take_service().values())
    rig.clock.time_s += rig.loop.patience_s()
    rig.turn()
    assert 0.0 < sum(rig.lifecycle.take_service().values()) == pytest.approx(told_s)
    assert rig.loop.patience_s() == math.inf


def test_idle_time_before_a_request_is_no_wait_for_others() -> None:
    rig = TurnRig(engine_config(slots=1))
    rig.submit(1, request("first", 8, 1, tenant="a"))
    rig.run()
    rig.clock.time_s += 5.0
    rig.submit(2, request("second", 8, 20, tenant="a"))
    rig.submit(3, request("third", 8, 1, tenant="b"))
    rig.run()
    assert rig.ears[1].order == [1, 2, 3]
    waits = rig.ears[1].ended[3].waits
    assert waits.wait_capacity_s > 10 * waits.wait_fairness_s > 0.0  # one step of many let another in


def test_service_elsewhere_counts_here() -> None:
    rig = TurnRig()
    rig.tell(Service({"a": 2.0, "b": 1.0}))
    rig.tell(Service({"a": math.nan}))
    rig.turn()
    assert rig.engine.service_levels() == {"a": 2.0, "b": 1.0}


def test_one_grammar_that_is_none_refuses_the_whole_order(byte_rig: TurnRig) -> None:
    made = request("g", 8, 20, ids=prompt(8, 1, 256))
    good, bad = GrammarText("choice", '["yes","no"]'), GrammarText("choice", "this is no list")
    byte_rig.tell(Submit((part(1, made, good, n=2), part(3, made, bad), part(4, made))))
    settle(byte_rig, [1, 2, 3, 4])
    assert byte_rig.ears[1].refused[1].keys == (1, 2, 3, 4) and not byte_rig.ears[1].accepted
    assert byte_rig.engine.num_waiting == 0 and byte_rig.loop._num_building == 0


def test_an_order_waits_for_all_its_grammars_and_not_for_who_was_aborted(byte_rig: TurnRig) -> None:
    made = request("g", 8, 20, ids=prompt(8, 1, 256))
    byte_rig.tell(Submit((part(1, made, GrammarText("choice", '["yes","no"]'), n=3), part(4, made))))
    byte_rig.tell(Abort(2))
    settle(byte_rig, [1, 2, 3, 4])
    ear = byte_rig.ears[1]
    assert ear.ended[2].reason == "aborted" and 2 not in ear.tokens
    assert all(bytes(ear.tokens[key][:-1]).decode() in ("yes", "no") for key in (1, 3))
    assert ear.tokens[4] == choice_of_bytes(byte_rig, made)


def choice_of_bytes(rig: TurnRig, made: Request) -> list[int]:
    return rig.runner.truth(made.prompt_ids, made.max_tokens or 0, seed=made.sampling.seed)
