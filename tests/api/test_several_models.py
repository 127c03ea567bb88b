"""Several models, several workers of one, several tenants: who is asked, who answers, and for whom."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from headrace.accounts.keys import hash_key
from tests.api.conftest import openai_client
from tests.api.live_server import LiveServer, eventually, live_server, written

ALICE, BOB = "the-key-of-alice", "the-key-of-bob"
MODELS = """
[[models]]
name = "swift"
aliases = ["quick", "fast"]
runner = "fake"
workers = 2
[models.fake]
slots = 4
profile = {{ c0_s = 0.005 }}

[[models]]
name = "org/Steady-1.5:chat"
runner = "fake"
[models.fake]
vocab_size = 1024
slots = 1
profile = {{ c0_s = 0.005 }}

[[tenants]]
name = "alice"
keys = ["{alice}"]
tier = "enterprise"

[[tenants]]
name = "bob"
keys = ["{bob}"]
tier = "{tier}"
"""
STEADY = "org/Steady-1.5:chat"


def config(tier: str = "free") -> str:
    return MODELS.format(alice=hash_key(ALICE), bob=hash_key(BOB), tier=tier)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    home = tmp_path_factory.mktemp("several")
    with live_server(home, "--config", str(written(home, config()))) as server:
        yield server


@pytest.fixture
def alice(server: LiveServer) -> Iterator[OpenAI]:
    with openai_client(server, key=ALICE) as client:
        yield client


def chat(model: str = "swift", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "seed": 7, **fields}


def test_each_model_answers_under_its_names(alice: OpenAI) -> None:
    listed = {model.id: model for model in alice.models.list()}
    assert set(listed) == {"swift", STEADY}
    replies = {
        name: alice.chat.completions.create(**chat(name)) for name in ("swift", "quick", "fast", "default", STEADY)
    }
    assert {name: reply.model for name, reply in replies.items()} == {
        "swift": "swift", "quick": "swift", "fast": "swift", "default": "swift", STEADY: STEADY,
    }  # fmt: skip
    texts = {name: reply.choices[0].message.content for name, reply in replies.items()}
    assert texts["quick"] == texts["fast"] == texts["default"] == texts["swift"] != texts[STEADY]
    assert alice.models.retrieve(STEADY) == listed[STEADY] and alice.models.retrieve("quick") == listed["swift"]


def test_another_is_not_found_and_the_list_is_told(server: LiveServer) -> None:
    status, reply = server.ask("POST", "/v1/chat/completions", chat("swif"), key=ALICE)
    assert status == 404 and reply["error"]["code"] == "model_not_found"
    assert all(name in reply["error"]["message"] for name in ("swift", "quick", "fast", STEADY))


def test_workers_of_one_model_share_its_load(tmp_path: Path) -> None:
    names = [f"shared-{number}" for number in range(8)]
    # Workers of one age: what they expect of a request is what they have learnt from those before.
    with live_server(tmp_path, "--config", str(written(tmp_path, config()))) as server:
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(speaking(server, ALICE, "swift", request_id=name, max_tokens=8000))

        def share() -> Counter[str]:
            found = [server.ask("GET", f"/v1/requests/{name}/explain", key=ALICE) for name in names]
            return Counter(explained["replica"] for status, explained in found if status == 200)

        eventually(lambda: share().total() == len(names), "not all of them are over")
        # By estimated work, so one more or less is no fault.
        assert set(share()) == {"swift/0", "swift/1"} and min(share().values()) >= 3


def test_a_request_belongs_to_its_keys_tenant_alone(server: LiveServer) -> None:
    def asked_by(tenant: str) -> float:
        return server.figure("headrace_requests_total", route="/v1/chat/completions", tenant=tenant)

    before = asked_by("alice"), asked_by("bob")
    with openai_client(server, key=BOB) as bob:
        # What a body says of users and tiers changes no tenant.
        reply = bob.chat.completions.create(**chat(user="alice"), extra_body={"tenant": "alice"})
    assert (asked_by("alice"), asked_by("bob")) == (before[0], before[1] + 1)
    path = f"/v1/requests/{reply._request_id}/explain"
    assert server.ask("GET", path, key=BOB)[0] == 200
    # To others it is not there, and neither is it forbidden.
    assert server.ask("GET", path, key=ALICE) == (404, server.ask("GET", "/v1/requests/nothing/explain", key=ALICE)[1])


@contextmanager
def speaking(
    server: LiveServer, key: str, model: str = STEADY, *, request_id: str = "", **fields: Any
) -> Iterator[HTTPResponse]:
    """A stream, of the one-slot model unless another is named, that ends when it is left."""
    headers = {
        "x-request-id": request_id,
        "Authorization": f"Bearer {key}",
        "Content-Type": "application/json",
        "x-headrace-metadata": "1",
        "x-headrace-on-disconnect": "cancel",
        # Nobody is sent away because others are slow to come.
        "x-headrace-ttft-target-ms": "60000",
    }
    with server.connect() as connection:
        body = chat(model, stream=True, **fields)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        yield response


class Served(threading.Thread):
    """A request of the one-slot model, and the step of its worker in which it was first spoken for."""

    def __init__(self, server: LiveServer, key: str, **fields: Any) -> None:
        super().__init__()
        self.step: int | None = None
        self._server, self._key, self._fields = server, key, fields
        self.start()

    def run(self) -> None:
        with speaking(self._server, self._key, **self._fields) as response:
            chunks = [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]
        self.step = chunks[0]["headrace"]["batch_id"]


def first_served(server: LiveServer, first: dict[str, Any], second: dict[str, Any]) -> str:
    """While the only slot is taken two come, one after the other: which of them has it then."""

    def wait_for(name: str, value: float) -> None:
        figure = f"headrace_replica_{name}"
        eventually(lambda: server.figure(figure, model=STEADY) == value, f"not {value} {name}")

    come: list[Served] = []
    with speaking(server, ALICE, max_tokens=8000):
        wait_for("running", 1)
        for number, fields in enumerate((first, second)):
            come.append(Served(server, **fields))
            wait_for("waiting", number + 1)
    for each in come:
        each.join()
    steps = [each.step for each in come]
    assert steps[0] is not None and steps[1] is not None and steps[0] != steps[1]
    return "first" if steps[0] < steps[1] else "second"


def test_priority_lowers_a_tier_and_never_raises_it(server: LiveServer) -> None:
    # Bob is free; that he claims to be more changes nothing: Alice, who came after him, goes first.
    assert first_served(server, {"key": BOB, "priority": "enterprise"}, {"key": ALICE}) == "second"
    assert first_served(server, {"key": BOB, "priority": -5}, {"key": ALICE}) == "second"
    # She may say that hers can wait.
    assert first_served(server, {"key": ALICE, "priority": "batch"}, {"key": BOB}) == "second"
    assert first_served(server, {"key": ALICE}, {"key": BOB}) == "first"


def test_a_reload_changes_a_tier_and_a_broken_file_changes_nothing(home: Path) -> None:
    path = written(home, config())
    with live_server(home, "--config", str(path)) as server:
        assert first_served(server, {"key": BOB}, {"key": ALICE}) == "second"
        written(home, config().replace('tier = "free"', 'tier = "royal"'))
        eventually(lambda: "stays as it was" in server.said(), "no word about the broken file")
        assert first_served(server, {"key": BOB}, {"key": ALICE}) == "second"
        written(home, config("enterprise").replace('name = "alice"', 'name = "alice"\nweight = 0.01'))
        # Of the same tier now, and with a hundred times her weight: Bob's turn comes first.
        eventually(lambda: first_served(server, {"key": ALICE}, {"key": BOB}) == "second", "not reloaded")
