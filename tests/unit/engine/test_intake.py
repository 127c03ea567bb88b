"""What is refused at submission: by a typed error that names the field, with nothing allocated."""

import math
import pickle

import pytest
from msgspec.structs import replace

from headrace.core.config import CostProfile, TenantConfig, TierTargets
from headrace.core.errors import ContextLengthExceeded, DeadlineUnmeetable, HeadraceError, InvalidInput, QueueFull
from headrace.core.event import Outcome
from headrace.core.request import Admission, Request, SamplingParams
from headrace.runner.faults import Faults
from tests.builders import Rig, engine_config, prompt, request

CONTEXT = 64
VOCAB = 1000
FEW_BLOCKS = engine_config(blocks=4, block_size=4, context_len=CONTEXT)


def small_rig() -> Rig:
    return Rig(engine_config(context_len=CONTEXT))


def refused(rig: Rig, made: Request) -> HeadraceError:
    """The refusal; the engine is as it was before."""
    before = rig.engine.load()
    with pytest.raises(HeadraceError) as caught:
        rig.submit(made)
    assert rig.engine.load() == before
    rig.engine.check()
    return caught.value


def flood(rig: Rig, tenant: str = "a", **others: object) -> QueueFull:
    """Requests of one tenant until one is refused."""
    for index in range(10_000):
        made = request(f"{tenant}{index}", 64, 64, tenant=tenant, **others)  # type: ignore[arg-type]
        try:
            rig.submit(made)
        except QueueFull:
            assert index > 1
            error = refused(rig, made)
            assert isinstance(error, QueueFull)
            return error
    raise AssertionError("a flood is never refused")


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 10_000])
def test_a_prompt_that_leaves_no_room_for_output_is_refused(length: int) -> None:
    error = refused(small_rig(), request(length=length, max_tokens=None))
    assert isinstance(error, ContextLengthExceeded) and error.param == "prompt"


def test_a_prompt_one_short_of_the_context_gives_one_token() -> None:
    rig = small_rig()
    number = rig.submit(request(length=CONTEXT - 1, max_tokens=1))
    rig.run()
    assert len(rig.tokens[number]) == 1
    rig.assert_true()


def test_an_empty_prompt_is_refused() -> None:
    error = refused(small_rig(), request(ids=()))
    assert type(error) is InvalidInput and error.param == "prompt"


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31])
@pytest.mark.parametrize("param", ["prompt", "replay_ids"])
def test_ids_outside_the_vocabulary_are_refused(token: int, param: str) -> None:
    ids = (1, token, 2)
    made = request(ids=ids) if param == "prompt" else request(replay_ids=ids)
    assert refused(small_rig(), made).param == param


def test_the_ends_of_the_vocabulary_are_in_it() -> None:
    rig = small_rig()
    rig.submit(request(ids=(0, VOCAB - 1), max_tokens=2))
    rig.run()
    rig.assert_true()


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_no_output_is_refused(max_tokens: int) -> None:
    error = refused(small_rig(), request(max_tokens=max_tokens))
    assert type(error) is InvalidInput and error.param == "max_tokens"


@pytest.mark.parametrize(("length", "max_tokens"), [(8, CONTEXT - 7), (CONTEXT - 1, 2), (1, 10**12)])
def test_output_beyond_the_context_is_refused(length: int, max_tokens: int) -> None:
    error = refused(small_rig(), request(length=length, max_tokens=max_tokens))
    assert isinstance(error, ContextLengthExceeded) and error.param == "max_tokens"


@pytest.mark.parametrize("max_tokens", [None, CONTEXT - 8])
def test_without_a_limit_output_fills_the_context(max_tokens: int | None) -> None:
    rig = small_rig()
    number = rig.submit(request(length=8, max_tokens=max_tokens))
    rig.run()
    assert len(rig.tokens[number]) == CONTEXT - 8
    assert rig.ended[number].reason == "length"


