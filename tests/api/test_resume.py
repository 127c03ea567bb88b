"""Streams that go on without their connection, over a real port: cut anywhere, read by many, sent again, stopped."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest

from headrace.accounts.keys import hash_key
from tests.api.live_server import PATIENCE_S, LiveServer, eventually, live_server, written

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789"
NUM_TOKENS = 200
CONFIG = f"""
[gateway]
disconnect_grace_s = 30.0
[[models]]
name = "fake"
runner = "fake"
[models.fake]
profile = {{ c0_s = 0.004, c_in_s = 1e-6, c_out_s = 1e-6 }}
[[tenants]]
name = "alice"
keys = ["{hash_key(ALICE)}"]
[[tenants]]
name = "bob"
keys = ["{hash_key(BOB)}"]
"""
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Once upon a time"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    home = tmp_path_factory.mktemp("resume")
    with live_server(home, "--config", str(written(home, CONFIG))) as server:
        yield server


class Client:
    """One connection for each request, as after a break."""

    def __init__(self, server: LiveServer, key: str = ALICE) -> None:
        self._server = server
        self._key = key

    def connect(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[HTTPConnection, HTTPResponse]:
        connection = HTTPConnection("127.0.0.1", self._server.port, timeout=PATIENCE_S)
        sent = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        return connection, connection.getresponse()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        connection, response = self.connect(method, path, body, **headers)
        with closing(connection):
            return response.status, response.read()

    def say(self, path: str, id: str, max_tokens: int = NUM_TOKENS) -> tuple[HTTPConnection, HTTPResponse]:
        """A stream under way."""
        body = {"model": "default", "stream": True, "max_tokens": max_tokens, "seed": 1, **BODIES[path]}
        connection, response = self.connect("POST", path, body, x_request_id=id)
        assert response.status == 200 and response.headers["x-request-id"] == id
        return connection, response


def event(response: HTTPResponse) -> bytes:
    """The next one, with the empty line behind it; nothing at the end."""
    lines: list[bytes] = []
    while not lines or lines[-1] not in (b"\n", b""):
        lines.append(response.readline())
    return b"".join(lines)


def number(frame: bytes) -> int:
    first = frame.split(b"\n")[0]
    assert first.startswith(b"id: "), frame
    return int(first[4:])


def text(body: bytes) -> str:
    chunks = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


def explained(client: Client, id: str) -> dict[str, Any]:
    def look() -> Any:
        status, found = client.ask("GET", f"/v1/requests/{id}/explain")
        return json.loads(found) if status == 200 else None

    found: dict[str, Any] = eventually(look, f"{id} is not explained")
    return found


@pytest.mark.parametrize("path", BODIES)
def test_cut_after_every_frame_the_pieces_are_what_an_undisturbed_reader_got(server: LiveServer, path: str) -> None:
    client, id = Client(server), f"cut-{path.count('/')}"
    first, response = client.say(path, id)
    pieces, is_done = [event(response)], False
    after = number(pieces[0])
    first.close()
    while not is_done:
        connection, response = client.connect("GET", f"/v1/streams/{id}", last_event_id=str(after))
        assert response.status == 200
        pieces.append(event(response))
        after = number(pieces[-1])
        is_done = b"[DONE]" in pieces[-1]
        connection.close()
    assert len(pieces) > NUM_TOKENS // 2, "a step without a whole character shows nothing"
    assert client.ask("GET", f"/v1/streams/{id}?after=0") == (200, b"".join(pieces))
    assert client.ask("GET", f"/v1/streams/{id}?after={after}") == (204, b"")
    undisturbed, response = client.say(path, f"{id}-undisturbed")
    with closing(undisturbed):
        assert text(response.read()) == text(b"".join(pieces))
    found = explained(client, id)
    assert (found["attempts"], found["usage"]["completion_tokens"], found["error"]) == (1, NUM_TOKENS, None)
    assert abs(sum(found["stages"].values()) - found["total_s"]) <= 1e-3


def test_twenty_readers_of_a_running_stream_get_the_same_bytes(server: LiveServer) -> None:
    client = Client(server)
    first, response = client.say("/v1/chat/completions", "many")
    with closing(first), ThreadPoolExecutor(20) as threads:
        others = [threads.submit(client.ask, "GET", "/v1/streams/many") for _ in range(20)]
        whole = response.read()
        assert {other.result() for other in others} == {(200, whole)}
    assert whole.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("path", BODIES)
def test_a_request_that_is_sent_again_with_the_last_id_goes_on(server: LiveServer, path: str) -> None:
    client, id = Client(server), f"again-{path.count('/')}"
    first, response = client.say(path, id)
    begun = [event(response) for _ in range(5)]
    first.close()
    body = {"model": "default", "stream": True, **BODIES[path]}
    status, rest = client.ask("POST", path, body, x_request_id=id, last_event_id=str(number(begun[-1])))
    assert status == 200
    assert client.ask("GET", f"/v1/streams/{id}") == (200, b"".join(begun) + rest)
    for headers, expected in (
        ({"x_request_id": "nobodys", "last_event_id": "1"}, 404),
        ({"last_event_id": "1"}, 404),
        ({"x_request_id": id, "last_event_id": "-1"}, 400),
        ({"x_request_id": id, "last_event_id": "1000000"}, 400),
    ):
        assert client.ask("POST", path, body, **headers)[0] == expected
    assert Client(server, BOB).ask("POST", path, body, x_request_id=id, last_event_id="1")[0] == 404
    assert explained(client, id)["usage"]["completion_tokens"] == NUM_TOKENS


def test_another_tenant_finds_nothing(server: LiveServer) -> None:
    client, other = Client(server), Client(server, BOB)
    connection, response = client.say("/v1/chat/completions", "alices")
    with closing(connection):
        event(response)
        for method in ("GET", "DELETE"):
            found, nothing = (other.ask(method, f"/v1/streams/{id}") for id in ("alices", "nothing"))
            assert found == nothing and found[0] == 404
        assert response.read().endswith(b"data: [DONE]\n\n")


def test_a_lost_stream_can_be_stopped(server: LiveServer) -> None:
    client = Client(server)
    connection, response = client.say("/v1/chat/completions", "lost", max_tokens=5000)
    event(response)
    connection.close()
    assert client.ask("DELETE", "/v1/streams/lost") == (204, b"")
    assert explained(client, "lost")["error"] == "cancelled"
    status, whole = client.ask("GET", "/v1/streams/lost")
    assert status == 200 and whole.count(b"data: [DONE]\n\n") == 1 and b'"code":"cancelled"' in whole


def test_a_taken_id_is_not_given_twice(server: LiveServer) -> None:
    client = Client(server)
    first, response = client.say("/v1/chat/completions", "taken")
    with closing(first):
        body = {"model": "default", "max_tokens": 1, **BODIES["/v1/chat/completions"]}
        again, other = client.connect("POST", "/v1/chat/completions", body, x_request_id="taken")
        with closing(again):
            assert other.status == 200 and other.headers["x-request-id"].startswith("req_")
            other.read()
        response.read()
