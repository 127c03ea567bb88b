"""Bad inputs against a real server while a stream runs: each gets its answer, and the stream does not notice."""

import json
import socket
import threading
from typing import Any

import pytest

from tests.api.live_server import PATIENCE_S, LiveServer

LONG: dict[str, Any] = {"max_tokens": 1200, "temperature": 0, "seed": 7, "ignore_eos": True}
HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "default", "messages": HELLO, "max_tokens": 4, **fields}).encode()


def post(body: bytes, *headers: str, path: str = "/v1/chat/completions", kind: str = "application/json") -> list[bytes]:
    """A request; KEY becomes the real one when it is sent."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Authorization: Bearer KEY", f"Content-Type: {kind}", *headers]
    if not any(header.lower().startswith(("content-length", "transfer-encoding")) for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    return ["\r\n".join(lines).encode() + b"\r\n\r\n", body]


def get(path: str, *headers: str, key: str = "Authorization: Bearer KEY", host: str = "localhost") -> list[bytes]:
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", *([key] if key else []), *headers]
    return ["\r\n".join(lines).encode() + b"\r\n\r\n"]


ATTACKS: dict[str, tuple[list[bytes], set[int]]] = {
    "no key": (get("/v1/models", key=""), {401}),
    "wrong key": (get("/v1/models", key="Authorization: Bearer wrong"), {401}),
    "empty bearer": (get("/v1/models", key="Authorization: Bearer "), {401}),
    "lower-case scheme": (get("/v1/models", key="authorization: bearer KEY"), {401}),
    "two keys": (get("/v1/models", "Authorization: Bearer KEY"), {400}),
    "key in query": (get("/v1/models?api_key=KEY", key=""), {401}),
    "key in cookie": (get("/v1/models", "Cookie: key=KEY", key=""), {401}),
    "double slash": (get("//v1/models"), {404}),
    "dots": (get("/v1/../v1/models"), {404}),
    "escaped dots": (get("/v1/%2e%2e/v1/models"), {404}),
    "semicolon": (get("/v1/models;x"), {404}),
    "rewritten": (get("/nothing", "X-Original-URL: /live", key=""), {401}),
    "absolute form": (get("http://evil.example/v1/models", key=""), {401}),
    "strange host": (get("/v1/models", host="rebound.example"), {403}),
    "page elsewhere": (post(chat(), "Origin: http://evil.example"), {403}),
    "null origin": (post(chat(), "Origin: null"), {403}),
    "1 MB header": (get("/v1/models", "X: " + "a" * (1 << 20)), {431}),
    "10k headers": (get("/v1/models", *["X: y"] * 10_000), {431}),
    "no colon": (get("/v1/models", "nonsense"), {400}),
    "NUL": (get("/v1/models", "X: \x00"), {400}),
    "folded": (get("/v1/models", "X: a\r\n b"), {400}),
    "length and chunks": (post(b"0\r\n\r\n", "Content-Length: 5", "Transfer-Encoding: chunked"), {400}),
    "bad chunk": (post(b"zz\r\n", "Transfer-Encoding: chunked"), {400}),
    "1-byte chunks": (post(b"1\r\n \r\n" * 500_000, "Transfer-Encoding: chunked"), {400, 413}),
    "body of 9 MB": (post(b" " * (9 << 20)), {413}),
    "gzip": (post(b"\x1f\x8b" + b"\0" * 100, "Content-Encoding: gzip"), {415}),
    "form": (post(chat(), kind="application/x-www-form-urlencoded"), {415}),
    "BOM": (post(b"\xef\xbb\xbf" + chat()), {400}),
    "UTF-16": (post(chat().decode().encode("utf-16")), {400}),
    "invalid UTF-8": (post(b'{"model":"\xff"}'), {400}),
    "lone surrogate": (post(b'{"model":"default","messages":[{"role":"user","content":"\\ud800"}]}'), {400}),
    "truncated": (post(chat()[:-5]), {400}),
    "list": (post(b"[]"), {400}),
    "nothing": (post(b""), {400}),
    "nested": (post(b'{"x":' + b"[" * 100_000), {400}),
    "unknown model": (post(chat(model="no-such-model")), {404}),
    "number as text": (post(chat(max_tokens="1")), {400}),
    "true as number": (post(chat(n=True)), {400}),
    "10^12 tokens": (post(chat(max_tokens=10**12)), {400}),
    "negative tokens": (post(chat(max_tokens=-1)), {400}),
    "2^64 seed": (post(chat(seed=2**64)), {400}),
    "huge temperature": (post(chat(temperature=1e308)), {400}),
    "infinite": (post(chat().replace(b'"max_tokens": 4', b'"temperature": 1e999')), {400}),
    "top_k -2": (post(chat(top_k=-2)), {400}),
    "n 10^9": (post(chat(n=10**9)), {400}),
    "100k stops": (post(chat(stop=["a"] * 100_000)), {400}),
    "empty stop": (post(chat(stop=[""])), {400}),
    "10k tools": (post(chat(tools=[{"type": "function", "function": {"name": "f"}}] * 10_000)), {400}),
    "a template": (post(chat(chat_template="{% for i in range(10**9) %}{% endfor %}")), {400}),
    "unknown role": (post(chat(messages=[{"role": "god", "content": "x"}])), {400}),
    "a result without a call": (post(chat(messages=[{"role": "tool", "tool_call_id": "x", "content": "x"}])), {400}),
    "an address": (
        post(chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1"}}]}])),
        {400},
    ),
    "a long prompt": (post(chat(messages=[{"role": "user", "content": "x " * 20_000}])), {400}),
    "ids of no token": (post(json.dumps({"model": "default", "prompt": [2**31]}).encode(), path="/v1/completions"), {400}),
    "a schema that refers to itself": (
        post(chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://x/y"}}})),
        {400},
    ),
    "another's request": (get("/v1/requests/req_000000000000000000000000/explain"), {404}),
}  # fmt: skip


def tell(server: LiveServer, parts: list[bytes]) -> tuple[int, bytes]:
    """Status and body."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as wire:
        answer = b""
        try:
            for part in parts:
                wire.sendall(part.replace(b"KEY", server.key.encode()))
        except ConnectionError:
            pass
        while b"\r\n\r\n" not in answer:
            more = wire.recv(65536)
            assert more, "closed without an answer"
            answer += more
        head, _, body = answer.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        while len(body) < length:
            body += wire.recv(65536)
    return int(head.split()[1]), body


