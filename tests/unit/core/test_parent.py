"""A process that ends with its parent, whenever that one ends."""

import os
import subprocess
import sys
import time

import pytest

CHILD = "import sys, time; from headrace.core.parent import die_with_parent; die_with_parent(int(sys.argv[1])); print('tied', flush=True); time.sleep(60)"
PARENT = "import os, subprocess, sys; child = subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE); child.stdout.readline(); print(child.pid, flush=True)"


def test_a_child_whose_parent_is_gone_already_ends() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, str(os.getpid() + 1)], stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties them")
def test_a_child_ends_when_its_parent_does() -> None:
    done = subprocess.run([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True, check=True)
    pid = int(done.stdout)
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the child lives on")
