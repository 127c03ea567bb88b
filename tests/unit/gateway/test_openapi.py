"""The document says what the routes do, and nothing that is not there."""

from typing import Any

import msgspec
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from headrace.gateway.endpoints import ROUTES
from headrace.gateway.openapi import document
from headrace.gateway.routes import Access


def read() -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(document(ROUTES))
    return found


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [name for part in value.values() for name in references(part)]
    return [name for part in value for name in references(part)] if isinstance(value, list) else []


def test_every_listed_route_is_there_with_its_security() -> None:
    paths = read()["paths"]
    listed = [route for route in ROUTES if route.listed]
    assert sum(len(methods) for methods in paths.values()) == len(listed)
    for route in listed:
        operation = paths[route.path.replace(":path", "")][route.method.lower()]
        assert operation["summary"] == route.summary
        assert bool(operation["security"]) == (route.access is not Access.PUBLIC)
        assert ("requestBody" in operation) == (route.body is not None)
        assert ("4XX" in operation["responses"]) == (route.access is not Access.PUBLIC)


def test_references_lead_somewhere_and_schemas_are_schemas() -> None:
    found = read()
    schemas = found["components"]["schemas"]
    assert {name.rpartition("/")[2] for name in references(found)} <= set(schemas)
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)


def test_operations_have_their_own_ids() -> None:
    ids = [operation["operationId"] for methods in read()["paths"].values() for operation in methods.values()]
    assert len(set(ids)) == len(ids)
