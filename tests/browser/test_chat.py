"""The chat page in Chromium: typing, streaming, stopping, settings, figures and stages."""

from urllib.parse import urlsplit

from playwright.sync_api import expect

from tests.api.live_server import eventually
from tests.browser.conftest import Tab
from tests.browser.imitation import KEY, PATIENCE_S, Imitation, Script


def test_a_reply_is_seen_while_it_is_written(tab: Tab, api: Imitation) -> None:
    api.scripts = [Script(pieces=["One ", "two ", "three."], is_held=True)]
    tab.open()
    tab.ask("Count.")
    reply = tab.reply
    expect(reply).to_have_attribute("aria-busy", "true")
    api.release()
    expect(reply.locator(".text")).to_have_text("One")
    api.release()
    expect(reply.locator(".text")).to_have_text("One two")
    expect(tab.page.get_by_role("button", name="Stop")).to_be_visible()
    api.release()
    expect(reply).to_have_attribute("aria-busy", "false")
    expect(reply.locator(".text")).to_have_text("One two three.")
    expect(tab.page.get_by_role("button", name="Send")).to_be_visible()
    expect(reply.locator(".bar")).to_be_visible()
    assert tab.complaints == []
    assert {urlsplit(url).netloc for url in tab.fetched} == {urlsplit(tab.url).netloc}


def test_stop_ends_the_request_and_keeps_what_was_said(tab: Tab, api: Imitation) -> None:
    api.scripts = [Script(pieces=["Half a ", "sentence"], is_held=True), Script()]
    tab.open()
    tab.ask("Tell me.")
    api.release()
    expect(tab.reply).to_contain_text("Half a")
    tab.page.get_by_role("button", name="Stop").click()
    assert api.left.wait(PATIENCE_S)
    assert api.chats[0].headers["x-headrace-on-disconnect"] == "cancel"
    expect(tab.reply).to_contain_text("Stopped.")
    tab.ask("Go on.")
    expect(tab.reply.last).to_contain_text("Hello, world.")
    said = [(message["role"], message["content"]) for message in api.chats[1].body["messages"]]
    assert said == [("user", "Tell me."), ("assistant", "Half a "), ("user", "Go on.")]
    assert tab.complaints == []


def test_escape_stops_before_the_first_token_too(tab: Tab, api: Imitation) -> None:
    api.scripts = [Script(is_held=True)]
    tab.open()
    with tab.page.expect_response("**/v1/chat/completions"):
        tab.ask("Tell me.")
    tab.page.keyboard.press("Escape")
    expect(tab.reply).to_contain_text("Stopped.")
    assert api.left.wait(PATIENCE_S)
    expect(tab.page.get_by_label("Message")).to_be_focused()


def test_shift_enter_makes_a_line_and_an_empty_message_is_not_sent(tab: Tab, api: Imitation) -> None:
    tab.open()
    box = tab.page.get_by_label("Message")
    box.focus()
    tab.page.keyboard.press("Enter")
    box.press_sequentially("a")
    tab.page.keyboard.press("Shift+Enter")
    box.press_sequentially("b")
    tab.page.keyboard.press("Enter")
    expect(tab.reply).to_contain_text("Hello, world.")
    assert [chat.body["messages"] for chat in api.chats] == [[{"role": "user", "content": "a\nb"}]]


def test_model_and_settings_are_sent_and_empty_ones_are_left_to_the_server(tab: Tab, api: Imitation) -> None:
    tab.open()
    tab.page.get_by_role("button", name="Settings").click()
    tab.page.get_by_label("Temperature").fill("")
    tab.page.get_by_role("button", name="Close").click()
    tab.ask("one")
    expect(tab.reply).to_contain_text("Hello")
    tab.page.get_by_label("Model").select_option("second-model")
    tab.page.get_by_role("button", name="Settings").click()
    tab.page.get_by_label("System prompt").fill("Be brief.")
    tab.page.get_by_label("Temperature").fill("0.5")
    tab.page.get_by_label("Most tokens of a reply").fill("64")
    tab.page.get_by_role("button", name="New chat").click()
    tab.ask("two")
    expect(tab.reply).to_contain_text("Hello")
    bare, full = (chat.body for chat in api.chats)
    assert bare["model"] == "first-model"
    assert bare.keys() == {"model", "messages", "stream", "stream_options"}
    assert (full["model"], full["temperature"], full["max_tokens"]) == ("second-model", 0.5, 64)
    assert full["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two"}]
    tab.page.reload()
    expect(tab.page.get_by_label("Model")).to_have_value("second-model")
    assert tab.complaints == []


def test_a_fresh_page_has_a_low_temperature_and_an_emptied_one_stays_empty(tab: Tab, api: Imitation) -> None:
    tab.open()
    expect(tab.page.get_by_label("Temperature")).to_have_value("0.2")
    tab.ask("one")
    expect(tab.reply).to_contain_text("Hello")
    assert api.chats[0].body["temperature"] == 0.2
    tab.page.get_by_role("button", name="Settings").click()
    tab.page.get_by_label("Temperature").fill("")
    tab.page.get_by_role("button", name="Close").click()
    tab.page.reload()
    expect(tab.page.get_by_label("Temperature")).to_have_value("")


