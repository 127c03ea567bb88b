"""Asks of every kind that must survive a death, and what a stream has said however it was cut into records."""

from collections.abc import Iterable
from typing import Any

from headrace.serving.ask import Ask
from headrace.streams.record import Part, Record
from headrace.text.limited import LimitedPool
from tests.unit.serving.network_rig import network_rig

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2, 3]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOL = {"name": "look", "parameters": SCHEMA}
ASKS: dict[str, Ask] = {
    "greedy": Ask(raw="hello", max_tokens=30, temperature=0.0),
    "seeded": Ask(raw="hello", max_tokens=30, temperature=1.0, seed=5),
    "stop strings": Ask(raw="hello there", max_tokens=30, stop=["zq", " lota'T"], seed=3),
    "penalties": Ask(raw="hello", max_tokens=30, frequency_penalty=1.0, presence_penalty=0.5, min_tokens=20),
    "scores": Ask(raw="hello", max_tokens=30, logprobs=2),
    "prompt": Ask(raw="hello", max_tokens=30, prompt_logprobs=1, echo=True),
    "only scores": Ask(raw="hello", max_tokens=1, prompt_logprobs=1, echo=True, score_only=True),
    "schema": Ask(raw="hello", max_tokens=30, json_schema=SCHEMA),
    "regex": Ask(raw="hello", max_tokens=30, regex="(ab|cd|e){8}"),
    "four choices": Ask(raw="hello", max_tokens=12, n=4, logprobs=1),
    "no bound": Ask(raw="h" * 1000),
}
CALLING = Ask(
    messages=[{"role": "user", "content": "look"}],
    tools=[{"type": "function", "function": TOOL}],
    tool_choice="required",
    max_tokens=120,
)
# Its reply ends with its one call.
CALLING_ONCE = Ask(
    messages=[{"role": "user", "content": "look"}],
    tools=[{"type": "function", "function": TOOL}],
    json_schema=SCHEMA,
    parallel_tool_calls=False,
    max_tokens=120,
)

Told = dict[tuple[int, bool], tuple[Any, ...]]


def told(records: Iterable[Record]) -> Told:
    """All that each choice said, and its prompt, however it was cut into records."""
    found: dict[tuple[int, bool], list[Part]] = {}
    for record in records:
        for part in record.parts:
            parts = found.setdefault((part.choice, part.is_prompt), [])
            if not part.is_prompt:
                assert part.index == sum(len(before.ids) for before in parts)
            parts.append(part)
    return {
        key: (
            [token for part in parts for token in part.ids],
            "".join(part.text for part in parts),
            [score for part in parts for score in part.scores],
            [(call.index, call.name) for part in parts for call in part.calls if call.name],
            "".join(call.arguments for part in parts for call in part.calls),
            [part.finish for part in parts if part.finish is not None],
        )
        for key, parts in found.items()
    }


async def undisturbed(pool: LimitedPool, *asks: Ask) -> tuple[Told, Any, int]:
    """What is said, what it costs, and how many frames it takes."""
    with network_rig(pool) as rig:
        stream = await rig.say(*asks)
        assert stream.ending is not None and stream.ending.failure is None
        return told(stream.records), stream.ending.usage, len(rig.workers[0].frames)
