"""The tables of `headrace bench engine` on a terminal of 80 columns."""

import pytest

from headrace.cli.bench import _print_engine
from headrace.cli.engine_bench import EngineFigures, Load, Percentiles, Split


def test_no_number_is_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    load = Load("256:100-1024:100-1024", 256, (100, 1024), (100, 1024))
    slow = Percentiles(12.3456, 23.4567, 34.5678)
    split = Split(plan_s=1.1, launch_s=22.2, wait_s=0.0, sample_s=3.3, emit_s=4.4)
    figures = EngineFigures(load, 9.9, 2, 1, 1, 12_345.67, 23_456.78, slow, slow, 0, split)
    _print_engine([figures], "default, int8 on cpu, ready after 1.0 s", [], None)
    shown = capsys.readouterr().out
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    for number in ("12,345.7", "23,456.8", "12,345.6", "34,567.8", "550.0", "11,100.0", "1,650.0", "2,200.0"):
        assert number in shown
