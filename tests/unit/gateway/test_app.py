"""Every request is answered once, by the route it names, if its key may."""

import logging

import msgspec
import pytest

from headrace.accounts.keys import KeyRing
from headrace.core.caller import Caller
from headrace.gateway.endpoints import ROUTES
from headrace.gateway.pages import PAGES
from headrace.gateway.routes import Access
from tests.unit.gateway.scene import Scene, play
from tests.unit.gateway.stub import AUTH, JSON, KEY, METRICS_KEY, StubService, ask, gateway, turns

PUBLIC = {"/live", "/ready", "/health", "/ping", "/version", "/openapi.json", *PAGES}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
NO_KEY = {"host": "localhost"}


def test_only_these_are_public() -> None:
    assert {route.path for route in ROUTES if route.access is Access.PUBLIC} == PUBLIC


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", sorted({route.path for route in ROUTES}))
def test_without_a_key_every_route_and_method_is_refused(path: str, method: str) -> None:
    real = path.replace("{request_id}", "known").replace("{stream_id}", "known").replace("{model:path}", "tiny")
    assert "{" not in real
    answer = ask(gateway(), method, real, NO_KEY)
    known = {route.method for route in ROUTES if route.path == path}
    if path not in PUBLIC:
        assert answer.status == 401
    elif method in known or (method == "HEAD" and "GET" in known):
        assert answer.status == 200
    else:
        assert answer.status == 405


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer  "},
        {"authorization": f"bearer {KEY}"},
        {"authorization": f"BEARER {KEY}"},
        {"authorization": f"Bearer  {KEY}"},
        {"authorization": f"Bearer {KEY} "},
        {"authorization": f"Basic {KEY}"},
        {"authorization": KEY},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer " + "k" * 513},
        {"x-api-key": ""},
        {"x-api-key": "wrong"},
        {"cookie": f"key={KEY}; authorization=Bearer {KEY}"},
        {"x-forwarded-authorization": f"Bearer {KEY}"},
    ],
)
def test_what_is_no_key_is_401(headers: dict[str, str]) -> None:
    answer = ask(gateway(), "GET", "/v1/requests/known/explain", {**NO_KEY, **headers})
    assert answer.status == 401
    assert answer.error["type"] == "authentication_error"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_a_key_in_the_query_is_none_and_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        query = f"api_key={KEY}&key={KEY}"
        assert ask(gateway(), "GET", "/v1/requests/known/explain", NO_KEY, query=query).status == 401
        assert ask(gateway(), "GET", "/v1/requests/known/explain", AUTH, query=query).status == 200
    assert len(caplog.records) == 2
    assert KEY not in caplog.text


@pytest.mark.parametrize("carrier", [AUTH, {**NO_KEY, "x-api-key": KEY}, {**AUTH, "x-api-key": KEY}])
def test_a_key_comes_by_either_header(carrier: dict[str, str]) -> None:
    assert ask(gateway(), "GET", "/v1/requests/known/explain", carrier).status == 200


def test_two_authorization_headers_are_400() -> None:
    twice = [("host", "localhost"), ("authorization", f"Bearer {KEY}"), ("authorization", "Bearer other")]
    assert ask(gateway(), "GET", "/v1/requests/known/explain", twice).status == 400
    differing = {**AUTH, "x-api-key": METRICS_KEY}
    assert ask(gateway(), "GET", "/v1/requests/known/explain", differing).status == 400


def test_keys_that_cannot_be_checked_let_nobody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(self: KeyRing, presented: str) -> Caller:
        raise OSError("database /var/lib is locked")

    monkeypatch.setattr(KeyRing, "find", find)
    answer = ask(gateway(), "GET", "/v1/requests/known/explain", AUTH)
    assert answer.status == 503
    assert answer.headers["retry-after"] == "1"
    assert b"/var" not in answer.body


@pytest.mark.parametrize(
    "path",
    [
        "//live", "/live/", "/live.", "/live;x", "/LIVE", "/%6cive", "/live%20", "/./live", "/x/../live", "/live%00",
        "/v1//requests/known/explain", "/v1/../live", "/v1/%2e%2e/live", "/things/../live", "/things/%2e%2e",
        "/things//a", "/things/a%2F..%2Fb", "/static/../app.py", "/static/", "/static/%2e%2e/app.py", "/nothing", "",
        "/things/" + "a" * 2000, "/v1/requests/a%2Fb/explain", "/v1/requests//explain",
    ],
)  # fmt: skip
def test_path_tricks_are_unknown_paths(path: str) -> None:
    assert ask(gateway(), "GET", path, NO_KEY).status == 401
    tricks = {"x-original-url": "/live", "x-rewrite-url": "/live", "x-forwarded-prefix": "/live"}
    assert ask(gateway(), "GET", path, {**NO_KEY, **tricks}).status == 401
    answer = ask(gateway(), "GET", path, AUTH)
    assert (answer.status, answer.error["type"]) == (404, "not_found_error")


