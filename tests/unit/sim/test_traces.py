"""Request traces as files."""

import os
from pathlib import Path

import pytest

from headrace.core.errors import InvalidInput
from headrace.sim.traces import TraceRow, read_trace, write_trace

pytestmark = pytest.mark.unit

MINI = Path(__file__).parents[3] / "examples/traces/mini.jsonl"


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    rows = [
        TraceRow(0.0, 10, 5),
        TraceRow(0.5, 7, 3, tenant="b", tier="batch", ends="stop", max_tokens=9, prefix_group=2, prefix_tokens=4),
        TraceRow(0.5, 1, 1, admission="guaranteed", cancel_after_s=0.25, reader_tokens_per_s=0.0),
    ]
    path = tmp_path / "trace.jsonl"
    assert write_trace(path, rows) == 3
    assert list(read_trace(path)) == rows


def test_the_example_is_sound() -> None:
    assert len(list(read_trace(MINI))) == 12


def test_empty_lines_are_passed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('\n{"arrival_s":0,"prompt_tokens":1,"output_tokens":1}\n\n')
    assert len(list(read_trace(path))) == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"arrival_s":0,"prompt_tokens":0,"output_tokens":1}', r"line 2.*prompt_tokens"),
        ('{"arrival_s":-1,"prompt_tokens":1,"output_tokens":1}', r"line 2.*arrival_s"),
        ('{"arrival_s":0.5,"prompt_tokens":1,"output_tokens":1}', r"line 2: arrival_s goes back from 1 to 0.5"),
        ('{"arrival_s":1,"prompt_tokens":1}', r"line 2.*output_tokens"),
        (
            '{"arrival_s":1,"prompt_tokens":1,"output_tokens":1,"tier":"gold"}',
            r"line 2.*tier.*batch, enterprise, free, plus",
        ),
        ('{"arrival_s":1,"prompt_tokens":1,"output_tokens":1,"prompt":"hi"}', r"line 2.*prompt"),
        ('{"arrival_s":NaN,"prompt_tokens":1,"output_tokens":1}', r"line 2"),
        ('{"arrival_s":1,"prompt_tokens":' + "9" * 5000 + ',"output_tokens":1}', r"line 2.*prompt_tokens"),
        ('{"arrival_s":1,"prompt_tokens":1,"output_tokens":1,"reader_tokens_per_s":5e-324}', r"line 2.*reader_tokens"),
        ('{"arrival_s":1,"x":' + "[" * 9000, r"line 2"),
        ("not json", r"line 2"),
        ("[1, 2]", r"line 2"),
        (" " * 20_000 + "x", r"line 2: longer than"),
        ('{"arrival_s":1,"prompt_tokens":1,"output_tokens":1,"tenant":"\udcff"}', r"line 2"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    good = '{"arrival_s":1,"prompt_tokens":1,"output_tokens":1}\n'
    path.write_bytes((good + line).encode(errors="surrogateescape"))
    with pytest.raises(InvalidInput, match=said):
        list(read_trace(path))


def test_a_missing_file_is_said() -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        list(read_trace("/nowhere/trace.jsonl"))


def test_only_regular_files_are_read_and_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", tmp_path / "pipe"):
        with pytest.raises(InvalidInput, match="not a regular file"):
            list(read_trace(path))
        with pytest.raises(InvalidInput, match="not a regular file"):
            write_trace(path, [])
    with pytest.raises(InvalidInput, match="zero byte"):
        list(read_trace("a\0b"))
