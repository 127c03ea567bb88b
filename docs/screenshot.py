"""Draws docs/chat.png: starts `headrace serve`, asks one question on the chat page in Chromium, takes the picture.

    .venv/bin/python docs/screenshot.py [--url URL --key KEY] [--question TEXT] [--output FILE] [-- SERVE ARGUMENTS]

With --url it asks a server that runs already. Needs Playwright (in the development set) and Debian's chromium.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

READY_S = 300
REPLY_S = 120
QUESTION = "What is the capital of France, and what is it known for?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--key")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("chat.png"))
    parser.add_argument("serve", nargs="*", help="arguments for `headrace serve`, after --")
    options = parser.parse_args()
    if options.url:
        take_picture(options.url, options.key or "", options.question, options.output)
        return
    with running_server(options.serve) as (url, key):
        take_picture(url, key, options.question, options.output)


@contextmanager
def running_server(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """A server on a free port: its address and its local key."""
    command = [str(Path(sys.executable).with_name("headrace")), "serve", "--port", "0", "--json", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            ready = read_document(server)
            if not ready["key_file"]:
                raise SystemExit("the local key is set by the environment: pass it with --url and --key")
            yield ready["url"], Path(ready["key_file"]).read_text().strip()
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(READY_S)


def read_document(server: subprocess.Popen[str]) -> dict[str, str]:
    """The one document that `--json` prints, when the server is up."""
    assert server.stdout is not None
    text = ""
    for line in server.stdout:
        text += line
        try:
            document: dict[str, str] = json.loads(text)
        except json.JSONDecodeError:
            continue
        return document
    raise SystemExit("the server did not start")


def take_picture(url: str, key: str, question: str, output: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        # Twice the pixels, so that the picture is sharp where it is shown smaller.
        context = browser.new_context(viewport={"width": 900, "height": 700}, device_scale_factor=2)
        page = context.new_page()
        page.goto(f"{url}/#key={key}")
        expect(page.get_by_label("Model")).to_be_enabled()
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Most tokens of a reply").fill("160")
        page.get_by_role("button", name="Close").click()
        page.get_by_label("Message").fill(question)
        page.keyboard.press("Enter")
        reply = page.get_by_role("article", name="Reply")
        expect(reply).to_have_attribute("aria-busy", "false", timeout=1000 * REPLY_S)
        reply.get_by_role("img").click()
        page.get_by_label("Message").hover()
        page.screenshot(path=output)
        browser.close()


if __name__ == "__main__":
    main()
