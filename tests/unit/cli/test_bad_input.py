"""Bad input of every kind: one line on stderr that names the field, code 2, and with --json one document."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main as cli

pytestmark = pytest.mark.unit

DIGITS = "9" * 5000
LENGTHS = ["--prompt", "5", "--output", "5", "--rate", "5"]
PROFILE = {
    "c0_s": 5e-3,
    "c_in_s": 2e-5,
    "c_out_s": 3e-5,
    "c_kv_s": 2e-8,
    "c_att_s": 2e-10,
    "slots": 8,
    "kv_tokens": 999,
}


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """Run it plainly and with --json; what the document says."""
    lines = []
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            cli.main([*argv, *more])
        assert ended.value.code == 2
        out, err = capsys.readouterr()
        assert err.startswith("error: ") and err.count("\n") == 1
        assert out.count("\n") == len(more)
        lines.append((out, err))
    document: dict[str, Any] = json.loads(lines[1][0])
    assert set(document) == {"error"} and set(document["error"]) == {"message", "code", "param"}
    assert lines[1][1] == f"error: {document['error']['message']}\n"
    error: dict[str, Any] = document["error"]
    return error


def written(path: Path, document: object) -> str:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


@pytest.mark.parametrize(
    ("words", "param"),
    [
        (["--blocks", "2147483647"], "engine.blocks"),
        (["--workers", "1000000"], "workers"),
        (["--workers", "100000"], "workers"),
        (["--workers", "5000"], "workers"),
        (["--slots", "2000000000"], "engine.slots"),
        (["--slots", "99999999999999999999"], "engine.slots"),
        (["--blocks", "100000000"], "engine.blocks"),
        (["--rate", "1e8", "--arrivals", "bursty"], "tenants[0].arrivals"),
    ],
)
def test_sizes_that_no_memory_holds(capsys: pytest.CaptureFixture[str], words: list[str], param: str) -> None:
    assert refusal(capsys, "simulate", "--requests", "2", *words)["param"] == param


@pytest.mark.parametrize(
    ("argv", "param", "said"),
    [
        (["simulate", "--slots", "x"], "--slots", "Invalid value for '--slots'"),
        (["simulate", "--nope"], "--nope", "No such option: --nope"),
        (["simulate", "--arrivals", "never"], "--arrivals", "--arrivals"),
        (["simulate", "one.toml", "two.toml"], None, "two.toml"),
        (["plan", "--slots"], None, ""),
        (["sreve"], None, "No such command 'sreve'"),
        (["bench", "nothing"], None, "No such command 'nothing'"),
        (["bench", "batching", "--depth", "9"], "--depth", "--depth"),
        (["demo", "--seconds", "-1"], "--seconds", "--seconds"),
        (["simulate", "--seed", "\x1b[2J"], "--seed", "--seed"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], argv: list[str], param: str | None, said: str) -> None:
    error = refusal(capsys, *argv)
    assert said in error["message"]
    if param is not None:
        assert error["param"] == param


def test_a_bare_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench"])
    assert ended.value.code == 2 and "batching" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "pipe", "folder", "loop", "x" * 300, ""])
def test_what_is_no_regular_file_is_not_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("folder").mkdir()
    Path("loop").symlink_to("loop")
    outer = written(tmp_path / "outer.json", {"trace": path})
    for argv in (
        ["simulate", path],
        ["simulate", "--trace", path],
        ["simulate", outer],
        ["plan", "--profile", path, *LENGTHS],
        ["plan", "--mix", path, "--tokens-per-s", "5", "--rate", "5"],
    ):
        assert refusal(capsys, *argv)["param"] in ("scenario", "trace", "--profile", "--mix")


def test_files_beyond_the_bound_are_not_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "sparse.toml"
    with path.open("wb") as file:
        file.truncate(2**40)
    for argv in (["simulate", str(path)], ["plan", "--profile", str(path), *LENGTHS]):
        assert "larger than 16 MiB" in refusal(capsys, *argv)["message"]
    assert "longer than" in refusal(capsys, "simulate", "--trace", str(path))["message"]


@pytest.mark.parametrize("name", ["s.toml", "s.json"])
@pytest.mark.parametrize(
    "body", ["DIGITS", "[" * 100_000, "\x00", "{", "a = 1\na = 1", '"\\ud800"', '{"trace": "a\\u0000b"}']
)
def test_malformed_documents(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, body: str) -> None:
    if body == "DIGITS":
        body = f"seed = {DIGITS}" if name.endswith("toml") else f'{{"seed": {DIGITS}}}'
    path = written(tmp_path / name, body)
    refusal(capsys, "simulate", path)
    refusal(capsys, "plan", "--profile", path, *LENGTHS)
    refusal(capsys, "plan", "--mix", path, "--tokens-per-s", "5", "--rate", "5")


def test_numbers_beyond_floats_in_a_profile_and_a_mix(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    huge = "1" + "0" * 400
    body = "\n".join(f"{name} = {huge if name == 'slots' else value}" for name, value in PROFILE.items())
    assert refusal(capsys, "plan", "--profile", written(tmp_path / "p.toml", body), *LENGTHS)["param"] == "slots"
    mix = written(tmp_path / "m.toml", f'prompt = {{kind = "fixed", value = {huge}}}\noutput = 5')
    assert "value must be" in refusal(capsys, "plan", "--mix", mix, "--tokens-per-s", "5", "--rate", "5")["message"]


@pytest.mark.parametrize("option", ["--prompt", "--output"])
def test_an_empty_length_is_not_the_default(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert refusal(capsys, "simulate", option, "")["param"] == option


@pytest.mark.parametrize("option", ["--headroom", "--batching"])
def test_an_empty_number_is_not_the_default(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert refusal(capsys, "plan", "--tokens-per-s", "5", *LENGTHS, option, "")["param"] == option


@pytest.mark.parametrize(
    ("words", "param"),
    [
        (["--picture-from", "1e308"], "--picture-from"),
        (["--picture-from", "inf"], "--picture-from"),
        (["--picture-from", "nan"], "--picture-from"),
        (["--picture-for", "inf"], "--picture-for"),
        (["--picture-for", "nan"], "--picture-for"),
    ],
)
def test_pictures_of_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], param: str) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "slots.png"
    assert refusal(capsys, "simulate", "--requests", "2", "--picture", str(target), *words)["param"] == param
    assert not target.exists()


def test_a_span_needs_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "simulate", "--picture-for", "3")["param"] == "--picture-for"


@pytest.mark.parametrize("command", [["simulate", "--requests", "2"], ["bench", "batching"], ["demo"]])
@pytest.mark.parametrize("name", ["folder.png", "pipe.png", "none/slots.png", "x" * 300 + ".png", "slots.xyz"])
def test_pictures_that_cannot_be_written_are_refused_before_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str], name: str
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    assert refusal(capsys, *command, "--picture", str(tmp_path / name))["param"] == "picture"


def test_traces_that_cannot_be_saved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for target in ("/dev/full", str(tmp_path), str(tmp_path / "pipe"), "x" * 300):
        assert refusal(capsys, "simulate", "--requests", "2", "--save-trace", target)["param"] == "trace"
    row = written(tmp_path / "t.jsonl", {"arrival_s": 0.0, "prompt_tokens": 3, "output_tokens": 3})
    assert refusal(capsys, "simulate", "--trace", row, "--save-trace", row)["param"] == "--save-trace"
    assert Path(row).stat().st_size > 0


@pytest.mark.parametrize(
    ("argv", "param"),
    [
        (["bench", "batching", "--linger-ms", "nan"], "--linger-ms"),
        (["bench", "batching", "--kv-share", "nan"], "--kv-share"),
        (["bench", "batching", "--rate", "nan"], "--rate"),
        (["bench", "batching", "--prompt", "10000000", "--slots", "4096"], "--requests"),
        (["bench", "batching", "--prompt", "10000000", "--slots", "64", "--requests", "2"], "--slots"),
        (["bench", "batching", "--output", "10000000", "--slots", "2", "--requests", "2"], "--output"),
        (["bench", "batching", "--output", "1000000"], "--output"),
        (["demo", "--seconds", "nan"], "--seconds"),
    ],
)
def test_bench_and_demo_refuse_what_is_no_number_or_too_large(
    capsys: pytest.CaptureFixture[str], argv: list[str], param: str
) -> None:
    assert refusal(capsys, *argv)["param"] == param


def test_a_message_is_short_and_holds_no_control_characters(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = written(tmp_path / "s.json", {"\x1b[2J\u202e" + "long" * 10_000: 1})
    message = refusal(capsys, "simulate", path)["message"]
    assert len(message) < 600 and message.isprintable()


def test_a_name_that_is_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\\udcff" in refusal(capsys, "simulate", "a\udcff.toml")["message"]


def test_names_are_neither_markup_nor_formulas(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tenants = [{"name": f"[/{name}] $\\frac{{", "arrivals": {"kind": "together", "count": 2}} for name in "ab"]
    path = written(tmp_path / "s.json", {"name": "[/red] $\\frac{", "tenants": tenants})
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", path, "--picture", str(tmp_path / "s.png")])
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "") and "[/red] $\\frac{" in out


def test_json_after_the_end_of_options_is_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", "--", "--json"])
    assert ended.value.code == 2 and capsys.readouterr().out == ""
