"""Errors as the official `openai` client sees them: its own classes, with what a caller needs to mend the request."""

import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import DefaultHttpxClient, OpenAI

from tests.api.conftest import openai_client
from tests.api.live_server import PATIENCE_S, LiveServer, eventually, live_server, written

CHAT: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}

# One sequence runs and one waits, whoever else comes is sent away.
CROWDED = """
[engine]
max_waiting = 1
[[models]]
name = "fake"
runner = "fake"
[models.fake]
slots = 1
profile = { c0_s = 0.02 }
"""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logit_bias": {"Paris": 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}}, "response_format"),
    ],
)  # fmt: skip
def test_a_bad_request_names_its_field(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**{**CHAT, **fields})
    error = raised.value
    assert error.param is not None and error.param.startswith(param)
    assert error.type == "invalid_request_error" and error.request_id and error.message


@pytest.mark.parametrize("fields", [{"messages": [{"role": "user", "content": "x" * 9000}]}, {"max_tokens": 9000}])
def test_too_long_a_context_has_its_code(client: OpenAI, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**{**CHAT, **fields})
    assert raised.value.code == "context_length_exceeded" and re.search("819[12]", raised.value.message)
    assert raised.value.param == next(iter(fields))


def test_a_wrong_key_is_an_authentication_error(fake_server: LiveServer) -> None:
    with openai_client(fake_server, key="wrong") as client, pytest.raises(openai.AuthenticationError) as raised:
        client.chat.completions.create(**CHAT)
    assert raised.value.code == "invalid_api_key" and raised.value.response.headers["www-authenticate"] == "Bearer"


def test_an_unknown_model_is_not_found_with_the_list(client: OpenAI) -> None:
    for ask in (
        lambda: client.chat.completions.create(**{**CHAT, "model": "gpt-9"}),
        lambda: client.completions.create(model="gpt-9", prompt="x"),
        lambda: client.models.retrieve("gpt-9"),
    ):
        with pytest.raises(openai.NotFoundError) as raised:
            ask()
        error = raised.value
        assert (error.code, error.param) == ("model_not_found", "model")
        assert all(name in error.message for name in ("gpt-9", "fake", "default"))


def test_a_page_elsewhere_is_denied(client: OpenAI) -> None:
    with pytest.raises(openai.PermissionDeniedError) as raised:
        client.chat.completions.create(**CHAT, extra_headers={"Origin": "http://elsewhere.example"})
    assert raised.value.type == "permission_error"


def told_until(client: OpenAI, deadline_ms: int) -> tuple[int, openai.APIError]:
    """How many chunks came before the deadline of a request that takes longer, and the error then."""
    fields = {**CHAT, "max_tokens": 8000}
    headers = {"x-headrace-deadline-ms": str(deadline_ms)}
    num_told = 0
    try:
        for _ in client.chat.completions.create(**fields, stream=True, extra_headers=headers):
            num_told += 1
    except openai.APIError as error:
        return num_told, error
    raise AssertionError("it ended before its deadline")


def test_a_deadline_that_passes_mid_stream_is_an_error_of_the_stream(client: OpenAI) -> None:
    # A machine that is busy with something else may need longer until there is a stream.
    tried = (told_until(client, deadline_ms) for deadline_ms in (400, 2000, 6000))
    error = next(error for num_told, error in tried if num_told)
    assert not isinstance(error, openai.APIStatusError)
    assert error.code == "deadline_exceeded"


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    home = tmp_path_factory.mktemp("crowded")
    with live_server(home, "--config", str(written(home, CROWDED))) as server:
        yield server


class Crowd:
    """Two requests that fill a crowded server until they are closed."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self._threads = [threading.Thread(target=self._sit) for _ in range(2)]
        self._stop = threading.Event()
        # What is left of the crowd before must not be taken for this one.
        eventually(lambda: server.figure("headrace_replica_running") == 0, "one still runs")
        self._threads[0].start()
        eventually(lambda: server.figure("headrace_replica_running") == 1, "nothing runs")
        self._threads[1].start()
        eventually(lambda: server.figure("headrace_replica_waiting") == 1, "nothing waits")

    def _sit(self) -> None:
        with self._server.connect() as connection:
            body = {**CHAT, "max_tokens": 4000, "stream": True}
            headers = {
                "Authorization": f"Bearer {self._server.key}",
                "Content-Type": "application/json",
                "x-headrace-on-disconnect": "cancel",
            }
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            connection.sock.settimeout(0.05)
            while not self._stop.is_set():
                try:
                    if not connection.sock.recv(65536):
                        return
                except TimeoutError:
                    pass

    def leave(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_a_full_queue_says_when_to_come_back(crowded: LiveServer) -> None:
    crowd = Crowd(crowded)
    try:
        with openai_client(crowded) as client, pytest.raises(openai.InternalServerError) as raised:
            client.chat.completions.create(**CHAT)
    finally:
        crowd.leave()
    error = raised.value
    assert (error.status_code, error.code, error.type) == (503, "queue_full", "overloaded")
    headers = error.response.headers
    assert int(headers["retry-after"]) >= 1 and int(headers["retry-after-ms"]) > 0
    assert headers.get("x-should-retry") != "false"


def test_the_client_retries_when_it_was_told_to(crowded: LiveServer) -> None:
    answers: list[tuple[float, int, float]] = []
    crowd = Crowd(crowded)

    def note(response: Any) -> None:
        wait_s = int(response.headers.get("retry-after-ms", 0)) / 1e3
        answers.append((time.monotonic(), response.status_code, wait_s))
        if len(answers) == 1:
            threading.Thread(target=crowd.leave).start()

    http = DefaultHttpxClient(event_hooks={"response": [note]})
    with OpenAI(
        base_url=f"{crowded.url}/v1", api_key=crowded.key, max_retries=20, timeout=PATIENCE_S, http_client=http
    ) as client:
        reply = client.chat.completions.create(**CHAT)
    assert reply.choices[0].finish_reason == "length"
    assert [status for _, status, _ in answers[:-1]] == [503] * (len(answers) - 1) and len(answers) >= 2
    assert answers[-1][1] == 200
    for (before_s, _, wait_s), (after_s, _, _) in itertools.pairwise(answers):
        assert wait_s > 0 and after_s - before_s >= wait_s
