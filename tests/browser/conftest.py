"""A browser, a server that imitates the API, and a page that watches itself for errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request, expect, sync_playwright

from tests.browser.chromium import DIED, Chromium, run_with_second_chance
from tests.browser.imitation import KEY, PATIENCE_S, Imitation, Running

_WATCH_POLICY = "document.addEventListener('securitypolicyviolation', e => console.error('policy: ' + e.blockedURI))"
# Observers are told before anything else is drawn or run.
_NOTE_BUTTONS = """() => {
  window.buttonsSaid = [];
  const note = () => {
    for (const it of document.querySelectorAll("button")) {
      const known = window.buttonsSaid.some(([text, isEnabled]) => text === it.textContent && isEnabled === !it.disabled);
      if (!known) window.buttonsSaid.push([it.textContent, !it.disabled]);
    }
  };
  new MutationObserver(note).observe(document.body, { subtree: true, childList: true, attributes: true });
}"""


@dataclass  # no slots: Playwright hangs its own attributes on the owner of a listener
class Tab:
    """A page of the browser with what it complained about and what it fetched."""

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)

    @property
    def reply(self) -> Locator:
        return self.page.get_by_role("article", name="Reply")

    def open(self, fragment: str = f"#key={KEY}") -> None:
        self.page.goto(f"{self.url}/{fragment}")

    def note_buttons(self) -> None:
        """From now on, whatever any button says is kept, however shortly it says it."""
        self.page.evaluate(_NOTE_BUTTONS)

    def buttons_said(self, word: str) -> list[tuple[str, bool]]:
        """What buttons with this word said, one after the other, and whether they could be pressed then."""
        said: list[tuple[str, bool]] = [
            (text, is_enabled) for text, is_enabled in self.page.evaluate("window.buttonsSaid") if word in text
        ]
        return said

    def ask(self, question: str) -> None:
        self.page.get_by_label("Message").fill(question)
        self.page.keyboard.press("Enter")

    def note_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def note_request(self, request: Request) -> None:
        self.fetched.append(request.url)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Called for every test of the process; those with a browser are run here."""
    if "browser" not in getattr(item, "fixturenames", ()):
        return None
    run_with_second_chance(item, nextitem)
    return True


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    """Not for the session: while Playwright runs, no other test of the process can run an event loop."""
    expect.set_options(timeout=1000 * PATIENCE_S)
    with sync_playwright() as playwright:
        chromium = Chromium(playwright)
        yield chromium
        chromium.close()


@pytest.fixture
def browser(chromium: Chromium, request: pytest.FixtureRequest) -> Iterator[Browser]:
    """The module's browser, or a new one where that has died."""
    browser = chromium.running()
    try:
        yield browser
    finally:
        request.node.stash[DIED] = chromium.is_dead()


@pytest.fixture
def api() -> Imitation:
    return Imitation()


@pytest.fixture
def tab(browser: Browser, api: Imitation) -> Iterator[Tab]:
    with Running(api) as server, open_tab(browser, server.url) as tab:
        yield tab


@contextmanager
def open_tab(browser: Browser, url: str) -> Iterator[Tab]:
    context = browser.new_context(viewport={"width": 1000, "height": 800})
    context.set_default_timeout(1000 * PATIENCE_S)
    page = context.new_page()
    page.add_init_script(_WATCH_POLICY)
    tab = Tab(page, url)
    page.on("console", tab.note_console)
    page.on("pageerror", lambda error: tab.complaints.append(str(error)))
    page.on("request", tab.note_request)
    yield tab
    context.close()
