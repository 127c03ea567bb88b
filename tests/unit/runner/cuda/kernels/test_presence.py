import importlib

import pytest

pytestmark = pytest.mark.unit


def test_kernels_can_be_tested_here() -> None:
    triton = importlib.import_module("triton")
    assert triton.knobs.runtime.interpret, "something imported Triton before TRITON_INTERPRET was set"