def test_the_key_of_the_address_is_taken_once_and_removed(tab: Tab, api: Imitation) -> None:
    tab.open()
    expect(tab.page.get_by_label("Model")).to_have_value("first-model")
    assert tab.page.url == f"{tab.url}/"
    assert tab.page.evaluate("history.length") == 2  # about:blank and this page: nothing with the key
    tab.page.reload()
    expect(tab.page.get_by_label("Model")).to_have_value("first-model")
    assert all(KEY not in one.path + one.query for one in api.asked)
    assert tab.page.evaluate("[JSON.stringify(localStorage), document.cookie]") == ["{}", ""]


def test_the_key_is_asked_for_and_a_wrong_one_is_asked_for_again(tab: Tab) -> None:
    tab.open("")
    dialog = tab.page.get_by_role("dialog")
    for wrong, words in (("two words", "cannot be a key"), ("hr-wrong", "The key was not accepted.")):
        dialog.get_by_label("API key").fill(wrong)
        dialog.get_by_role("button", name="Use this key").click()
        expect(dialog.get_by_role("alert")).to_contain_text(words)
    dialog.get_by_label("API key").fill(KEY)
    tab.page.keyboard.press("Enter")
    expect(tab.page.get_by_label("Model")).to_have_value("first-model")
    expect(dialog).to_be_hidden()
    tab.ask("Hi.")
    expect(tab.reply).to_contain_text("Hello, world.")


def test_figures_and_stages_of_a_reply(tab: Tab, api: Imitation) -> None:
    api.unexplained = 1
    tab.open()
    tab.ask("Hi.")
    reply = tab.reply
    expect(reply.locator(".figures")).to_contain_text("3 tokens")
    expect(reply.locator(".figures")).to_contain_text("first after")
    bar = reply.get_by_role("img")
    expect(bar).to_have_attribute(
        "aria-label",
        "Stages: receive 0.2 ms, tokenise 1.0 ms, prefill 120 ms, decode 800 ms, transfer 30 ms, client 0.4 ms",
    )
    shares = bar.evaluate("bar => [...bar.children].map(part => part.getBoundingClientRect().width / bar.clientWidth)")
    assert [round(share, 2) for share in shares] == [0.0, 0.0, 0.13, 0.84, 0.03, 0.0]
    expect(reply.locator(".legend .key")).to_have_text(["prefill 120 ms", "decode 800 ms", "transfer 30 ms"])
    reply.locator("summary").click()
    expect(reply.get_by_role("row")).to_have_count(7)
    expect(reply.get_by_role("row").last).to_contain_text("952 ms")
    colours = bar.evaluate("bar => [...bar.children].map(part => getComputedStyle(part).backgroundColor)")
    assert len(set(colours[2:])) == 4


def test_regenerate_asks_the_same_again_and_replaces_the_reply(tab: Tab, api: Imitation) -> None:
    api.scripts = [Script(pieces=["First."]), Script(pieces=["Second."])]
    tab.open()
    tab.ask("Hi.")
    expect(tab.reply).to_contain_text("First.")
    tab.page.get_by_role("button", name="Regenerate").click()
    expect(tab.reply).to_contain_text("Second.")
    expect(tab.reply).to_have_count(1)
    assert api.chats[0].body == api.chats[1].body


def test_copy_gives_the_text_as_the_model_wrote_it(tab: Tab, api: Imitation) -> None:
    api.scripts = [Script(pieces=["**Bold**\n", "```py\nx = 1\n```\n"])]
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.open()
    tab.ask("Hi.")
    reply = tab.reply
    for place, copied in ((".actions", "**Bold**\n```py\nx = 1\n```\n"), (".code-bar", "x = 1")):
        expect(reply.locator(place).get_by_role("button", name="Copy")).to_be_visible()
        expect(reply.get_by_role("button", name="Copied")).to_have_count(0)
        tab.note_buttons()
        reply.locator(place).get_by_role("button", name="Copy").click()
        eventually(lambda: tab.buttons_said("Copied"), "nobody says that it is copied")
        assert tab.page.evaluate("navigator.clipboard.readText()") == copied


def test_new_chat_while_a_reply_streams_drops_both(tab: Tab, api: Imitation) -> None:
    api.scripts = [Script(is_held=True), Script(pieces=["Fresh."])]
    tab.open()
    tab.ask("Old.")
    api.release()
    expect(tab.reply).to_contain_text("Hello")
    tab.page.get_by_role("button", name="New chat").click()
    assert api.left.wait(PATIENCE_S)
    expect(tab.page.get_by_text("What would you like to ask?")).to_be_visible()
    tab.ask("New.")
    expect(tab.reply).to_contain_text("Fresh.")
    assert api.chats[1].body["messages"] == [{"role": "user", "content": "New."}]


def test_the_page_fits_a_phone_in_the_dark(tab: Tab, api: Imitation) -> None:
    api.scripts = [Script(pieces=["word" * 200, "\n```\n" + "x" * 500 + "\n```\n"])]
    tab.page.set_viewport_size({"width": 360, "height": 640})
    tab.page.emulate_media(color_scheme="dark")
    tab.open()
    tab.ask("Hi.")
    expect(tab.reply).to_have_attribute("aria-busy", "false")
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
    assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 24, 24)"