@pytest.mark.parametrize(("path", "name"), [("a", "a"), ("org/m:1", "org/m:1"), ("org%2Fm%401", "org/m@1")])
def test_a_name_in_a_path_may_have_parts(path: str, name: str) -> None:
    assert msgspec.json.decode(ask(gateway(), "GET", f"/things/{path}", AUTH).body) == {"name": name}


def test_another_method_is_405_with_those_that_are_allowed() -> None:
    answer = ask(gateway(), "DELETE", "/v1/requests/known/explain", AUTH)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("localhost:8080", 200), ("127.0.0.1:1", 200), ("[::1]:8080", 200), ("LOCALHOST", 200),
        ("api.example", 200), ("api.example:443", 200), ("evil.example", 403), ("localhost.evil.example", 403), ("", 403),
        ("127.0.0.1.evil.example", 403), ("10.0.0.1", 403), ("localhost:80:80", 403), ("127.0.0.1@evil", 403),
    ],
)  # fmt: skip
def test_only_known_names_are_answered(host: str, status: int) -> None:
    app = gateway(allowed_hosts=("api.example",))
    for _ in range(2):
        answer = ask(app, "GET", "/v1/requests/known/explain", {**AUTH, "host": host})
        assert answer.status == status
    assert ask(app, "GET", "/live", {"host": host}).status == 200


def test_on_all_addresses_an_address_is_a_name_but_a_strange_name_is_not() -> None:
    app = gateway(host="0.0.0.0")
    assert ask(app, "GET", "/things/a", {**AUTH, "host": "10.1.2.3:8080"}).status == 200
    assert ask(app, "GET", "/things/a", {**AUTH, "host": "rebound.example"}).status == 403
    assert ask(gateway(allowed_hosts=("*",)), "GET", "/things/a", {**AUTH, "host": "any.example"}).status == 200


@pytest.mark.parametrize(
    "origin", ["null", "http://evil.example", "https://localhost.evil", "file://", "http://localhost:81"]
)
@pytest.mark.parametrize("method", ["POST", "DELETE", "PATCH", "PUT", "OPTIONS"])
def test_pages_elsewhere_may_not_change_anything(origin: str, method: str) -> None:
    for path in ("/say", "/", "/nothing"):
        answer = ask(gateway(), method, path, {**JSON, "origin": origin, "access-control-request-method": "POST"})
        assert answer.status == 403
        assert "access-control-allow-origin" not in answer.headers


def test_a_page_of_ours_or_of_an_allowed_origin_may_call() -> None:
    body = b'{"text":"a"}'
    own = {**JSON, "host": "localhost:8080", "origin": "http://localhost:8080"}
    assert ask(gateway(), "POST", "/whole", own, body).status == 200
    app = gateway(allowed_origins=("https://app.example",))
    answer = ask(app, "POST", "/whole", {**JSON, "origin": "https://app.example"}, body)
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "https://app.example")
    asked = {**NO_KEY, "origin": "https://app.example", "access-control-request-method": "POST"}
    answer = ask(app, "OPTIONS", "/whole", {**asked, "access-control-request-headers": "authorization, x-stainless-os"})
    assert answer.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
    assert (answer.status, answer.headers["access-control-allow-methods"]) == (204, "POST")
    assert "access-control-allow-origin" not in ask(app, "GET", "/things/a", {**AUTH, "origin": "http://other"}).headers


@pytest.mark.parametrize(
    ("headers", "client", "status"),
    [
        (NO_KEY, "127.0.0.1", 200),
        (NO_KEY, "::1", 200),
        (NO_KEY, "192.0.2.1", 401),
        ({**NO_KEY, "x-forwarded-for": "192.0.2.1"}, "127.0.0.1", 401),
        ({**NO_KEY, "x-real-ip": "192.0.2.1"}, "127.0.0.1", 401),
        ({**NO_KEY, "via": "1.1 proxy"}, "127.0.0.1", 401),
        (AUTH, "192.0.2.1", 403),
        ({**NO_KEY, "authorization": f"Bearer {METRICS_KEY}"}, "192.0.2.1", 200),
        ({"host": "rebound.example"}, "127.0.0.1", 403),
    ],
)
def test_metrics_are_for_this_machine_or_by_scope(headers: dict[str, str], client: str, status: int) -> None:
    assert ask(gateway(), "GET", "/metrics", headers, client=client).status == status


