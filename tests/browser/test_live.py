"""The page over the real server with the fake model: what it shows is what the API really says."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import Tab, open_tab
from tests.browser.imitation import PATIENCE_S

HEADRACE = Path(sys.executable).with_name("headrace")
CONFIG = """
[[models]]
name = "fake"
runner = "fake"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A real server on a free port: what it said when it was ready."""
    folder = tmp_path_factory.mktemp("live")
    (folder / "headrace.toml").write_text(CONFIG)
    command = [str(HEADRACE), "serve", "--port", "0", "--json", "--config", str(folder / "headrace.toml")]
    with pytest.MonkeyPatch.context() as patch, (folder / "log").open("w") as log:
        patch.setenv("HEADRACE_HOME", str(folder / "home"))
        patch.delenv("HEADRACE_LOCAL_KEY", raising=False)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as process:
            try:
                assert process.stdout is not None
                ready = process.stdout.readline()
                assert ready, (folder / "log").read_text()
                yield json.loads(ready)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(PATIENCE_S)


@pytest.fixture
def live(browser: Browser, server: dict[str, str]) -> Iterator[Tab]:
    with open_tab(browser, server["url"]) as tab:
        tab.open(f"#key={Path(server['key_file']).read_text().strip()}")
        expect(tab.page.get_by_label("Model")).to_be_enabled()
        yield tab


def test_type_watch_it_stream_see_where_the_time_went(live: Tab) -> None:
    live.page.get_by_role("button", name="Settings").click()
    live.page.get_by_label("Most tokens of a reply").fill("64")
    live.page.get_by_role("button", name="Close").click()
    live.ask("Hello?")
    expect(live.reply).to_have_attribute("aria-busy", "false")
    expect(live.reply.locator(".figures")).to_contain_text(re.compile(r"^64 tokens · [\d.]+ tokens/s · first after"))
    expect(live.reply).to_contain_text("The reply reached its limit of tokens.")
    expect(live.reply.get_by_role("img")).to_have_attribute("aria-label", re.compile("prefill .*decode "))
    assert live.complaints == []
    assert {urlsplit(url).netloc for url in live.fetched} == {urlsplit(live.url).netloc}


def test_stop_and_ask_again(live: Tab) -> None:
    live.ask("Talk without end.")
    expect(live.reply.locator(".figures")).to_contain_text("tokens/s")
    live.page.keyboard.press("Escape")
    expect(live.reply).to_contain_text("Stopped.")
    live.ask("And again.")
    expect(live.reply.last.locator(".figures")).to_contain_text("tokens/s")
    live.page.get_by_role("button", name="Stop").click()
    expect(live.reply.last).to_contain_text("Stopped.")
    assert live.complaints == []


def test_a_key_that_the_server_does_not_know_is_refused(live: Tab) -> None:
    live.page.get_by_role("button", name="Settings").click()
    live.page.get_by_role("button", name="Change key").click()
    live.page.get_by_label("API key").fill("hr-unknown")
    live.page.get_by_role("button", name="Use this key").click()
    expect(live.page.get_by_role("dialog")).to_contain_text("The key was not accepted.")
