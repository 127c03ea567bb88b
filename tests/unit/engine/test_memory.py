"""Who gives way when slots or blocks are short, and that everything still completes."""

import pytest

from headrace.core.config import EngineConfig, TenantConfig
from headrace.core.event import Outcome
from headrace.core.request import Admission, Tier
from headrace.engine.sequence import Phase, Sequence
from headrace.engine.state import State
from tests.builders import Rig, engine_config, prompt, request

GUARANTEED = Admission.GUARANTEED
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(number, tokens known) of every preemption, in order."""
    told: list[tuple[int, int]] = []
    preempt = State.preempt

    def tell(state: State, sequence: Sequence, now_s: float) -> None:
        preempt(state, sequence, now_s)
        told.append((sequence.number, sequence.num_tokens))

    monkeypatch.setattr(State, "preempt", tell)
    return told


def running(rig: Rig) -> set[int]:
    return {int(number) for number in rig.engine.slot_numbers if number >= 0}


def submit_all(rig: Rig, count: int, length: int, max_tokens: int, **others: object) -> list[int]:
    prefix = str(others.get("tenant", "r"))
    return [
        rig.submit(request(f"{prefix}{index}", length, max_tokens, **others))  # type: ignore[arg-type]
        for index in range(count)
    ]


@DEPTHS
def test_everything_completes_when_memory_runs_out(depth: int, preempted: list[tuple[int, int]]) -> None:
    rig = Rig(engine_config(slots=8, blocks=20), depth=depth)
    submit_all(rig, 12, 8, 40)
    rig.run()
    assert preempted and all(ended.outcome is Outcome.FINISHED for ended in rig.ended.values())
    rig.assert_true()


@DEPTHS
def test_nobody_is_preempted_twice_without_having_gained(depth: int, preempted: list[tuple[int, int]]) -> None:
    rig = Rig(engine_config(slots=8, blocks=16), depth=depth)
    submit_all(rig, 16, 8, 40)
    rig.run()
    last: dict[int, int] = {}
    for number, known in preempted:
        assert known > last.get(number, 0)
        last[number] = known
    assert len(preempted) > len(last)
    assert max(ended.preemptions for ended in rig.ended.values()) <= 10


@DEPTHS
def test_a_preempted_sequence_says_so_and_counts_what_it_recomputed(depth: int) -> None:
    rig = Rig(engine_config(slots=2, blocks=10), depth=depth)
    submit_all(rig, 2, 8, 25)
    rig.run()
    victims = [ended for ended in rig.ended.values() if ended.preemptions]
    assert victims and all(ended.counters.recomputed >= 8 and ended.waits.preempted_s > 0.0 for ended in victims)
    others = [ended for ended in rig.ended.values() if not ended.preemptions]
    assert others and all(ended.counters.recomputed == 0 for ended in others)
    assert rig.engine.num_preemptions == sum(ended.preemptions for ended in rig.ended.values())


def test_the_lowest_tier_gives_way_first(preempted: list[tuple[int, int]]) -> None:
    rig = Rig(engine_config(slots=3, blocks=12))
    batch = rig.submit(request("batch", 8, 20, tier=Tier.BATCH))
    for name, tier in (("plus", Tier.PLUS), ("enterprise", Tier.ENTERPRISE)):
        rig.submit(request(name, 8, 20, tier=tier))
    rig.run()
    assert preempted[0][0] == batch
    rig.assert_true()


def test_within_a_tier_the_tenant_most_over_its_share_gives_way(preempted: list[tuple[int, int]]) -> None:
    rig = Rig(engine_config(slots=4, blocks=16))
    many = submit_all(rig, 3, 8, 20, tenant="many")
    submit_all(rig, 1, 8, 20, tenant="few")
    rig.run()
    assert preempted[0][0] in many


def test_a_heavier_tenant_may_hold_more(preempted: list[tuple[int, int]]) -> None:
    rig = Rig(engine_config(slots=4, blocks=16, tenants=[TenantConfig("many", weight=8.0)]))
    submit_all(rig, 3, 8, 20, tenant="many")
    few = submit_all(rig, 1, 8, 20, tenant="few")
    rig.run()
    assert preempted[0][0] == few[0]


def test_the_cheapest_to_recompute_gives_way(preempted: list[tuple[int, int]]) -> None:
    rig = Rig(engine_config(slots=2, blocks=11))
    rig.submit(request("long", 20, 20))
    short = rig.submit(request("short", 8, 20))
    rig.run()
    assert preempted[0][0] == short


@DEPTHS
def test_what_was_borrowed_goes_back_first(depth: int, preempted: list[tuple[int, int]]) -> None:
    rig = Rig(engine_config(slots=4, tenants=[TenantConfig("a", max_slots=1)]), depth=depth)
    borrowers = submit_all(rig, 4, 8, 40, tenant="a")
    rig.step()
    assert running(rig) == set(borrowers)
    others = submit_all(rig, 3, 8, 40, tenant="b", tier=Tier.BATCH)
    rig.step()
    assert running(rig) >= set(others) and len(running(rig)) == 4
    assert len(preempted) == 3 and {number for number, _ in preempted} < set(borrowers)
    rig.run()
    rig.assert_true()


def test_a_cap_on_blocks_is_soft_too(preempted: list[tuple[int, int]]) -> None:
    rig = Rig(engine_config(slots=4, blocks=12, tenants=[TenantConfig("a", max_blocks=3)]))
    submit_all(rig, 3, 12, 12, tenant="a")
    rig.step()
    assert rig.engine.load().used_blocks > 3
    other = rig.submit(request("other", 12, 4, tenant="b"))
    rig.step()
    assert other in running(rig) and preempted
    rig.run()
    rig.assert_true()


def test_nobody_borrows_while_somebody_within_its_cap_waits() -> None:
    rig = Rig(engine_config(slots=2, tenants=[TenantConfig("a", max_slots=1)]))
    submit_all(rig, 4, 8, 10, tenant="a")
    submit_all(rig, 4, 8, 10, tenant="b")
    while rig.engine.load().waiting > 3:
        rig.step()
        held = [rig.requests[number].tenant for number in running(rig)]
        assert held.count("a") <= 1
    rig.run()
    rig.assert_true()


@DEPTHS
def test_reserved_slots_are_lent_and_taken_back_within_one_step(depth: int, preempted: list[tuple[int, int]]) -> None:
    rig = Rig(engine_config(slots=4, tenants=[TenantConfig("r", reserved_slots=2)]), depth=depth)
    lent = submit_all(rig, 8, 8, 40, tenant="a", tier=Tier.ENTERPRISE)
    rig.step()
    assert len(running(rig) & set(lent)) == 4
    owners = submit_all(rig, 3, 8, 40, tenant="r", tier=Tier.BATCH)
    planned = rig.plan()
    assert planned is not None
    assert {start.number for start in planned.begun} == set(owners[:2])
    assert len(preempted) == 2
    rig.run()
    rig.assert_true()


def test_reserved_slots_are_not_lent_to_what_cannot_give_them_back() -> None:
    rig = Rig(engine_config(slots=4, blocks=256, tenants=[TenantConfig("r", reserved_slots=2)]))
    submit_all(rig, 4, 8, 20, tenant="a", admission=GUARANTEED)
    rig.step()
    assert len(running(rig)) == 2
    owners = submit_all(rig, 2, 8, 20, tenant="r", admission=GUARANTEED)
    rig.step()
    assert running(rig) > set(owners) and rig.engine.num_preemptions == 0
    rig.run()
    rig.assert_true()


def test_reserved_blocks_are_there_when_asked_for(preempted: list[tuple[int, int]]) -> None:
    rig = Rig(engine_config(slots=4, blocks=12, tenants=[TenantConfig("r", reserved_blocks=6)]))
    submit_all(rig, 3, 14, 10, tenant="a", tier=Tier.ENTERPRISE)
    rig.step()
    assert rig.engine.load().free_blocks < 6
    owner = rig.submit(request("owner", 20, 5, tenant="r", tier=Tier.BATCH))
    rig.step()
    assert owner in running(rig) and preempted
    rig.run()
    assert owner not in {number for number, _ in preempted}
    rig.assert_true()


def test_a_tenant_far_under_its_share_takes_a_slot_from_one_above() -> None:
    rig = Rig(engine_config(slots=4))
    flood = submit_all(rig, 8, 8, 100, tenant="a")
    for _ in range(5):
        rig.step()
    newcomer = rig.submit(request("newcomer", tenant="b"))
    planned = rig.plan()
    assert planned is not None and [start.number for start in planned.begun] == [newcomer]
    assert len(running(rig) & set(flood)) == 3
    rig.run()
    rig.assert_true()


def test_a_tenant_at_its_share_waits_for_ends() -> None:
    rig = Rig(engine_config(slots=4))
    submit_all(rig, 4, 8, 30, tenant="a")
    rig.step()
    submit_all(rig, 6, 8, 30, tenant="b")
    rig.run()
    assert rig.engine.num_preemptions <= 2
    rig.assert_true()


@DEPTHS
def test_guaranteed_sequences_take_from_elastic_ones(depth: int, preempted: list[tuple[int, int]]) -> None:
    rig = Rig(engine_config(slots=4, blocks=20), depth=depth)
    elastic = submit_all(rig, 3, 16, 20, tenant="a", tier=Tier.ENTERPRISE)
    rig.step()
    rig.submit(request("guaranteed", 24, 20, tenant="b", tier=Tier.FREE, admission=GUARANTEED))
    rig.run()
    assert preempted and {number for number, _ in preempted} <= set(elastic)
    assert rig.engine.num_guaranteed_preemptions == 0
    rig.assert_true()


def expecting_little(config: EngineConfig, depth: int = 1) -> Rig:
    """An engine that learned short outputs, and so guarantees more than it can keep."""
    rig = Rig(config, depth=depth)
    for index in range(60):
        rig.submit(request(f"short{index}", 8, 40), output=1)
    rig.run()
    assert rig.engine.num_preemptions == 0
    return rig


def only_when_all_is_guaranteed(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no guaranteed sequence is preempted while an elastic one holds a block."""
    preempt = State.preempt

    def judge(state: State, sequence: Sequence, now_s: float) -> None:
        if sequence.guaranteed:
            assert all(other.guaranteed for other in state.live.values() if other.blocks)
            assert state.pool.num_available == 0
        preempt(state, sequence, now_s)

    monkeypatch.setattr(State, "preempt", judge)


