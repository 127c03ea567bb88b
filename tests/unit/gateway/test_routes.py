"""The table: exact paths, names in paths, and no route by accident."""

import pytest

from headrace.gateway.routes import Access, Route, RouteTable
from tests.unit.gateway.stub import thing


def route(method: str, path: str, access: Access = Access.KEY) -> Route:
    return Route(method, path, access, thing, "A thing")


def test_a_path_is_found_with_its_methods() -> None:
    table = RouteTable([route("GET", "/a"), route("POST", "/a"), route("GET", "/a/{name}/b")])
    resource, params = table.find(b"/a")
    assert resource is not None and params == {}
    assert resource.allow == "GET, HEAD, POST"
    resource, params = table.find(b"/a/x-1/b")
    assert resource is not None and params == {"name": "x-1"}
    assert resource.path == "/a/{name}/b"


@pytest.mark.parametrize("path", [b"/a/x/y/b", b"/a//b", b"/a/../b", b"/a/x%2Fy/b", b"/a/x/b/", b"/A", b"", b"/a?x"])
def test_nothing_else_is_found(path: bytes) -> None:
    assert RouteTable([route("GET", "/a"), route("GET", "/a/{name}/b")]).find(path) == (None, {})


def test_one_path_has_one_access() -> None:
    with pytest.raises(ValueError, match="same access"):
        RouteTable([route("GET", "/a", Access.PUBLIC), route("POST", "/a")])


def test_two_routes_cannot_be_one() -> None:
    with pytest.raises(ValueError, match="two routes"):
        RouteTable([route("GET", "/a"), route("GET", "/a")])


def test_a_hostile_path_costs_little() -> None:
    table = RouteTable([route("GET", "/a/{name:path}")])
    assert table.find(b"/a/" + b"a/" * 400 + b"!") == (None, {})
    assert table.find(b"/a/" + b"%2F" * 300) == (None, {})
    assert table.find(b"/a/" + b"a" * 100_000) == (None, {})