def test_without_a_limit_output_stays_within_the_pool() -> None:
    rig = Rig(FEW_BLOCKS)
    number = rig.submit(request(length=8, max_tokens=None))
    rig.run()
    assert rig.ended[number].outcome is Outcome.FINISHED
    assert 8 <= len(rig.tokens[number]) <= 9


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    sampling = SamplingParams(min_tokens=9)
    assert refused(small_rig(), request(max_tokens=8, sampling=sampling)).param == "min_tokens"
    assert (
        refused(small_rig(), request(max_tokens=None, sampling=SamplingParams(min_tokens=CONTEXT))).param
        == "min_tokens"
    )
    small_rig().submit(request(max_tokens=9, sampling=sampling))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    assert refused(small_rig(), request(sampling=SamplingParams(temperature=value))).param == "temperature"
    assert refused(small_rig(), request(sampling=SamplingParams(logit_bias=((1, value),)))).param == "logit_bias"
    assert refused(small_rig(), request(deadline_s=value)).param == "deadline_s"


@pytest.mark.parametrize(("length", "max_tokens"), [(17, 1), (8, 10), (1, 17)])
def test_what_could_never_fit_the_pool_is_refused(length: int, max_tokens: int) -> None:
    error = refused(Rig(FEW_BLOCKS), request(length=length, max_tokens=max_tokens))
    assert type(error) is InvalidInput and error.param == "max_tokens"


@pytest.mark.parametrize(("length", "max_tokens"), [(16, 1), (8, 9), (1, 16)])
def test_what_just_fits_the_pool_runs(length: int, max_tokens: int) -> None:
    """The last token is never computed, so it needs no cell."""
    rig = Rig(FEW_BLOCKS)
    rig.submit(request(length=length, max_tokens=max_tokens))
    rig.run()
    rig.assert_true()


def test_more_than_may_be_guaranteed_is_refused() -> None:
    rig = Rig(engine_config(blocks=10, guaranteed_share=0.5))
    error = refused(rig, request(length=20, max_tokens=4, admission=Admission.GUARANTEED))
    assert type(error) is InvalidInput and error.param == "admission"
    rig.submit(request("less", length=16, max_tokens=4, admission=Admission.GUARANTEED))
    rig.submit(request("elastic", length=20, max_tokens=4))
    rig.run()
    rig.assert_true()


def test_what_others_have_reserved_is_not_guaranteed() -> None:
    blocks = TenantConfig("b", reserved_blocks=8)
    slots = TenantConfig("b", reserved_slots=4)
    made = request(length=8, max_tokens=4, admission=Admission.GUARANTEED)
    assert refused(Rig(engine_config(blocks=10, tenants=[blocks])), made).param == "admission"
    assert refused(Rig(engine_config(slots=4, tenants=[slots])), made).param == "admission"
    own = request(length=8, max_tokens=4, admission=Admission.GUARANTEED, tenant="b")
    Rig(engine_config(slots=4, blocks=10, tenants=[blocks])).submit(own)


@pytest.mark.parametrize("caps", [TenantConfig("a", max_blocks=2), TenantConfig("a", max_slots=0)])
def test_what_a_cap_can_never_hold_is_not_guaranteed(caps: TenantConfig) -> None:
    """Above a cap one borrows, and what is guaranteed cannot be borrowed: it would wait for ever."""
    rig = Rig(engine_config(tenants=[caps]))
    assert refused(rig, request(length=12, max_tokens=4, admission=Admission.GUARANTEED)).param == "admission"


def test_replayed_ids_must_leave_something_to_generate() -> None:
    assert refused(small_rig(), request(max_tokens=3, replay_ids=(1, 2, 3))).param == "replay_ids"
    assert refused(small_rig(), request(length=8, max_tokens=None, replay_ids=(1,) * 60)).param == "replay_ids"


def test_a_replay_goes_on_after_what_was_delivered() -> None:
    rig = small_rig()
    said = rig.runner.truth(prompt(8, 3), 8, seed=3)
    number = rig.submit(request(length=8, seed=3, max_tokens=8, replay_ids=tuple(said[:5])))
    rig.run()
    assert rig.tokens[number] == said
    rig.assert_true()


def test_a_refused_request_takes_no_number() -> None:
    rig = small_rig()
    first = rig.submit(request("x"))
    refused(rig, request(ids=()))
    assert rig.submit(request("y")) == first + 1


