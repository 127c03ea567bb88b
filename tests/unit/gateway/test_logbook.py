"""One line per request, and not more than so many a second for those without a key."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.core.caller import Caller
from headrace.core.request import Tier
from headrace.gateway import logbook
from headrace.telemetry.log import STRANGERS_PER_S, Allowance

CALLER = Caller("acme", Tier.PLUS, "k1", frozenset())


def exchange(at_s: float, caller: Caller | None = None) -> Any:
    clock = SimpleNamespace(now_s=lambda: at_s)
    context = SimpleNamespace(clock=clock)
    return SimpleNamespace(caller=caller, context=context, method="GET", raw_path=b"/x", request_id="r")


SAMPLE: Any = SimpleNamespace(status=401, wall_s=0.001, tenant="", prompt_tokens=0, completion_tokens=0)


def test_strangers_cannot_flood_and_do_not_hide_callers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logbook, "_STRANGERS", Allowance(STRANGERS_PER_S))
    caplog.set_level(logging.INFO)
    for number in range(1000):
        logbook.log_request(exchange(number / 1001), SAMPLE)
        logbook.log_request(exchange(number / 1001, CALLER), SAMPLE)
    assert len(caplog.messages) == STRANGERS_PER_S + 1000
    caplog.clear()
    logbook.log_request(exchange(2.0), SAMPLE)
    assert caplog.messages[0] == f"{1000 - STRANGERS_PER_S} more requests without a key are not shown"
    assert caplog.messages[1].startswith("GET /x 401") and len(caplog.messages) == 2


def test_what_a_client_sent_cannot_forge_a_line() -> None:
    assert logbook.escape("/v1/chat/completions") == "/v1/chat/completions"
    assert logbook.escape("/x\nINFO forged") == "/x\\nINFO forged"
    assert logbook.escape("\x1b[31m \\ \u202e") == "\\x1b[31m \\\\ \\u202e"
    assert logbook.escape("a" * 300) == "a" * 200 + "..."