@DEPTHS
def test_guaranteed_sequences_are_preempted_only_when_every_block_is_guaranteed(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = expecting_little(engine_config(slots=6, blocks=24, context_len=64), depth)
    only_when_all_is_guaranteed(monkeypatch)
    for index in range(8):
        rig.submit(request(f"g{index}", 8, 50, admission=GUARANTEED))
        rig.submit(request(f"e{index}", 8, 3 * index + 2))
    rig.run()
    assert rig.engine.num_guaranteed_preemptions > 0
    rig.assert_true()


def test_of_guaranteed_sequences_alone_the_youngest_is_preempted_and_counted(preempted: list[tuple[int, int]]) -> None:
    rig = expecting_little(engine_config(slots=2, blocks=14, context_len=64))
    older, younger = submit_all(rig, 2, 8, 40, admission=GUARANTEED)
    rig.run()
    assert preempted and {number for number, _ in preempted} == {younger}
    assert rig.engine.num_guaranteed_preemptions == len(preempted)
    assert rig.ended[older].preemptions == 0
    rig.assert_true()


def test_guaranteed_reservations_have_a_bound() -> None:
    rig = Rig(engine_config(slots=8, blocks=40, guaranteed_share=0.5, context_len=64))
    submit_all(rig, 8, 8, 20, admission=GUARANTEED)
    rig.step()
    assert len(running(rig)) == 2  # 28 tokens are 7 blocks; a third would make 21 of 20
    rig.run()
    rig.assert_true()


@pytest.mark.parametrize("max_tokens", range(2, 18))
def test_a_guaranteed_sequence_is_not_preempted_for_blocks_that_are_on_their_way(
    max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The elastic one's last row is in flight: its blocks are back one step later."""
    rig = expecting_little(engine_config(slots=4, blocks=14, context_len=64, guaranteed_share=1.0), depth=2)
    only_when_all_is_guaranteed(monkeypatch)
    rig.submit(request("elastic", 8, max_tokens, tier=Tier.ENTERPRISE))
    for index in range(2):
        rig.submit(request(f"g{index}", 8 + 3 * index, 40, admission=GUARANTEED))
    rig.run()
    rig.assert_true()


def test_a_claim_counts_the_hits_that_its_own_victim_held() -> None:
    """Preempting who shares the claimant's prefix makes those blocks idle: sharing them takes them again."""
    rig = Rig(engine_config(slots=4, blocks=8))
    base = prompt(12, 1)
    rig.submit(request("victim", ids=base + prompt(1, 2), max_tokens=4, block_size=4, tier=Tier.FREE))
    rig.submit(request("other", 11, 6, tier=Tier.ENTERPRISE))
    for _ in range(3):
        rig.step()
    rig.submit(request("claimant", ids=base + prompt(5, 3), max_tokens=3, block_size=4, admission=GUARANTEED))
    rig.run()
    rig.assert_true()


def test_one_preempted_and_started_again_in_the_same_step_computes_once() -> None:
    rig = Rig(engine_config(slots=4, blocks=25, max_step_tokens=84))
    rig.submit(request("large", 60, 8, tenant="v"))
    rig.submit(request("small", 30, 8, tenant="v", tier=Tier.FREE))
    rig.engine.observe_service("g", 100.0)
    rig.step()
    rig.submit(request("claimant", 44, 2, tenant="g", tier=Tier.FREE, admission=GUARANTEED))
    rig.run()
    rig.assert_true()


def test_a_victim_is_found_again_when_the_claim_has_to_wait() -> None:
    """At depth 2 a claim waits for blocks that a launched plan names; the victim's lane stays in line."""
    rig = Rig(engine_config(slots=4, blocks=8), depth=2)
    victim = rig.submit(request("victim", 20, 12, tenant="v"))
    for _ in range(3):
        rig.step()
    rig.engine.observe_service("g", 100.0)
    rig.submit(request("claimant", 12, 4, tenant="g", admission=GUARANTEED))
    rig.run(200)
    assert rig.ended[victim].preemptions == 1
    rig.assert_true()


def test_a_large_sequence_that_has_aged_gets_its_memory() -> None:
    """Small ones pass it only until it has aged; then blocks gather for it."""
    rig = Rig(engine_config(slots=4, blocks=16, ageing_s=1.0, max_queue_s=1000.0))
    submit_all(rig, 4, 8, 20, tenant="a")
    rig.step()
    large = rig.submit(request("large", 56, 4, tenant="b", tier=Tier.BATCH))
    while rig.engine.phase_of(large) is Phase.WAITING:
        assert rig.now_s < 2.0
        count = len(rig.requests)
        rig.submit(request(f"s{count}", 8, 5 + 3 * (count % 6), tenant="a"))
        rig.step()
    assert rig.now_s > 1.0
    rig.run()
    rig.assert_true()


def test_one_that_has_not_gained_since_it_was_preempted_is_passed_over(preempted: list[tuple[int, int]]) -> None:
    """It is the first to go by tier, and still computing what it had."""
    rig = Rig(engine_config(slots=3, blocks=16, max_step_tokens=8))
    again = rig.submit(request("again", 24, 8, tier=Tier.BATCH))
    other = rig.submit(request("other", 24, 8, tier=Tier.ENTERPRISE))
    while not (rig.tokens[again] and rig.tokens[other]):
        rig.step()
    rig.engine.pause(again, rig.now_s)
    rig.engine.resume(again, rig.now_s)
    rig.step()
    rig.submit(request("claimant", 20, 2, admission=GUARANTEED))
    rig.step()
    assert [number for number, _ in preempted] == [other]
    rig.run()
    rig.assert_true()


def test_a_claim_does_not_count_what_its_victim_shares_with_others() -> None:
    """The first to go gives one block of its four; so the second goes with it, in the same step."""
    rig = Rig(engine_config(slots=4, blocks=12))
    base = prompt(12, 1)
    rig.submit(request("keeper", ids=base + prompt(1, 2), max_tokens=4, block_size=4, tier=Tier.ENTERPRISE))
    rig.step()
    rig.submit(request("shares", ids=base + prompt(1, 3), max_tokens=4, block_size=4, tier=Tier.BATCH))
    rig.submit(request("second", 13, 4, tier=Tier.PLUS))
    rig.step()
    free = rig.engine.load().free_blocks
    claimant = rig.submit(request("claimant", 4 * (free + 3), 2, admission=GUARANTEED))
    rig.step()
    assert claimant in running(rig) and rig.engine.num_preemptions == 2
    rig.run()
    rig.assert_true()


def test_a_claim_counts_what_only_its_victims_share() -> None:
    rig = Rig(engine_config(slots=4, blocks=9, guaranteed_share=1.0))
    base = prompt(12, 1)
    for index in range(3):
        rig.submit(request(f"v{index}", ids=base + prompt(2, index + 2), max_tokens=20, block_size=4))
        rig.step()
        rig.step()
    claimant = rig.submit(request("claimant", 28, 4, tenant="g", admission=GUARANTEED))
    rig.step()
    assert claimant in running(rig)
    rig.run()
    rig.assert_true()


def held_blocks(rig: Rig, tenant: str) -> int:
    """Blocks of a tenant whose running sequences have not grown since they started."""
    starts = {start.number: start for plan in rig.plans for start in plan.begun}
    return sum(len(starts[number].blocks) for number in running(rig) if rig.requests[number].tenant == tenant)


def test_a_claim_leaves_a_tenant_what_it_has_reserved() -> None:
    tenants = [TenantConfig("r", reserved_blocks=4)]
    rig = Rig(engine_config(slots=12, blocks=20, guaranteed_share=1.0, tenants=tenants))
    submit_all(rig, 4, 5, 4, tenant="r", tier=Tier.BATCH)
    submit_all(rig, 4, 5, 4, tenant="b", tier=Tier.PLUS)
    rig.step()
    assert (held_blocks(rig, "r"), held_blocks(rig, "b")) == (8, 8)
    claimant = rig.submit(request("claimant", 48, 4, tenant="g", admission=GUARANTEED))
    rig.step()
    assert claimant in running(rig) and held_blocks(rig, "r") == 4
    rig.run()
    rig.assert_true()


def test_a_claim_leaves_a_tenant_what_is_within_its_cap() -> None:
    rig = Rig(engine_config(slots=12, blocks=10, tenants=[TenantConfig("a", max_blocks=4)]))
    submit_all(rig, 4, 5, 4, tenant="a")
    rig.step()
    assert held_blocks(rig, "a") == 8
    rig.submit(request("claimant", 30, 4, tenant="c"))
    rig.step()
    assert held_blocks(rig, "a") >= 4
    rig.run()
    rig.assert_true()


def test_a_reserved_tenant_comes_before_prompts_that_fill_the_step() -> None:
    rig = Rig(engine_config(slots=4, blocks=256, max_step_tokens=16, tenants=[TenantConfig("r", reserved_slots=1)]))
    submit_all(rig, 6, 100, 4, tenant="a", tier=Tier.ENTERPRISE)
    rig.step()
    owner = rig.submit(request("owner", 8, 4, tenant="r", tier=Tier.BATCH))
    planned = rig.plan()
    assert planned is not None and [start.number for start in planned.begun] == [owner]
    rig.run()
    rig.assert_true()


def test_guaranteed_sequences_wait_for_an_elastic_one_that_has_not_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = expecting_little(engine_config(slots=3, blocks=18, context_len=64, max_step_tokens=4))
    only_when_all_is_guaranteed(monkeypatch)
    elastic = rig.submit(request("elastic", 40, 4))
    while not rig.tokens[elastic]:
        rig.step()
    rig.engine.pause(elastic, rig.now_s)
    submit_all(rig, 2, 8, 40, admission=GUARANTEED)
    while rig.engine.load().free_blocks > 13:
        rig.step()
    rig.engine.resume(elastic, rig.now_s)
    rig.step()
    assert elastic in running(rig)
    rig.run()
    assert rig.ended[elastic].preemptions > 0
    rig.assert_true()


def test_guaranteed_sequences_do_not_grow_into_what_others_have_reserved() -> None:
    config = engine_config(slots=3, blocks=18, context_len=64, tenants=[TenantConfig("r", reserved_blocks=8)])
    rig = expecting_little(config)
    owner = rig.submit(request("owner", 8, 20, tenant="r"))
    submit_all(rig, 2, 8, 40, admission=GUARANTEED)
    rig.run()
    assert rig.ended[owner].preemptions == 0
    rig.assert_true()
