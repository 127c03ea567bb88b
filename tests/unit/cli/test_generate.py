"""`headrace generate`: what is wrong with the command line is said before any model is loaded."""

from pathlib import Path

import pytest

from headrace.cli.generate import _lines, generate
from headrace.core.errors import InvalidInput, NotFound


def refused(**options: object) -> str:
    with pytest.raises(InvalidInput) as caught:
        generate(model="no such model", **options)  # type: ignore[arg-type]
    return caught.value.message


def test_a_prompt_or_a_file_is_needed_and_not_both(tmp_path: Path) -> None:
    assert "give a prompt, or a file" in refused()
    assert "not both" in refused(prompt="a", file=tmp_path / "x")


def test_paths_are_tried_first(tmp_path: Path) -> None:
    assert "No such file" in refused(file=tmp_path / "none.jsonl")
    (tmp_path / "asks.jsonl").write_text("{}\n")
    assert "No such file" in refused(file=tmp_path / "asks.jsonl", output=tmp_path / "no" / "folder")


def test_the_input_is_never_overwritten(tmp_path: Path) -> None:
    asks = tmp_path / "asks.jsonl"
    asks.write_text("{}\n")
    assert "overwrite" in refused(file=asks, output=asks)
    assert asks.read_text() == "{}\n"


def test_what_an_earlier_run_wrote_survives_a_model_that_is_not_there(tmp_path: Path) -> None:
    asks, replies = tmp_path / "asks.jsonl", tmp_path / "replies.jsonl"
    asks.write_text("{}\n")
    replies.write_text("precious\n")
    with pytest.raises(NotFound):
        generate(model="no such model", file=asks, output=replies)
    assert replies.read_text() == "precious\n"


def test_a_line_that_is_too_long_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cli.generate._MOST_LINE_BYTES", 8)
    path = tmp_path / "asks.jsonl"
    path.write_bytes(b'{"a":' + b" " * 50 + b'{"prompt":"smuggled"}\n{"b":1}\nlast')
    with path.open("rb") as source:
        assert list(_lines(source)) == [b'{"a":   ', b'{"b":1}\n', b"last"]
