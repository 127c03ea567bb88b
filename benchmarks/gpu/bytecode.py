"""Packages as pip leaves them: with bytecode. Other installers and lean images leave it out, and where it may not be written
either, every process compiles torch from its source again, which takes as long as its import does otherwise.
"""

import subprocess
import sys
import time
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any


def make_bytecode() -> dict[str, Any]:
    """For every package that can be imported and has none; which have it now, which have not, and the seconds it took. It
    stays there."""
    packages = {each.parent for folder in sys.path for each in Path(folder).glob("*/__init__.py")}
    lacking = sorted(each for each in packages if not _has_bytecode(each))
    since_s = time.perf_counter()
    if lacking:
        # A few files of some packages are templates and no Python: it says so, and goes on.
        subprocess.run([sys.executable, "-m", "compileall", "-qq", "-j", "0", *map(str, lacking)], check=False)
    return {
        "made_for": [each.name for each in lacking if _has_bytecode(each)],
        "not_made_for": [each.name for each in lacking if not _has_bytecode(each)],
        "seconds": time.perf_counter() - since_s,
    }


def _has_bytecode(package: Path) -> bool:
    return Path(cache_from_source(str(package / "__init__.py"))).is_file()