def test_every_attack_gets_its_answer_while_a_stream_runs_on(fake_server: LiveServer) -> None:
    alone = fake_server.text(**LONG)
    gateway, worker = fake_server.child("gateway"), fake_server.child("worker fake 0")
    told: list[str] = []
    stop = threading.Event()

    def listen() -> None:
        while not stop.is_set():
            told.append(fake_server.text(**LONG))

    listener = threading.Thread(target=listen)
    listener.start()
    wrong: list[str] = []
    try:
        for name, (parts, expected) in ATTACKS.items():
            status, body = tell(fake_server, parts)
            error = json.loads(body).get("error", {})
            if status not in expected or set(error) != {"message", "type", "param", "code"}:
                wrong.append(f"{name}: {status}: {body[:200]!r}")
            for leak in (b"Traceback", b'File "', b"site-packages", b"0x", fake_server.key.encode()):
                assert leak not in body, name
    finally:
        stop.set()
        listener.join()
    assert not wrong, "\n".join(wrong)
    assert told and set(told) == {alone}
    assert (fake_server.child("gateway"), fake_server.child("worker fake 0")) == (gateway, worker)
    assert fake_server.key not in fake_server.said()


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/tokenize", "/metrics", "/nothing"])
def test_a_page_elsewhere_cannot_change_anything(fake_server: LiveServer, path: str) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        request = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nOrigin: null\r\nContent-Length: 0\r\n\r\n"
        assert tell(fake_server, [request.encode()])[0] == 403
