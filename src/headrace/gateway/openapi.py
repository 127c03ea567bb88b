"""The OpenAPI document, generated from the routes and the types their bodies are decoded into. Owns its shape."""

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from headrace import __version__
from headrace.gateway.errors import ErrorBody
from headrace.gateway.routes import Access, Route

_PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
_REF = "#/components/schemas/{name}"
_DESCRIPTION = (
    "Any OpenAI client works here unchanged. Errors of every route have the same body; `Retry-After` and "
    "`retry-after-ms` say when to try again. `Server-Timing` says where the time went."
)
_EXAMPLES: dict[str, Any] = {
    "/v1/chat/completions": {"model": "default", "stream": True, "messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"model": "default", "prompt": "Once upon a time", "max_tokens": 32},
    "/tokenize": {"model": "default", "prompt": "Hello"},
    "/detokenize": {"model": "default", "tokens": [72, 105]},
}


def document(routes: Iterable[Route]) -> bytes:
    listed = [route for route in routes if route.listed]
    types = [kind for route in listed for kind in (route.body, route.reply) if kind is not None]
    schemas, components = msgspec.json.schema_components([*types, ErrorBody], ref_template=_REF)
    by_type = dict(zip([*types, ErrorBody], schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in listed:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, by_type)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Headrace", "version": __version__, "description": _DESCRIPTION},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
        }
    )


def _operation(route: Route, by_type: dict[type, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "summary": route.summary,
        "operationId": _operation_id(route),
        "tags": [_tag(route)],
        "security": [] if route.access is Access.PUBLIC else [{"bearer": []}, {"x-api-key": []}],
        "responses": {"200": _success(route, by_type)},
    }
    description = (route.endpoint.__doc__ or "").strip()
    if description:
        found["description"] = " ".join(description.split())
    names = _PARAMETER.findall(route.path)
    if names or route.query:
        found["parameters"] = [
            *({"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names),
            *({"name": name, "in": "query", "schema": {"type": "string"}} for name in route.query),
        ]
    if route.body is not None:
        content: dict[str, Any] = {"application/json": {"schema": by_type[route.body]}}
        if route.path in _EXAMPLES:
            content["application/json"]["example"] = _EXAMPLES[route.path]
        found["requestBody"] = {"required": True, "content": content}
    if route.access is not Access.PUBLIC:
        error = {"application/json": {"schema": by_type[ErrorBody]}}
        found["responses"]["4XX"] = {"description": "Refused: the request is at fault", "content": error}
        found["responses"]["5XX"] = {"description": "Refused: the server is full, or failed", "content": error}
    return found


def _success(route: Route, by_type: dict[type, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.reply is not None:
        content["application/json"] = {"schema": by_type[route.reply]}
    elif route.media != "application/json":
        content[route.media] = {"schema": {"type": "string"}}
    if route.events:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": "Done", "content": content} if content else {"description": "Done"}


def _operation_id(route: Route) -> str:
    words = re.findall(r"[A-Za-z0-9_]+", route.path.replace(":path", ""))
    return "_".join([route.method.lower(), *(word for word in words if word != "v1")])


def _tag(route: Route) -> str:
    if route.access is Access.KEY and route.path.startswith("/v1/"):
        return "Requests" if route.path.startswith(("/v1/requests/", "/v1/streams/")) else "OpenAI-compatible"
    return "Text" if route.access is Access.KEY else "Server"
