"""Bodies: bounded, JSON, UTF-8, plain."""

import asyncio

import pytest

from tests.unit.gateway.stub import AUTH, JSON, Call, StubService, ask, gateway


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"content-type": "application/json"}, b'{"text":"a"}', 200),
        ({"content-type": "Application/JSON; Charset=UTF-8"}, b'{"text":"a"}', 200),
        ({"content-type": "application/json", "content-encoding": "identity"}, b'{"text":"a"}', 200),
        ({}, b"{}", 415),
        ({"content-type": "text/plain"}, b"{}", 415),
        ({"content-type": "application/x-www-form-urlencoded"}, b"{}", 415),
        ({"content-type": "application/json; charset=utf-16"}, b"{}", 415),
        ({"content-type": "application/jsonx"}, b"{}", 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, b"\x1f\x8b", 415),
        ({"content-type": "application/json", "content-encoding": "br"}, b"{}", 415),
        ({"content-type": "application/json", "content-encoding": "zstd, identity"}, b"{}", 415),
    ],
)
def test_media(headers: dict[str, str], body: bytes, status: int) -> None:
    assert ask(gateway(), "POST", "/whole", {**AUTH, **headers}, body).status == status


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"null", b'"text"', b'{"text":', b'{"text":"a"} x', b"\xef\xbb\xbf{}", '{"text":"a"}'.encode("utf-16"),
        b'{"text":"\xff"}', b'{"text":"\\ud800"}', b'{"text":"\\udc00"}', b'{"text":"\\ud800\\ud800"}', b'{"text":1}', b'{"text":NaN}',
        b'{"text":null}', b'{"more":' + b"[" * 100_000, b"{" * 100_000,
    ],
)  # fmt: skip
def test_what_is_not_this_kind_of_json_is_400(body: bytes) -> None:
    answer = ask(gateway(), "POST", "/whole", JSON, body)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


def test_the_field_is_named() -> None:
    assert ask(gateway(), "POST", "/whole", JSON, b'{"text":1}').error["param"] == "text"


def test_a_body_is_bounded_as_declared_and_as_it_comes() -> None:
    app = gateway(max_body_bytes=20)
    assert ask(app, "POST", "/whole", JSON, b'{"text":"12345678"}').status == 200
    assert ask(app, "POST", "/whole", JSON, b'{"text":"1234567890"}').status == 413
    assert ask(app, "POST", "/whole", JSON, [b" " * 10, b" " * 11]).status == 413
    assert ask(app, "POST", "/whole", {**JSON, "content-length": "21"}, b"").status == 413
    assert ask(app, "POST", "/whole", JSON, [b'{"text":', b'"1 2"', b"}"]).status == 200


def test_a_client_that_leaves_before_its_body_is_here_costs_nothing() -> None:
    async def story() -> None:
        service = StubService()
        call = Call(gateway(service), "POST", "/whole", JSON, [])
        call.leave()
        answer = await call.run()
        assert answer.status == 0
        assert not service.streams

    asyncio.run(story())
