"""What `headrace doctor` says of how the software was installed."""

import json
import py_compile
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.cli import doctor
from headrace.cli.doctor import bytecode_words
from headrace.cli.main import main
from headrace.runner.torch.attention import CUTS
from headrace.runner.torch.packing import Recipe
from headrace.runner.torch.probe import ROWS, Choice, KernelFigure


def test_a_package_without_bytecode_is_told_with_what_makes_it(tmp_path: Path) -> None:
    module = tmp_path / "big" / "__init__.py"
    module.parent.mkdir()
    module.write_text("x = 1\n")
    assert str(module.parent) in bytecode_words(str(module))
    assert "compileall" in bytecode_words(str(module))
    py_compile.compile(str(module))
    assert bytecode_words(str(module)) == "torch has it"
    module.write_text("x = 12\n")
    assert "compileall" in bytecode_words(str(module))
    py_compile.compile(str(module), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    assert bytecode_words(str(module)) == "torch has it"


def test_a_kernel_that_is_not_there_is_told_as_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = (KernelFigure("fbgemm", False, ()), KernelFigure("wide", True, tuple(range(1, len(ROWS) + 1))))
    choice = Choice(Recipe("int8", "wide"), CUTS[0], True, figures, ())
    opened = SimpleNamespace(shape=None, close=lambda: None)
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setattr("headrace.weights.checkpoint.open_checkpoint", lambda path: opened)
    monkeypatch.setattr("headrace.weights.store.ModelStore.resolve", lambda store, name: tmp_path)
    monkeypatch.setattr("headrace.worker.assembly.stored_bits", lambda checkpoint: 8.0)
    monkeypatch.setattr("headrace.runner.torch.probe.choose", lambda *_, **__: choice)
    told = doctor._kernels("any", "auto")
    assert told["fbgemm"] == "not exact; absent" and told["wide"].startswith("exact; 1 µs at 1, 2 µs at 2")


def test_a_machine_without_a_card_is_not_told_what_watches_cards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(doctor, "_DRIVERS", (tmp_path / "nvidiactl",))
    assert doctor._nvml() == "no card"
    (tmp_path / "nvidiactl").touch()
    assert "pip install headrace[gpu]" in doctor._nvml()


def test_a_machine_without_a_model_is_told_of_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["cores"] and "headrace models pull default" in found["kernels"]["not tried"]
    with pytest.raises(SystemExit, match=r"^1$"):
        main(["doctor", "--model", "nobodys"])
