"""How a gateway's process is set up before it serves."""

import subprocess
import sys


def test_the_loop_waits_a_millisecond_for_threads_that_compute() -> None:
    """In a process of its own: it would change this one."""
    code = "import sys; from headrace.cli.gateway import _settle_in; _settle_in('test'); print(sys.getswitchinterval())"
    told = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert float(told.stdout) == 0.001
