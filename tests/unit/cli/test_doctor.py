"""What `headrace doctor` says of how the software was installed."""

import py_compile
from pathlib import Path

from headrace.cli.doctor import bytecode_words


def test_a_package_without_bytecode_is_told_with_what_makes_it(tmp_path: Path) -> None:
    module = tmp_path / "big" / "__init__.py"
    module.parent.mkdir()
    module.write_text("x = 1\n")
    assert str(module.parent) in bytecode_words(str(module))
    assert "compileall" in bytecode_words(str(module))
    py_compile.compile(str(module))
    assert bytecode_words(str(module)) == "torch has it"
