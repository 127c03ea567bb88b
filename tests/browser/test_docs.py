"""The readable interface at /docs, drawn from the document that the gateway itself serves."""

from typing import cast

from playwright.sync_api import Browser, expect

from headrace.gateway.endpoints import ROUTES
from tests.browser.conftest import open_tab
from tests.browser.imitation import Imitation, Running
from tests.unit.gateway.stub import gateway


def test_the_page_and_its_files_are_routes() -> None:
    paths = {route.path for route in ROUTES}
    assert {"/docs", "/static/docs.css", "/static/docs.js"} <= paths


def test_the_page_draws_itself_without_complaint(browser: Browser) -> None:
    with Running(cast(Imitation, gateway())) as server, open_tab(browser, server.url) as tab:
        tab.page.goto(f"{server.url}/docs")
        chat = tab.page.locator("#post_chat_completions")
        expect(chat.locator("pre")).to_contain_text("curl -N")
        listed = [route for route in ROUTES if route.listed]
        assert tab.page.locator("article .method").count() >= len(listed)
        chat.get_by_text("Body: ChatBody").click()
        expect(chat.locator("code", has_text="temperature").first).to_be_visible()
        assert not tab.complaints
        assert all(url.startswith(server.url) for url in tab.fetched)
