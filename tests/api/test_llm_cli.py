"""The `llm` command line, told of this server as it is told of any: by extra-openai-models.yaml."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.live_server import LiveServer

MODELS = """\
- model_id: headrace
  model_name: default
  api_base: {url}/v1
  api_key_name: headrace
  supports_tools: true
  supports_schema: true
"""


class Llm:
    def __init__(self, folder: Path, server: LiveServer, key: str | None = None) -> None:
        folder.mkdir()
        (folder / "extra-openai-models.yaml").write_text(MODELS.format(url=server.url))
        (folder / "keys.json").write_text(json.dumps({"headrace": key or server.key}))
        self._environment = {"LLM_USER_PATH": str(folder), "PATH": "/usr/bin:/bin", "HOME": str(folder)}

    def __call__(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("llm")), *argv]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=180,
            check=check,
            env=self._environment,
            stdin=subprocess.DEVNULL,
        )


@pytest.fixture
def llm(tmp_path: Path, fake_server: LiveServer) -> Llm:
    return Llm(tmp_path / "llm", fake_server)


def test_a_prompt_streams_or_does_not(llm: Llm) -> None:
    options = ("-m", "headrace", "-o", "seed", "7", "-o", "max_tokens", "20")
    streamed = llm("prompt", "Hello", *options)
    whole = llm("prompt", "Hello", "--no-stream", *options)
    assert len(streamed.stdout) > 20 and streamed.stdout == whole.stdout


def test_a_conversation_goes_on(llm: Llm, fake_server: LiveServer) -> None:
    before = fake_server.figure("headrace_tokens_total", direction="in")
    llm("prompt", "Hello", "-m", "headrace", "-s", "Be brief.", "-o", "max_tokens", "5")
    first = fake_server.figure("headrace_tokens_total", direction="in") - before
    llm("prompt", "Again", "-c", "-o", "max_tokens", "5")
    second = fake_server.figure("headrace_tokens_total", direction="in") - before - first
    assert second > first > 0


def test_a_schema_shapes_the_reply(llm: Llm) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    said = llm("prompt", "Is it?", "-m", "headrace", "--schema", json.dumps(schema), "-o", "seed", "7").stdout
    assert isinstance(json.loads(said)["ok"], bool)


def test_a_wrong_key_is_told(tmp_path: Path, fake_server: LiveServer) -> None:
    said = Llm(tmp_path / "other", fake_server, key="wrong")("prompt", "Hello", "-m", "headrace", check=False)
    assert said.returncode == 1 and "not known here" in said.stderr
