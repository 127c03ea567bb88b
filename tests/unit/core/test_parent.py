"""A process that ends with its parent, whenever that one ends."""

import subprocess
import sys

# Its stdout stays open in its child: at the end of it, both are gone.
PARENT = """
import subprocess, sys
child = (
    "import os, sys, time; from headrace.core.parent import die_with_parent;"
    "die_with_parent(os.getppid()); print('tied', flush=True); time.sleep(600)"
)
subprocess.run([sys.executable, "-c", child])
"""


def test_a_child_dies_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"tied\n"
        parent.kill()
        assert parent.stdout.read() == b""


def test_a_child_whose_parent_is_gone_already_leaves() -> None:
    script = "from headrace.core.parent import die_with_parent; die_with_parent(1 << 30); print('alive')"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, b"")


def test_our_own_parent_is_alive() -> None:
    script = (
        "import os; from headrace.core.parent import die_with_parent; die_with_parent(os.getppid()); print('alive')"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout == b"alive\n"