def test_an_unexpected_error_is_500_without_its_text_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    answer = ask(gateway(), "POST", "/burst", JSON, b"{}")
    assert answer.status == 500
    assert b"secret" not in answer.body and b"passwd" not in answer.body
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info is not None
    assert answer.headers["x-request-id"] in record.getMessage()


def test_a_request_id_is_echoed_if_it_is_harmless() -> None:
    assert ask(gateway(), "GET", "/live", {**NO_KEY, "x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert ask(gateway(), "GET", "/live", {**NO_KEY, "x-client-request-id": "abc-2"}).headers["x-request-id"] == "abc-2"
    for bad in ("a b", "a" * 129, "a\tb", "é", "a/b"):
        assert (
            ask(gateway(), "GET", "/live", {**NO_KEY, "x-request-id": bad}).headers["x-request-id"].startswith("req_")
        )


def test_a_log_line_cannot_be_forged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ask(gateway(), "GET", "/a\r\nINFO forged \x1b[31m" + "x" * 5000, AUTH)
    (record,) = caplog.records
    line = record.getMessage()
    assert line.isprintable() and line.isascii()
    assert len(line) < 500


def test_a_log_line_says_why_a_request_was_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ask(gateway(), "GET", "/nowhere", AUTH)
        ask(gateway(), "GET", "/things/a", AUTH)
    refused, answered = caplog.messages
    assert " 404 " in refused and refused.endswith(" error=not_found")
    assert " 200 " in answered and "error" not in answered


def test_full_and_draining_servers_refuse_but_answer_probes() -> None:
    app = gateway(max_open_requests=0)
    answer = ask(app, "GET", "/things/a", AUTH)
    assert (answer.status, answer.error["type"], answer.headers["retry-after"]) == (503, "overloaded", "1")
    assert ask(app, "GET", "/live").status == 200
    app = gateway()
    app.drain()
    answer = ask(app, "GET", "/things/a", AUTH)
    assert (answer.status, answer.headers["connection"]) == (503, "close")
    assert ask(app, "GET", "/ready").status == 503
    assert ask(app, "GET", "/live").status == 200


def test_ready_waits_for_every_model() -> None:
    service = StubService()
    service.is_served = False
    assert ask(gateway(service), "GET", "/ready").status == 503
    service.is_served = True
    assert ask(gateway(service), "GET", "/ready").status == 200


def test_an_explanation_is_for_its_tenant() -> None:
    mine = ask(gateway(), "GET", "/v1/requests/known/explain", AUTH)
    assert sum(msgspec.json.decode(mine.body)["stages"].values()) == msgspec.json.decode(mine.body)["total_s"]
    other = ask(gateway(), "GET", "/v1/requests/known/explain", {**NO_KEY, "x-api-key": METRICS_KEY})
    unknown = ask(gateway(), "GET", "/v1/requests/unknown/explain", AUTH)
    assert (other.status, other.body) == (unknown.status, unknown.body) == (404, other.body)


def test_new_limits_hold_from_the_next_request() -> None:
    app = gateway()
    app.reconfigure(msgspec.structs.replace(app.context.config, max_body_bytes=1, allowed_hosts=("new.example",)))
    assert ask(app, "POST", "/whole", JSON, b"{}").status == 413
    assert ask(app, "GET", "/things/a", {**AUTH, "host": "new.example"}).status == 200


@pytest.mark.parametrize("path", ["/say", "/whole"])
def test_a_request_is_over_when_its_last_bytes_were_given_to_the_connection(path: str) -> None:
    async def story(scene: Scene) -> None:
        scene.call.given_s = 2.0
        await scene.says("a")
        await scene.passes(2.0)
        scene.call.hold()
        await scene.ends()
        await scene.passes(5.0)
        scene.call.release()

    (stages,) = play(story, Scene(path)).service.finished_stages
    assert sum(stages.values()) == 2.0


def test_a_request_whose_client_left_is_over_when_that_is_known() -> None:
    async def story(scene: Scene) -> None:
        scene.call.given_s = 1.0
        await scene.says("a")
        await scene.passes(2.0)
        scene.call.leave()
        await turns()

    (stages,) = play(story, Scene("/whole")).service.finished_stages
    assert sum(stages.values()) == 2.0
