"""A browser that dies costs its test a second run, not the module; every other failure is a failure at once."""

import subprocess
import sys
from pathlib import Path

from tests.conftest import TESTS

CONFTEST = """
from tests.browser.conftest import browser, chromium, pytest_runtest_protocol
from tests.conftest import pytest_terminal_summary
"""
STORIES = """
import os, signal, threading
from playwright.sync_api import expect

runs = []

def is_run(number, name):
    runs.append(name)
    return runs.count(name) == number

def kill(browser, after_s=0.0):
    processes = browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
    found = next(process["id"] for process in processes if process["type"] == "browser")
    threading.Timer(after_s, os.kill, (found, signal.SIGKILL)).start()

def test_page(browser):
    assert is_run(2, "page"), "what the page did"

def test_dies_once(browser):
    page = browser.new_page()
    if is_run(1, "once"):
        kill(browser, after_s=0.3)
        expect(page.get_by_text("what never comes")).to_be_visible()

def test_dies_twice(browser):
    is_run(2, "twice")
    kill(browser)
    while True:
        browser.new_page().close()

def test_fails_and_dies(browser):
    kill(browser)
    assert is_run(2, "both"), "what the page did"

def test_no_browser():
    assert is_run(2, "none"), "what was computed"

def test_were_run():
    assert runs == ["page", "once", "once", "twice", "twice", "both", "none"]
"""


def test_only_the_death_of_a_browser_is_forgiven_and_only_once(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_stories.py").write_text(STORIES)
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "--import-mode=importlib"]
    ran = subprocess.run([*command, str(tmp_path)], cwd=TESTS.parent, capture_output=True, text=True, check=False)
    summary = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    failed = [line.split(" - ")[0].rpartition("::")[2] for line in summary]
    assert failed == ["test_page", "test_dies_twice", "test_fails_and_dies", "test_no_browser"], ran.stdout + ran.stderr
    assert ran.stdout.count("browser died, test run a second time") == 2, "it is said of the one that passed too"
