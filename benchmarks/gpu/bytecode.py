"""Packages as pip leaves them: with bytecode. Other installers and lean images leave it out, and where it may not be written
either, every process compiles torch from its source again, which takes as long as its import does otherwise.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def make_bytecode() -> dict[str, Any]:
    """For every package that can be imported and has none; which these were, and the seconds it took."""
    packages = [each.parent for folder in sys.path for each in Path(folder).glob("*/__init__.py")]
    lacking = sorted(each for each in packages if not (each / "__pycache__").is_dir())
    since_s = time.perf_counter()
    if lacking:
        # A few files of some packages are templates and no Python: it says so, and goes on.
        subprocess.run([sys.executable, "-m", "compileall", "-qq", "-j", "0", *map(str, lacking)], check=False)
    return {"made_for": [each.name for each in lacking], "seconds": time.perf_counter() - since_s}
