"""Debian's Chromium, one at a time, and the second chance of a test whose Chromium died.

Only a dead browser process gives a second chance, once, and the output says so (tests/conftest.py). A page that
fails, hangs or crashes, and an assertion that does not hold, fail their test at once.
"""

import shutil

import pytest
from _pytest.runner import runtestprotocol
from playwright.sync_api import Browser, Error, Playwright

from tests.conftest import SECOND_CHANCE

# Besides what Playwright sets: nothing that looks for a graphics card or a network, and few processes.
_FLAGS = (
    "--disable-gpu",
    "--disable-software-rasterizer",
    "--disable-quic",
    "--disable-domain-reliability",
    "--disable-sync",
    "--disable-component-update",
    "--disable-background-networking",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-pings",
    "--renderer-process-limit=1",
)
# The shell is the same browser without its windows, and takes a fifth of the time.
_NAMES = ("chromium-headless-shell", "chromium")
_CUT_OFF = "Target page, context or browser has been closed"
DIED = pytest.StashKey[bool]()


class Chromium:
    """Starts a browser when one is wanted and none lives."""

    def __init__(self, playwright: Playwright) -> None:
        self._playwright = playwright
        self._browser: Browser | None = None

    def running(self) -> Browser:
        if self._browser is None or self.is_dead():
            path = next(filter(None, map(shutil.which, _NAMES)), None)
            if path is None:
                pytest.fail(f"these tests need {_NAMES[0]}: on Debian, apt-get install {_NAMES[0]}", pytrace=False)
            self._browser = None
            self._browser = self._playwright.chromium.launch(executable_path=path, args=_FLAGS)
        return self._browser

    def is_dead(self) -> bool:
        """Asks the browser itself: Playwright hears of a death only while it waits for something."""
        if self._browser is None or not self._browser.is_connected():
            return True
        try:
            self._browser.new_browser_cdp_session().detach()
        except Error:
            return True
        return False

    def close(self) -> None:
        if self._browser is not None:
            self._browser.close()


def run_with_second_chance(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Runs a test as pytest does; where it fails and its `browser` left `DIED` behind, once more."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    failures = [report for report in reports if report.failed]
    # Only where Playwright says so, be it as its own error or in an expectation that waited in vain: what else a test
    # asserts may not have held before its browser died.
    is_cut_off = bool(failures) and _CUT_OFF in failures[0].longreprtext
    if is_cut_off and item.stash.get(DIED, False):
        item.user_properties.append((SECOND_CHANCE, failures[0].longreprtext))
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
