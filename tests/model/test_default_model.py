"""The default model through engine and text: the known answer, the same text in any company, shaped replies."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import msgspec
import pytest

from headrace.cli.local import LocalModel, open_local
from headrace.cli.main import main
from headrace.cli.sweep import THRESHOLDS
from headrace.core.errors import InvalidInput
from headrace.serving.ask import Ask
from headrace.serving.local import Spoken
from headrace.serving.rows import Row, RowRun
from headrace.worker.assembly import LoadSettings

QUESTION = "What is the capital of France?"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def local(smollm2_path: Path) -> Iterator[LocalModel]:
    with open_local(str(smollm2_path), LoadSettings(slots=8, kv_tokens=4096, max_step_tokens=128)) as opened:
        yield opened
        assert opened.engine.load().used_blocks == 0
        opened.engine.check()


def test_a_local_model_is_not_looked_through_for_garbage(local: LocalModel) -> None:
    assert gc.get_threshold() == THRESHOLDS and gc.get_freeze_count() > 100_000


def test_doctor_says_what_is_here_and_what_is_chosen(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--model", str(smollm2_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert set(found) == {"machine", "software", "models", "kernels"}
    assert found["software"]["bytecode"].startswith("torch has ")
    assert found["models"]["pulled"].startswith("none yet")
    assert found["kernels"]["chosen"].partition(";")[0] in ("fp32", "int8", "int4")


def answers(local: LocalModel, *asks: dict[str, object]) -> list[Row]:
    run = RowRun(local.service, Ask(max_tokens=12), max_open=16)
    return sorted(run.rows(msgspec.json.encode(ask) for ask in asks), key=lambda row: row.index)


def text(row: Row) -> str:
    assert row.error is None, row.error
    return row.choices[0].text


def test_the_capital_of_france(local: LocalModel) -> None:
    (row,) = answers(local, {"prompt": QUESTION})
    assert text(row) == "The capital of France is Paris."
    assert row.choices[0].finish_reason == "stop"


def test_the_same_seed_says_the_same_in_any_company(local: LocalModel) -> None:
    ask = {"prompt": "Invent a word.", "temperature": 1.0, "seed": 4, "top_p": 0.9, "repetition_penalty": 1.2}
    company = [{"prompt": f"Count from {n} on.", "temperature": 1.5, "max_tokens": 4 + n} for n in range(6)]
    alone = text(answers(local, ask)[0])
    assert text(answers(local, *company, ask)[-1]) == alone
    assert text(answers(local, {**ask, "seed": 5})[0]) != alone


def test_log_probabilities_are_those_of_the_prompt_and_the_reply(local: LocalModel) -> None:
    (row,) = answers(local, {"prompt": QUESTION, "logprobs": 2, "prompt_logprobs": 0, "max_tokens": 3})
    entries, prompt = row.choices[0].logprobs, row.prompt_logprobs
    assert entries is not None and prompt is not None
    assert [entry["position"] for entry in prompt] == list(range(1, row.prompt_tokens))
    assert not any("id" in entry for entry in prompt), "of the reply's ids none is the prompt's"
    assert [entry["position"] for entry in entries] == [row.prompt_tokens + place for place in range(3)]
    for entry in entries:
        assert str(entry["id"]) in entry["top"]
        assert len(entry["top"]) == 2
        assert entry["logprob"] == max(entry["top"].values()), "greedy takes the likeliest"


def test_schemas_regexes_and_choices_shape_replies(local: LocalModel) -> None:
    shaped = {"prompt": "Describe a person.", "temperature": 1.0, "max_tokens": 60}
    rows = answers(
        local,
        *({**shaped, "json_schema": PERSON, "seed": seed} for seed in range(4)),
        {**shaped, "regex": "[A-Z][a-z]{3}-[0-9]{2}"},
        {**shaped, "choices": ["tall", "small"]},
    )
    for row in rows[:4]:
        assert row.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(text(row)), PERSON)
    assert len(text(rows[4])) == 7
    assert text(rows[5]) in ("tall", "small")


def test_a_hostile_schema_is_refused_and_a_stream_beside_it_runs_on(local: LocalModel) -> None:
    service = local.service
    ask = Ask(prompt="Tell me about rivers.", max_tokens=16)
    whole = text(answers(local, {"prompt": ask.prompt, "max_tokens": 16})[0])
    service.submit(0, service.prepare(ask))
    spoken: list[Spoken] = service.turn()
    deep: object = True
    for _ in range(1000):
        deep = {"properties": {"a": deep}}
    doubling = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)} | {
        "d40": {"type": "string"}
    }
    hostile = [
        Ask(prompt="x", json_schema={"type": "object", "properties": {"a": deep}}),
        Ask(prompt="x", json_schema={"$defs": doubling, "$ref": "#/$defs/d0"}),
        Ask(prompt="x", regex="((a{1,500}){1,500}){1,500}b"),
    ]
    for each in hostile:
        with pytest.raises(InvalidInput):
            service.prepare(each)
    while service.num_open:
        spoken += service.turn()
    assert "".join(each.text for each in spoken) == whole
