"""gRPC beside HTTP, on a server in processes of its own: the same tokens, streams of either face read over the other."""

import json
import os
import queue
import signal
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from headrace.accounts.keys import hash_key
from headrace.gateway.grpc import headrace_pb2 as pb
from headrace.gateway.grpc.call import SERVICE
from tests.api.live_server import PATIENCE_S, LiveServer, eventually, free_port, live_server, written

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789"
NUM_TOKENS = 200
CONFIG = f"""
[gateway]
disconnect_grace_s = 30.0
[[models]]
name = "fake"
runner = "fake"
[models.fake]
profile = {{ c0_s = 0.002, c_in_s = 1e-6, c_out_s = 1e-6 }}
[[tenants]]
name = "alice"
keys = ["{hash_key(ALICE)}"]
[[tenants]]
name = "bob"
keys = ["{hash_key(BOB)}"]
"""
ASKED: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Hello"}]},
    "completions": {"prompt": "Once upon a time"},
}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class Served:
    """The server, and a channel to it."""

    def __init__(self, server: LiveServer, port: int) -> None:
        self.server = server
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")

    def call(self, *said: Any, **settings: Any) -> Any:
        return self.call_of(iter(said), isinstance(said[0], pb.ResumeRequest), **settings)

    def call_of(
        self,
        said: Iterator[Any],
        is_resumed: bool = False,
        *,
        key: str = ALICE,
        timeout: float = PATIENCE_S,
        **metadata: str,
    ) -> Any:
        opened = self.channel.stream_stream(
            f"/{SERVICE}/{'ResumePredict' if is_resumed else 'Predict'}",
            request_serializer=lambda each: each.SerializeToString(),
            response_deserializer=pb.PredictChunk.FromString,
        )
        sent = [(name.replace("_", "-"), value) for name, value in metadata.items()]
        return opened(said, metadata=[("authorization", f"Bearer {key}"), *sent], timeout=timeout)

    def events(self, path: str, body: Any = None, **headers: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Number and chunk of each event over HTTP."""
        with self.server.connect() as connection:
            sent = {"authorization": f"Bearer {ALICE}", "content-type": "application/json"}
            sent |= {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("GET" if body is None else "POST", path, json.dumps(body), sent)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            number = 0
            for line in response:
                if line.startswith(b"id: "):
                    number = int(line[4:])
                elif line.startswith(b"data: {"):
                    yield number, json.loads(line[6:])

    def health(self, service: str = "") -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        found: int = HealthStub(self.channel).Check(request, timeout=PATIENCE_S).status
        return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home, port = tmp_path_factory.mktemp("grpc"), free_port()
    with live_server(home, "--config", str(written(home, CONFIG)), "--grpc-port", str(port)) as server:
        found = Served(server, port)
        assert server.ready["grpc"] == f"127.0.0.1:{port}"
        yield found
        found.channel.close()


def body_of(api: str, **fields: Any) -> dict[str, Any]:
    return {"model": "default", "max_tokens": 40, "temperature": 1.0, "seed": 7, **ASKED[api], **fields}


def start(api: str = "chat", window: int | None = None, **fields: Any) -> pb.PredictRequest:
    body = json.dumps(body_of(api, **fields)).encode()
    return pb.PredictRequest(start=pb.Start(api=api, body=body, window=window))


def resume(stream: str, after: int = 0, **fields: Any) -> pb.ResumeRequest:
    return pb.ResumeRequest(resume=pb.Resume(stream=stream, after=after, **fields))


def said_over_grpc(chunks: list[pb.PredictChunk]) -> list[tuple[int, str, list[int], str]]:
    found = [(chunk.chunk_seq, choice) for chunk in chunks for choice in chunk.choices]
    return [(number, choice.text, list(choice.token_ids), choice.finish_reason) for number, choice in found]


def said_over_http(events: list[tuple[int, dict[str, Any]]]) -> list[tuple[int, str, list[int], str]]:
    found = [(number, choice) for number, chunk in events for choice in chunk["choices"]]
    return [
        (
            number,
            (choice["delta"].get("content") if "delta" in choice else choice["text"]) or "",
            choice["token_ids"],
            choice["finish_reason"] or "",
        )
        for number, choice in found
    ]


@pytest.mark.parametrize("api", ASKED)
def test_the_tokens_are_those_of_server_sent_events(served: Served, api: str) -> None:
    chunks = list(served.call(start(api)))
    body = body_of(api, stream=True, return_token_ids=True)
    events = said_over_http(list(served.events(PATHS[api], body)))
    over_grpc = said_over_grpc(chunks)
    assert "".join(text for _, text, *_ in over_grpc) == "".join(text for _, text, *_ in events)
    assert [ids for _, _, ids, _ in over_grpc if ids] == [ids for _, _, ids, _ in events if ids]
    assert over_grpc[-1][3] == events[-1][3] == "length"
    assert chunks[-1].is_final and chunks[-1].usage.completion_tokens == 40
    assert chunks[-1].system_fingerprint and dict(chunks[-1].stages_ms)


def test_a_stream_that_is_cut_after_every_chunk_is_the_same(served: Served) -> None:
    whole = list(served.call(start(max_tokens=NUM_TOKENS), x_request_id="cut"))
    for after in range(0, len(whole), 7):
        rest = list(served.call(resume("cut", after)))
        assert rest[:-1] == whole[after:-1]
        assert rest[-1].is_final
    # While it runs, each chunk over a call of its own.
    first = served.call(start(max_tokens=NUM_TOKENS, seed=8), x_request_id="live")
    heard = [next(first)]
    first.cancel()
    while not heard[-1].is_final:
        call = served.call(resume("live", heard[-1].chunk_seq))
        heard.append(next(call))
        call.cancel()
    undisturbed = list(served.call(start(max_tokens=NUM_TOKENS, seed=8)))
    assert [each[1:] for each in said_over_grpc(heard)] == [each[1:] for each in said_over_grpc(undisturbed)]
    assert [chunk.chunk_seq for chunk in heard] == [chunk.chunk_seq for chunk in undisturbed]


def test_a_stream_of_one_face_is_gone_on_with_over_the_other(served: Served) -> None:
    body = body_of("chat", stream=True, return_token_ids=True)
    events = list(served.events(PATHS["chat"], body, x_request_id="http"))
    number = events[10][0]
    rest = said_over_grpc(list(served.call(resume("http", number))))
    assert rest == [each for each in said_over_http(events) if each[0] > number]
    list(served.call(start(return_token_ids=True), x_request_id="grpc"))
    behind = list(served.events(f"/v1/streams/grpc?after={number}"))
    assert said_over_http(behind) == rest


def test_a_window_is_never_exceeded(served: Served) -> None:
    acks: queue.Queue[int | None] = queue.Queue()
    acked, heard = [0], list[int]()

    def speak() -> Iterator[pb.PredictRequest]:
        yield start(window=8, max_tokens=60)
        while (number := acks.get(timeout=PATIENCE_S)) is not None:
            acked[0] = number
            yield pb.PredictRequest(ack=pb.Ack(seq=number))

    for chunk in served.call_of(speak()):
        heard.append(chunk.chunk_seq)
        if not chunk.is_final:
            assert len([number for number in heard if number > acked[0]]) <= 8
            if len(heard) % 4 == 0:
                acks.put(chunk.chunk_seq)
    acks.put(None)
    assert chunk.is_final and chunk.usage.completion_tokens == 60


def test_strangers_and_other_tenants_find_nothing(served: Served) -> None:
    list(served.call(start(max_tokens=3), x_request_id="alices"))
    for key, code in ((BOB, grpc.StatusCode.NOT_FOUND), ("sk-nobody-0123456789", grpc.StatusCode.UNAUTHENTICATED)):
        with pytest.raises(grpc.RpcError) as refused:
            list(served.call(resume("alices"), key=key))
        assert refused.value.code() is code
        assert "headrace-error-bin" in dict(refused.value.trailing_metadata())


def test_a_deadline_ends_the_generation(served: Served) -> None:
    with pytest.raises(grpc.RpcError) as over:
        list(served.call(start(max_tokens=4000), timeout=1.0))
    assert over.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


def test_health_says_that_it_serves(served: Served) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    assert served.health() == served.health(SERVICE) == serving


def test_a_gateway_that_dies_is_followed_by_one_on_the_same_port(served: Served) -> None:
    os.kill(served.server.child("gateway"), signal.SIGKILL)

    def again() -> bool:
        try:
            return bool(list(served.call(start(max_tokens=2))))
        except grpc.RpcError:
            return False

    assert eventually(again, "no gRPC after the gateway died")


def test_a_server_that_is_told_to_stop_finishes_what_is_open_and_takes_nothing_new(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    home, port = tmp_path_factory.mktemp("drain"), free_port()
    # It has to last until all the rest was seen.
    config = CONFIG.replace("[gateway]", "[gateway]\ndrain_s = 120.0").replace("c0_s = 0.002", "c0_s = 0.01")
    with live_server(home, "--config", str(written(home, config)), "--grpc-port", str(port)) as server:
        served = Served(server, port)
        call = served.call(start(max_tokens=1000), timeout=3 * PATIENCE_S)
        heard = [next(call)]
        server.signal(signal.SIGTERM)
        eventually(lambda: served.health() == health_pb2.HealthCheckResponse.NOT_SERVING, "it says that it serves")
        with pytest.raises(grpc.RpcError) as refused:
            list(served.call(start()))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        heard += call
        assert heard[-1].is_final and heard[-1].usage.completion_tokens == 1000
        assert server.wait() == 0
        served.channel.close()
