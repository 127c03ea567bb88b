"""Constrained generations with the real model at temperature 1: how many end by themselves, and do they validate?

Random JSON schemas, regular expressions and choices, all through one engine at once. The seed is fixed.
usage: python benchmarks/constrained.py [--model default] [--count 200] [--dtype auto] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import jsonschema
import msgspec

from headrace.cli.local import open_local
from headrace.serving.ask import Ask
from headrace.serving.rows import Row, RowRun
from headrace.worker.assembly import LoadSettings

NAMES = ("name", "age", "city", "tags", "price", "active", "size", "note", "level", "owner")


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """Bounded in every direction, as a schema must be that a small model is to finish."""
    kinds = ["string", "integer", "number", "boolean", "enum", "pattern"] + (["object", "array"] if depth < 3 else [])
    kind = "object" if depth == 0 else chance.choice(kinds)
    if kind == "object":
        names = chance.sample(NAMES, chance.randint(1, 4))
        properties = {name: random_schema(chance, depth + 1) for name in names}
        required = [name for name in names if chance.random() < 0.8]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        low = chance.randint(0, 2)
        return {"type": "array", "items": random_schema(chance, depth + 1), "minItems": low, "maxItems": low + 2}
    if kind == "enum":
        return {"enum": chance.sample(["red", "green", "blue", 1, 2.5, None, True], chance.randint(1, 4))}
    if kind == "pattern":
        return {"type": "string", "pattern": chance.choice(["^[A-Z][a-z]{2,8}$", "^[0-9]{3}-[0-9]{4}$", "^(on|off)$"])}
    if kind == "string":
        return {"type": "string", "maxLength": chance.randint(3, 30)}
    if kind == "integer":
        low = chance.randint(-100, 100)
        return {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 10_000)}
    if kind == "number":
        return {"type": "number", "minimum": 0, "maximum": chance.randint(1, 1000)}
    return {"type": "boolean"}


REGEXES = ("[A-Z][a-z]{2,10} [A-Z][a-z]{2,10}", r"\d{4}-\d{2}-\d{2}", "(yes|no|maybe), (very|not) sure", "[a-f0-9]{8}")
CHOICES = (["positive", "negative", "neutral"], ["Paris", "London", "Rome"], ["a", "ab", "abc"], ["1", "12", "123 go"])


def asks(kind: str, count: int, chance: random.Random) -> list[dict[str, Any]]:
    made = []
    for index in range(count):
        ask: dict[str, Any] = {"seed": index, "id": index}
        if kind == "schema":
            ask |= {"prompt": "Describe something as JSON.", "json_schema": random_schema(chance)}
        elif kind == "regex":
            ask |= {"prompt": "Write one.", "regex": chance.choice(REGEXES)}
        else:
            ask |= {"prompt": "Pick one.", "choices": chance.choice(CHOICES)}
        made.append(ask)
    return made


def is_valid(ask: dict[str, Any], text: str) -> bool:
    if "regex" in ask:
        return re.fullmatch(ask["regex"], text) is not None
    if "choices" in ask:
        return text in ask["choices"]
    try:
        jsonschema.validate(json.loads(text), ask["json_schema"], cls=jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def judge(given: list[dict[str, Any]], rows: dict[int, Row]) -> dict[str, float]:
    ended = [
        ask for ask in given if rows[ask["id"]].error is None and rows[ask["id"]].choices[0].finish_reason == "stop"
    ]
    valid = [ask for ask in ended if is_valid(ask, rows[ask["id"]].choices[0].text)]
    failed = [row for row in rows.values() if row.error is not None]
    for row in failed[:5]:
        print(f"failed: {row.error}", file=sys.stderr)
    for ask in [each for each in ended if each not in valid][:5]:
        print(f"invalid: {ask} -> {rows[ask['id']].choices[0].text!r}", file=sys.stderr)
    return {"asked": len(given), "ended": len(ended), "valid": len(valid), "failed": len(failed)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with open_local(arguments.model, LoadSettings(dtype=arguments.dtype)) as local:
        for kind in ("schema", "regex", "choice"):
            chance = random.Random(kind)
            given = asks(kind, arguments.count if kind == "schema" else arguments.count // 4, chance)
            run = RowRun(local.service, Ask(max_tokens=400, temperature=1.0), max_open=64)
            started_s = time.perf_counter()
            rows = {row.index: row for row in run.rows(msgspec.json.encode(ask) for ask in given)}
            results[kind] = judge(given, rows) | {"tokens": run.num_tokens, "seconds": time.perf_counter() - started_s}
            print(f"{kind}: {results[kind]}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    good = all(each["ended"] >= 0.95 * each["asked"] and each["valid"] == each["ended"] for each in results.values())
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
