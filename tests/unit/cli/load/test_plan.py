"""The load as intended: fixed by its seed, in order, in the shares asked for."""

from pathlib import Path

import pytest
from msgspec import structs

from headrace.cli.load.http import Endpoint, parse_url
from headrace.cli.load.plan import POOL_TOKENS, Churn, Draw, LoadPlan, TenantLoad, open_shots, parse_tenant
from headrace.cli.load.wording import Asked, Wording
from headrace.core.errors import InvalidInput
from headrace.sim.arrivals import Evenly, Poisson, Together
from headrace.sim.lengths import Fixed, Uniform
from tests.unit.cli.load.stub import plan

pytestmark = pytest.mark.unit


def test_the_same_seed_is_the_same_load_and_another_is_not() -> None:
    load = plan(Poisson(100.0), requests=200)
    assert open_shots(load) == open_shots(load)
    assert open_shots(load) != open_shots(structs.replace(load, seed=1))


def test_a_load_by_time_ends_with_it_and_one_by_number_counts_after_the_warm_up() -> None:
    by_time = open_shots(plan(Evenly(10.0), warmup_s=1.0, duration_s=2.0))
    assert [shot.at_s for shot in by_time] == [index / 10 for index in range(30)]
    by_number = open_shots(plan(Evenly(10.0), warmup_s=1.0, requests=5))
    assert len(by_number) == 15 and sum(shot.at_s >= 1.0 for shot in by_number) == 5


def test_a_crowd_comes_when_the_counting_begins() -> None:
    quiet = TenantLoad("quiet", None, Fixed(1), Fixed(1), arrivals=Evenly(1.0))
    flood = TenantLoad("flood", None, Fixed(1), Fixed(1), arrivals=Together(50))
    shots = open_shots(LoadPlan((quiet, flood), warmup_s=2.0, duration_s=2.0))
    assert [shot.at_s for shot in shots if shot.tenant == 1] == [2.0] * 50
    assert [shot.at_s for shot in shots if shot.tenant == 0] == [0.0, 1.0, 2.0, 3.0]


def test_shares_of_clients_leave_and_give_up() -> None:
    load = structs.replace(plan(Evenly(1e4), requests=5000, output=10), churn=Churn(0.1, 0.05, 0.5))
    shots = open_shots(load)
    left = [shot for shot in shots if shot.leave_after_s is not None]
    assert len(left) == pytest.approx(500, rel=0.15)
    assert {shot.leave_after_pieces for shot in left} == {None, *range(1, 11)}
    assert sum(shot.timeout_s == 0.5 for shot in shots) == pytest.approx(250, rel=0.2)


def test_a_closed_load_draws_for_ever_from_its_own_chance() -> None:
    load = plan(users=1)
    draw, again = Draw(load, 0), Draw(load, 0)
    shots = [draw.next(0.0) for _ in range(3000)]
    assert [again.next(0.0) for _ in range(3000)] == shots
    assert [shot.number for shot in shots] == list(range(3000))


def test_a_trace_is_replayed_with_its_shared_prefixes(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [
        '{"arrival_s": 0, "prompt_tokens": 40, "output_tokens": 3, "prefix_group": 1, "prefix_tokens": 32}',
        '{"arrival_s": 0.5, "prompt_tokens": 50, "output_tokens": 2, "prefix_group": 1, "prefix_tokens": 32}',
        '{"arrival_s": 1, "prompt_tokens": 9, "output_tokens": 2, "cancel_after_tokens": 1}',
    ]
    trace.write_text("\n".join(rows))
    load = LoadPlan((TenantLoad("default", None, Fixed(1), Fixed(1), trace=str(trace)),))
    shots = open_shots(load)
    assert [(shot.at_s, shot.prompt_tokens, shot.output_tokens) for shot in shots] == [
        (0, 40, 3),
        (0.5, 50, 2),
        (1, 9, 2),
    ]
    wording = Wording(Endpoint("http", "h", 1), load, Asked("m", "completions", with_ids=True))
    first, second, _ = (wording.prompt_ids(shot) for shot in shots)
    assert (len(first), len(second)) == (40, 50)
    assert first[:32] == second[:32] and first[32:] != second[32:40]
    assert shots[2].leave_after_pieces == 1


def test_a_prompt_has_the_length_asked_for_even_at_the_end_of_the_pool() -> None:
    load = plan(users=1)
    ids = Wording(Endpoint("http", "h", 1), load, Asked("m", "completions", with_ids=True, ids_below=100))
    shot = structs.replace(Draw(load, 0).next(0.0), offset=POOL_TOKENS - 3, prompt_tokens=10)
    assert len(ids.prompt_ids(shot)) == 10 and max(ids.prompt_ids(shot)) < 100
    words = Wording(Endpoint("http", "h", 1), load, Asked("m", "completions", tokens_per_word=2.0))
    assert len(str(words.body(shot)["prompt"]).split()) == 5


def test_no_two_prompts_begin_alike_even_if_they_are_cut_at_one_place() -> None:
    load = plan(users=1)
    shot = Draw(load, 0).next(0.0)
    shots = [structs.replace(shot, number=number, offset=0) for number in range(2000)]
    for asked in (Asked("m", "completions", with_ids=True), Asked("m")):
        wordings = [Wording(Endpoint("http", "h", 1), load, asked, run=run) for run in range(2)]
        prompts = {str(wording.body(shot)) for wording in wordings for shot in shots}
        assert len(prompts) == 4000


def test_a_request_is_http_with_its_tenants_key() -> None:
    load = plan(users=1)
    wording = Wording(Endpoint("http", "::1", 80), load, Asked("m", extra={"priority": 3}))
    head, _, body = wording.request(Draw(load, 0).next(0.0)).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\nhost: [::1]:80\r\n")
    assert b"authorization: Bearer k" in head and f"content-length: {len(body)}".encode() in head
    assert b'"priority":3' in body and b'"include_usage":true' in body


def test_tenants_in_words() -> None:
    base = TenantLoad("default", "k", Fixed(5), Fixed(5), users=4)
    load = parse_tenant("name=a,key=s3,rate=2.5,prompt=uniform:1:9,output=7,think=0.5", base, constant=True)
    assert load == TenantLoad("a", "s3", Uniform(1, 9), Fixed(7), arrivals=Evenly(2.5), think_s=0.5)
    assert parse_tenant("name=b", base, constant=False) == structs.replace(base, name="b")
    for wrong in ("key=1", "name=a,speed=1", "name=a,rate=1,users=2", "name=a,users=1.5", "name=a,rate=nan", "x"):
        with pytest.raises(InvalidInput):
            parse_tenant(wrong, base, constant=False)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://h:0", "http://h:x", "http://h\r\nx", ""])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput):
        parse_url(url)


def test_an_address_may_end_in_v1() -> None:
    assert parse_url("https://h/v1/") == Endpoint("https", "h", 443)
    assert parse_url("127.0.0.1:81") == Endpoint("http", "127.0.0.1", 81)
