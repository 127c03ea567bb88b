"""The renderer in Chromium: one result however the text was cut, finished lines never drawn again."""

import json

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Tab
from tests.browser.imitation import Imitation, Script

SAMPLE = """# Title

Some **bold** and `inline **code**` text, 2 ** 3 ** 4, ``a ` b`` and a lone `.
Second line.
- one
- two **x `y`**
  more of two
  - nested

1. first

2. second
***
```py
def f():
    return "**not bold**"

~~~
```
  ```
  indented
    kept
  ```
**not closed
"""
DRAWN = [
    ["P.heading", "Title"],
    ["P", "Some bold and inline **code** text, 2 ** 3 ** 4, a ` b and a lone `.\nSecond line."],
    ["UL", "onetwo x y\n  more of two"],
    ["UL", "nested"],
    ["OL", "first"],
    ["OL", "second"],
    ["HR", ""],
    ["DIV.code", 'pyCopydef f():\n    return "**not bold**"\n\n~~~\n'],
    ["DIV.code", "codeCopyindented\n  kept\n"],
    ["P", "**not closed"],
]

# Draws `pieces` with a frame after each, gives the outline and the markup.
_DRAW = """async (pieces) => {
  const { ReplyText } = await import('/static/markup.js');
  const root = document.createElement('div');
  document.body.append(root);
  const text = new ReplyText(root);
  const frame = () => new Promise(requestAnimationFrame);
  for (const piece of pieces) { text.append(piece); if (pieces.length < 2000) await frame(); }
  text.end();
  root.remove();
  const outline = [...root.children].map(e => [e.tagName + (e.className.startsWith('depth') || !e.className ? '' : '.' + e.className), e.textContent]);
  return [outline, root.innerHTML, text.text];
}"""

# Where the page stands, when it has not moved for a while.
_STILL = """async () => {
  const place = document.scrollingElement;
  for (let frames = 0, last = -1; frames < 20; frames = place.scrollTop === last ? frames + 1 : 0) {
    last = place.scrollTop;
    await new Promise(requestAnimationFrame);
  }
  return place.scrollTop;
}"""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
def test_the_drawing_does_not_depend_on_how_the_text_was_cut(tab: Tab, size: int) -> None:
    tab.open()
    whole = tab.page.evaluate(_DRAW, [SAMPLE])
    pieces = [SAMPLE[at : at + size] for at in range(0, len(SAMPLE), size)]
    assert tab.page.evaluate(_DRAW, pieces) == whole
    assert whole[0] == DRAWN
    assert whole[2] == SAMPLE
    assert "<strong>bold</strong> and <code>inline **code**</code>" in whole[1]
    assert "<strong>x <code>y</code></strong>" in whole[1]
    assert '<li value="2">second</li>' in whole[1]


def test_carriage_returns_end_lines_and_long_lines_are_whole(tab: Tab) -> None:
    tab.open()
    line = "word **bold** " * 300
    outline, markup, _ = tab.page.evaluate(
        _DRAW, ["a\r", "\n\r\n", *(line[at : at + 50] for at in range(0, len(line), 50)), "\n"]
    )
    assert [part[1] for part in outline] == ["a", ("word bold " * 300)]
    assert markup.count("<strong>") == 300


@pytest.mark.parametrize("mark", ["`", "**", "**a", "` ", "* ", "```", "- ", "#", "``` `", "**`"])
def test_no_pattern_of_marks_takes_long(tab: Tab, mark: str) -> None:
    tab.open()
    text = mark * (200_000 // len(mark))
    began = tab.page.evaluate("performance.now()")
    outline, _, _ = tab.page.evaluate(_DRAW, [text])
    assert outline
    assert tab.page.evaluate("performance.now()") - began < 30_000  # quadratic would take minutes


def test_finished_lines_are_never_drawn_again(tab: Tab, api: Imitation) -> None:
    api.scripts = [Script(pieces=["First line.\n\n", *(f"Line {at} of many.\n\n" for at in range(3000)), "The end."])]
    tab.open()
    tab.page.evaluate(
        """() => {
      window.removed = 0;
      const isBlock = node => node.nodeType === 1 && node.textContent.length > 30;
      new MutationObserver(list => list.forEach(one => one.removedNodes.forEach(node => window.removed += isBlock(node))))
        .observe(document.getElementById('conversation'), {childList: true, subtree: true});
    }"""
    )
    tab.ask("Go.")
    expect(tab.reply).to_have_attribute("aria-busy", "false")
    expect(tab.reply.locator(".text p")).to_have_count(3002)
    assert tab.page.evaluate("window.removed") == 0
    assert tab.page.evaluate("document.scrollingElement.scrollTop") > 10_000  # it followed the text


def test_reading_further_up_is_not_disturbed(tab: Tab, api: Imitation) -> None:
    api.scripts = [Script(pieces=["Line.\n\n" * 200, "More.\n\n" * 200], is_held=True)]
    tab.open()
    tab.ask("Go.")
    api.release()
    expect(tab.reply.locator(".text p")).to_have_count(200)
    tab.page.mouse.move(400, 400)
    tab.page.mouse.wheel(0, -3000)
    latest = tab.page.get_by_role("button", name="Latest")
    expect(latest).to_be_visible()
    before = tab.page.evaluate(_STILL)
    api.release()
    expect(tab.reply.locator(".text p")).to_have_count(400)
    assert tab.page.evaluate("document.scrollingElement.scrollTop") == before
    latest.click()
    expect(latest).to_be_hidden()


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_events_are_found_however_the_bytes_were_cut(tab: Tab, size: int) -> None:
    tab.open()
    text = (
        ': ping\n\ndata: {"a": 1}\r\nid: 7\r\n\r\ndata:x\rdata: y\r\revent: z\ndata\n\nretry: 1\n\ndata: never ended\n'
    )
    pieces = json.dumps([text[at : at + size] for at in range(0, len(text), size)])
    found = tab.page.evaluate(
        f"import('/static/sse.js').then(({{ EventParser }}) => {{"
        f" const parser = new EventParser(); return {pieces}.flatMap(piece => parser.feed(piece)); }})"
    )
    assert found == ['{"a": 1}', "x\ny", ""]