def test_a_flood_is_refused_and_shuts_out_nobody_else() -> None:
    rig = Rig(engine_config(slots=2, blocks=1024, max_queue_s=5.0))
    error = flood(rig)
    assert error.retry_after_s > 0.0 and error.retryable
    assert rig.engine.load().queue_s < 10.0
    rig.submit(request("other", tenant="b"))
    rig.run()
    rig.assert_true()


def test_in_a_queue_that_another_has_filled_a_tenant_has_its_share() -> None:
    tenants = [TenantConfig("a", weight=3.0), TenantConfig("b")]
    rig = Rig(engine_config(slots=2, max_queue_s=30.0, tenants=tenants))
    rig.submit(request("early", tenant="b"))
    flood(rig, "a")
    flood(rig, "b")
    waiting = [sum(made.tenant == name for made in rig.requests.values()) for name in "ab"]
    assert waiting[1] == pytest.approx(0.25 * waiting[0], rel=0.2)


def test_after_the_wait_it_was_told_a_tenant_is_served_again() -> None:
    rig = Rig(engine_config(slots=2, blocks=1024, max_queue_s=5.0))
    error = flood(rig)
    told_s = rig.now_s + error.retry_after_s
    while rig.now_s < told_s:
        rig.step()
    rig.submit(request("again", 64, 64))


def test_a_request_that_cannot_wait_long_is_refused_sooner() -> None:
    rig = Rig(engine_config(slots=1))
    for index in range(10):
        rig.submit(request(f"r{index}", 64, 64))
    assert isinstance(refused(rig, request("soon", ttft_target_s=0.01)), QueueFull)
    rig.submit(request("late"))


def test_the_number_waiting_is_bounded_too() -> None:
    rig = Rig(engine_config(max_waiting=3))
    for name in "xyz":
        rig.submit(request(name))
    error = refused(rig, request("w", tenant="b"))
    assert isinstance(error, QueueFull) and error.retry_after_s > 0.0


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    rig = Rig(engine_config(slots=1))
    error = refused(rig, request("hopeless", 64, 64, deadline_s=1e-5))
    assert isinstance(error, DeadlineUnmeetable)
    assert error.param == "deadline_s" and error.retry_after_s > 0.0


def test_a_deadline_counts_the_wait_before_it() -> None:
    rig = Rig(engine_config(slots=1, max_queue_s=100.0))
    tight = request("tight", 8, 8, deadline_s=1.0)
    for index in range(100):
        rig.submit(request(f"r{index}", 64, 64))
    assert isinstance(refused(rig, tight), DeadlineUnmeetable)
    Rig(engine_config(slots=1)).submit(tight)


def test_who_waits_too_long_for_a_slot_times_out() -> None:
    rig = Rig(engine_config(slots=1))
    running = rig.submit(request("running", max_tokens=50))
    number = rig.submit(request("waiting", queue_timeout_s=0.1))
    rig.run()
    assert (rig.ended[number].outcome, rig.ended[number].reason) == (Outcome.FAILED, "timed_out")
    assert 0.1 <= rig.end_times[number] < 0.2 and rig.tokens[number] == []
    assert rig.ended[running].outcome is Outcome.FINISHED


def test_one_that_has_started_does_not_time_out() -> None:
    rig = Rig(engine_config(slots=1))
    number = rig.submit(request("x", max_tokens=50, queue_timeout_s=0.1))
    rig.run()
    assert rig.end_times[number] > 0.1 and rig.ended[number].outcome is Outcome.FINISHED


def test_a_pause_does_not_cancel_the_time_out() -> None:
    rig = Rig(engine_config(slots=1))
    rig.submit(request("running", max_tokens=50))
    number = rig.submit(request("waiting", queue_timeout_s=0.1))
    rig.engine.pause(number, rig.now_s)
    while rig.now_s < 0.2:
        rig.step()
    rig.engine.resume(number, rig.now_s)
    rig.run()
    assert rig.ended[number].reason == "timed_out"


def test_memory_does_not_follow_how_often_one_that_waits_was_paused() -> None:
    rig = Rig(engine_config(slots=1))
    rig.submit(request("running", max_tokens=50))
    number = rig.submit(request("waiting"))
    before = len(pickle.dumps(rig.engine._state))
    for _ in range(1000):
        rig.engine.pause(number, rig.now_s)
        rig.engine.resume(number, rig.now_s)
    assert len(pickle.dumps(rig.engine._state)) < before + 1000


