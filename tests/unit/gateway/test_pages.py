"""Pages are served by exact name, with the headers that fence them in, and hold nothing that could parse model output."""

import re
from importlib import resources

import pytest

from headrace.gateway.pages import CONTENT_SECURITY_POLICY, PAGES, load_pages, page_response

SCRIPTS = sorted(path for path in PAGES if path.endswith(".js"))


def test_the_chat_page_is_at_the_root_and_names_only_pages_that_exist() -> None:
    markup = PAGES["/"].body.decode()
    named = set(re.findall(r'(?:src|href)="(/static/[^"]*)"', markup))
    assert {"/static/chat.css", "/static/chat.js"} <= named
    assert named <= PAGES.keys()


@pytest.mark.parametrize("path", SCRIPTS)
def test_modules_import_only_modules_that_exist(path: str) -> None:
    named = re.findall(r'from "\./([^"]*)"', PAGES[path].body.decode())
    assert {f"/static/{name}" for name in named} <= PAGES.keys()


@pytest.mark.parametrize("path", sorted(PAGES))
def test_a_page_comes_with_its_type_and_its_fence(path: str) -> None:
    response = page_response(path, {})
    assert response is not None
    headers = dict(response.headers)
    assert response.status == 200
    assert response.body == PAGES[path].body
    assert headers[b"content-length"] == str(len(response.body)).encode()
    assert headers[b"content-security-policy"] == CONTENT_SECURITY_POLICY.encode()
    assert headers[b"x-content-type-options"] == b"nosniff"
    assert headers[b"referrer-policy"] == b"no-referrer"


def test_types_by_name() -> None:
    assert PAGES["/"].content_type == "text/html; charset=utf-8"
    assert PAGES["/static/chat.js"].content_type == "text/javascript; charset=utf-8"
    assert PAGES["/static/chat.css"].content_type == "text/css; charset=utf-8"
    assert PAGES["/static/icon.svg"].content_type == "image/svg+xml"


@pytest.mark.parametrize(
    "path",
    [
        "",
        "//",
        "/index.html",
        "/static",
        "/static/",
        "/static/index.html",
        "/static/CHAT.JS",
        "/static/../pages.py",
        "/static/%2e%2e/pages.py",
        "/static/chat.js/",
        "/static//chat.js",
        "/static/chat.js\x00",
    ],
)
def test_only_the_exact_name_is_a_page(path: str) -> None:
    assert page_response(path, {}) is None


@pytest.mark.parametrize("offered", ["{tag}", "W/{tag}", '"other", {tag}', "*"])
def test_a_page_that_the_client_has_is_not_sent_again(offered: str) -> None:
    tag = PAGES["/"].etag
    response = page_response("/", {"if-none-match": offered.replace("{tag}", tag)})
    assert response is not None
    assert (response.status, response.body) == (304, b"")
    assert dict(response.headers)[b"etag"] == tag.encode()
    assert b"content-length" not in dict(response.headers)


@pytest.mark.parametrize("offered", ["", '"other"', "nonsense, ,"])
def test_another_tag_gets_the_page(offered: str) -> None:
    response = page_response("/", {"if-none-match": offered})
    assert response is not None
    assert response.status == 200


def test_the_policy_allows_no_inline_code_and_no_other_origin() -> None:
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert "http" not in CONTENT_SECURITY_POLICY
    assert CONTENT_SECURITY_POLICY.startswith("default-src 'none';")


@pytest.mark.parametrize("path", ["/", *SCRIPTS])
def test_nothing_parses_markup_and_nothing_is_inline(path: str) -> None:
    text = PAGES[path].body.decode()
    parsers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|setHTML|DOMParser|createContextualFragment|eval\(|new Function"
    assert re.search(parsers, text) is None
    assert re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son[a-z]+=|https?://", text) is None


def test_files_that_are_no_pages_are_left_out() -> None:
    pages = load_pages(resources.files("headrace.gateway"))
    assert pages == {}
