"""Kinds of requests whose state must survive: one of each is among the streams of every story of faults."""

from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1},
    {"stop": ["qqq", "zzz"]},
    {"frequency_penalty": 1.0, "presence_penalty": 0.5},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}},
    {
        "tools": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}],
        "tool_choice": "required",
    },
    {"logprobs": True, "top_logprobs": 2},
    {"n": 4},
]