def test_what_runs_past_its_deadline_ends_with_what_it_has() -> None:
    faults = Faults()
    faults.slow(lambda _: True, 0.2)
    rig = Rig(engine_config(slots=1), faults=faults)
    number = rig.submit(request("x", max_tokens=100, deadline_s=5.0))
    rig.run()
    assert (rig.ended[number].outcome, rig.ended[number].reason) == (Outcome.FAILED, "deadline_exceeded")
    assert 5.0 <= rig.end_times[number] < 5.3
    assert 20 < len(rig.tokens[number]) < 30
    rig.assert_true()


def test_times_run_out_while_nothing_runs() -> None:
    rig = Rig()
    number = rig.submit(request("x", deadline_s=5.0))
    rig.engine.pause(number, rig.now_s)
    assert rig.engine.next_expiry_s == 5.0
    rig.clock.time_s = 5.0
    rig.step()
    assert rig.ended[number].reason == "deadline_exceeded"
    assert rig.engine.next_expiry_s == math.inf


def test_only_what_has_not_started_can_be_withdrawn() -> None:
    rig = Rig(engine_config(slots=1))
    running, waiting, paused = (rig.submit(request(name)) for name in "xyz")
    rig.step()
    rig.engine.pause(paused, rig.now_s)
    assert not rig.engine.withdraw(running, rig.now_s)
    assert not rig.engine.withdraw(paused, rig.now_s)
    assert rig.engine.withdraw(waiting, rig.now_s)
    assert not rig.engine.withdraw(waiting, rig.now_s)
    rig.step()
    assert (rig.ended[waiting].outcome, rig.ended[waiting].reason) == (Outcome.ABORTED, "withdrawn")


def test_what_started_once_is_not_withdrawn_while_it_waits_again() -> None:
    rig = Rig(engine_config(slots=1))
    number = rig.submit(request("x"))
    rig.step()
    rig.engine.pause(number, rig.now_s)
    rig.engine.resume(number, rig.now_s)
    assert not rig.engine.withdraw(number, rig.now_s)


SLOW_PROMPTS = CostProfile(c0_s=1e-2, c_in_s=1e-3, c_out_s=1e-4, c_kv_s=0.0, c_att_s=0.0)
PROMISED = {tier: TierTargets(ttft_s=2.0, itl_s=1e3) for tier in ("enterprise", "plus", "free", "batch")}


def choices(count: int, length: int, name: str = "r", **others: object) -> list[Request]:
    first = request(name, length, 1, **others)  # type: ignore[arg-type]
    return [replace(first, choice=choice) for choice in range(count)]


def test_siblings_do_not_stand_in_each_others_way() -> None:
    """1.2 s may be waited, and the last of six waits 2 s: for its own siblings."""
    rig = Rig(engine_config(slots=2, blocks=1024, context_len=1024, profile=SLOW_PROMPTS, targets=PROMISED))
    numbers = rig.submit_all(choices(6, 400))
    assert numbers == list(range(6)) and rig.engine.num_waiting == 6
    error = refused(rig, request("next", 400, 1))
    assert isinstance(error, QueueFull), "who comes after them waits for all of them"
    rig.submit(request("other tenant", 40, 1, tenant="b"))
    rig.run()
    rig.assert_true()


def test_an_order_that_is_refused_leaves_nothing_of_itself() -> None:
    rig = Rig(engine_config(slots=2, max_waiting=8))
    rig.submit_all(choices(5, 8, "first"))
    before = rig.engine.load()
    for made, kind in (
        (choices(4, 8), QueueFull),
        ([*choices(2, 8), request(ids=(1, -1))], InvalidInput),
        ([request("late", 8, 1, deadline_s=1e-3), *choices(2, 8)], DeadlineUnmeetable),
    ):
        with pytest.raises(kind):
            rig.submit_all(made)
        assert rig.engine.load() == before
        rig.engine.check()
    assert rig.submit_all(choices(3, 8)) == [5, 6, 7]


