"""Refusals and broken streams are said in plain words, with the time to wait."""

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Tab
from tests.browser.imitation import Imitation, Script


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (400, "The server could not use this request."),
        (403, "This key may not do that."),
        (404, "The server does not have what was asked for."),
        (413, "The message is too long."),
        (429, "Too many requests for now."),
        (500, "The server failed on this request."),
        (503, "The server is busy or not ready."),
        (504, "The server ran out of time."),
        (599, "The server refused the request (599)."),
    ],
)
def test_a_refusal_is_said_with_the_servers_sentence(tab: Tab, api: Imitation, status: int, words: str) -> None:
    api.scripts = [Script(status=status, message="a sentence of the server")]
    tab.open()
    tab.ask("Hi.")
    expect(tab.reply.get_by_role("alert")).to_contain_text(f"{words} a sentence of the server")
    tab.reply.get_by_role("button", name="Try again").click()
    expect(tab.reply).to_contain_text("Hello, world.")
    assert len(api.chats) == 2
    assert api.chats[1].body["messages"] == [{"role": "user", "content": "Hi."}]
    # Chromium itself notes a refused request; the page adds nothing.
    assert [one for one in tab.complaints if "Failed to load resource" not in one] == []


@pytest.mark.parametrize("header", [{"retry-after": "2"}, {"retry-after-ms": "1500", "retry-after": "60"}])
def test_the_retry_time_is_counted_down(tab: Tab, api: Imitation, header: dict[str, str]) -> None:
    api.scripts = [Script(status=503, message="the queue is full", headers=header)]
    tab.open()
    tab.note_buttons()
    tab.ask("Hi.")
    again = tab.reply.get_by_role("button", name="Try again")
    expect(again).to_have_text("Try again")
    said = tab.buttons_said("Try again")
    assert (said[0], said[-1]) == (("Try again in 2 s", False), ("Try again", True))
    again.click()
    expect(tab.reply).to_contain_text("Hello, world.")


def test_a_long_retry_time_is_said_in_minutes(tab: Tab, api: Imitation) -> None:
    api.scripts = [Script(status=429, headers={"retry-after": "600"})]
    tab.open()
    tab.ask("Hi.")
    expect(tab.reply.get_by_role("button", name="Try again")).to_have_text("Try again in 10 min")


def test_a_key_that_is_refused_is_asked_for_again(tab: Tab, api: Imitation) -> None:
    api.scripts = [Script(status=401, message="no key, or none we know")]
    tab.open()
    tab.ask("Hi.")
    expect(tab.page.get_by_role("dialog")).to_contain_text("The key was not accepted.")
    expect(tab.reply.locator(".notice")).to_contain_text("The key was not accepted.")


def test_an_error_in_a_stream_keeps_what_was_said(tab: Tab, api: Imitation) -> None:
    api.scripts = [Script(pieces=["So far"], broken="the worker is gone")]
    tab.open()
    tab.ask("Hi.")
    expect(tab.reply.get_by_role("alert")).to_contain_text("The reply broke off. the worker is gone")
    expect(tab.reply.locator(".text")).to_have_text("So far")
    assert tab.complaints == []


def test_a_turn_without_an_answer_is_not_sent_with_the_next(tab: Tab, api: Imitation) -> None:
    api.scripts = [Script(status=500)]
    tab.open()
    tab.ask("Lost.")
    expect(tab.reply.get_by_role("alert")).to_be_visible()
    tab.ask("Next.")
    expect(tab.reply.last).to_contain_text("Hello, world.")
    assert api.chats[1].body["messages"] == [{"role": "user", "content": "Next."}]


def test_a_server_that_is_not_ready_is_asked_again(tab: Tab, api: Imitation) -> None:
    api.models_status = 503
    tab.open()
    banner = tab.page.get_by_role("alert").filter(has_text="The server is busy or not ready.")
    expect(banner).to_be_visible()
    api.models_status = 200
    banner.get_by_role("button", name="Try again").click()
    expect(tab.page.get_by_label("Model")).to_have_value("first-model")
    expect(banner).to_be_hidden()


def test_a_server_that_is_gone_is_said(tab: Tab) -> None:
    tab.open()
    expect(tab.page.get_by_label("Model")).to_have_value("first-model")
    tab.page.context.set_offline(True)
    tab.ask("Hi.")
    expect(tab.reply.get_by_role("alert")).to_contain_text("The server cannot be reached.")


def test_a_reply_cut_by_its_limit_says_so(tab: Tab, api: Imitation) -> None:
    api.scripts = [Script(finish="length")]
    tab.open()
    tab.ask("Hi.")
    expect(tab.reply).to_contain_text("The reply reached its limit of tokens.")
