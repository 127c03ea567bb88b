"""Stages over the wire: they sum to the time a request took, and time that is lost at a hop shows there.

Of several requests the quickest counts: a machine that does something else as well adds to some, and what a stage misses it
misses every time. The least of each stage would not do: who hears late of a reply's first token takes from one what it adds to another. benchmarks/serve_stages.py has the strict bounds.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.api.live_server import LiveServer, live_server, written

CHAT: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
NUM_REQUESTS, NUM_PER_HOP = 300, 12
INJECTED_S, SLACK_S = 0.050, 0.015
CONFIG = """
[[models]]
name = "fake"
runner = "fake"
[models.fake]
profile = { c0_s = 0.002 }
"""
# Each of these groups is injected at once into a server of its own: the stages of a group do not touch.
GROUPS = (
    ("receive", "tokenise", "prefill", "detokenise"),
    ("authenticate", "route", "decode", "client"),
    ("admit", "transfer"),
)


def explained(server: LiveServer, *, streamed: bool) -> tuple[dict[str, float], float, float]:
    """Its stages, its wall time, and the time that its client saw."""
    with server.connect() as connection:
        connection.connect()
        began_s = time.perf_counter()
        response = server.send(connection, "POST", "/v1/chat/completions", {**CHAT, "stream": streamed})
        assert response.status == 200
        response.read()
        seen_s = time.perf_counter() - began_s
        request_id = response.headers["x-request-id"]
        found = json.loads(server.send(connection, "GET", f"/v1/requests/{request_id}/explain", None).read())
    return found["stages"], found["total_s"], seen_s


def test_stages_sum_to_wall_time(fake_server: LiveServer) -> None:
    beyond = []
    for number in range(NUM_REQUESTS):
        stages, wall_s, seen_s = explained(fake_server, streamed=number % 2 == 0)
        assert abs(sum(stages.values()) - wall_s) <= 1e-3 and min(stages.values()) >= 0.0, stages
        # The server's clock stops when the last byte is handed over: the client may have read it by then.
        assert wall_s <= seen_s + 5e-3, (stages, seen_s)
        beyond.append(seen_s - wall_s)
    # What no stage has is what lies between the client and the first byte, and after the last.
    assert sorted(beyond)[NUM_REQUESTS // 10] < 10e-3


def quickest(server: LiveServer) -> dict[str, float]:
    """The stages of the request that took the least time."""
    return min(
        (explained(server, streamed=False)[0] for _ in range(NUM_PER_HOP)), key=lambda stages: sum(stages.values())
    )


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Without anything injected."""
    home = tmp_path_factory.mktemp("calm")
    with live_server(home, "--config", str(written(home, CONFIG))) as server:
        return quickest(server)


@pytest.mark.parametrize("hops", GROUPS, ids="-".join)
def test_time_lost_at_a_hop_shows_in_its_stage_alone(home: Path, calm: dict[str, float], hops: tuple[str, ...]) -> None:
    injected = "\n".join(f'"{hop}" = {INJECTED_S}' for hop in hops)
    with live_server(home, "--config", str(written(home, f"[inject]\n{injected}\n{CONFIG}"))) as server:
        slow = quickest(server)
    grown = {name: slow.get(name, 0.0) - calm.get(name, 0.0) for name in slow.keys() | calm.keys()}
    for name, seconds in grown.items():
        expected_s = INJECTED_S if name in hops else 0.0
        assert abs(seconds - expected_s) <= SLACK_S, (name, grown)