@pytest.mark.parametrize(("is_choices", "param"), [(True, "n"), (False, "prompt")])
def test_an_order_that_no_queue_could_hold_is_the_callers_fault(is_choices: bool, param: str) -> None:
    rig = Rig(engine_config(blocks=1024, context_len=1024, profile=SLOW_PROMPTS, max_queue_s=5.0))
    many = choices(16, 400) if is_choices else [request(f"r{index}", 400, 1) for index in range(16)]
    with pytest.raises(InvalidInput) as caught:
        rig.submit_all(many)
    assert caught.value.param == param and rig.engine.num_waiting == 0
    rig.submit_all(many[:12])


def test_an_order_that_is_too_much_at_a_slow_moment_may_be_sent_again() -> None:
    faults = Faults()
    faults.slow(lambda _: True, 0.5)
    rig = Rig(engine_config(slots=2, max_queue_s=5.0), faults=faults)
    order = [request(f"r{index}", 8, 8) for index in range(8)]
    for _ in range(12):
        rig.submit_all(order[:2])
        rig.run()
    rig.submit(request("running", 8, 8))
    for _ in range(2):  # it waits, and then it runs
        with pytest.raises(QueueFull) as caught:
            rig.submit_all(order)
        rig.step()
    assert not rig.engine.num_waiting and rig.engine.num_running == 1
    assert caught.value.retry_after_s >= 1.0 and "8 sequences" in caught.value.message
    rig.run()
    rig.submit_all(order)  # nothing runs: only a step could tell that it is slow no more


def test_what_is_refused_for_good_does_not_follow_what_ran() -> None:
    """Long outputs make long ones likely; that is no reason to say that it will never do."""
    rig = Rig(engine_config(slots=2, max_queue_s=3.0, blocks=1024, context_len=1024))
    order = [request(f"r{index}", 8, 600) for index in range(3)]
    for _ in range(6):
        rig.submit(request("long", 8, 600))
        rig.run()
    rig.submit(request("running", 8, 8))
    with pytest.raises(QueueFull, match="3 sequences"):
        rig.submit_all(order)


def test_more_than_may_wait_at_all_is_the_callers_fault() -> None:
    rig = Rig(engine_config(max_waiting=8))
    with pytest.raises(InvalidInput, match="at most 8 may wait"):
        rig.submit_all(choices(9, 8))
    rig.submit_all(choices(8, 8))


def test_whoever_was_let_in_elsewhere_is_let_in_with_its_siblings() -> None:
    """However slow it is here, and however much waits."""
    config = engine_config(blocks=1024, context_len=1024, profile=SLOW_PROMPTS, max_queue_s=5.0, max_waiting=8)
    many = [replace(made, max_tokens=9, replay_ids=(1, 2)) for made in choices(16, 400)]
    silent = replace(many[-1], replay_ids=())
    rig = Rig(config)
    for order in (many, [*many[:15], silent], [many[0]], [silent, many[0]]):
        rig.submit_all(order)
    for order in ([silent], [silent] * 16):
        with pytest.raises(HeadraceError):
            rig.submit_all(order)


def test_one_sequence_may_be_longer_than_the_queue() -> None:
    rig = Rig(engine_config(blocks=1024, context_len=1024, profile=SLOW_PROMPTS, max_queue_s=0.1))
    rig.submit(request(length=1000, max_tokens=1))


def test_what_choices_share_is_checked_for_each_that_does_not_share_it() -> None:
    rig = small_rig()
    bad = request(sampling=SamplingParams(temperature=math.nan))
    for others in (bad, replace(bad, sampling=SamplingParams(), prompt_ids=(VOCAB,))):
        with pytest.raises(InvalidInput):
            rig.submit_all([request(), others])
    assert rig.engine.num_waiting == 0


def test_waits_for_siblings_teach_nothing_about_the_queue() -> None:
    rig = Rig(engine_config(slots=1, blocks=1024, context_len=1024, profile=SLOW_PROMPTS))

    def bias() -> float:
        rig.run()
        return rig.engine._state.tenants.wait_bias[0]

    rig.submit_all(choices(6, 400))
    assert bias() == 1.0
    rig.submit_all(choices(2, 400, "before"))
    rig.submit(request("behind them", 400, 1))
    assert bias() != 1.0
