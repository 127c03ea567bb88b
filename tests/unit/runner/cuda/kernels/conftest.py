"""Kernels run in Triton's interpreter, on any processor. Where Triton is missing, `test_presence.py` says so."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

# Triton reads this when it is first imported, and never again.
pytest.MonkeyPatch().setenv("TRITON_INTERPRET", "1")

collect_ignore_glob = [] if find_spec("triton") else ["test_kernel_*.py"]


@pytest.fixture(autouse=True)
def _quiet_numbers() -> Iterator[None]:
    """The interpreter computes with numpy, which warns of what a card does silently: infinities, wrapped integers."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True)
def _numbers_from_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 takes loop bounds from arrays of one number, which numpy 2.4 no longer turns into a number."""
    if find_spec("triton") is None:
        return
    from triton.runtime import interpreter  # type: ignore[import-not-found,import-untyped,unused-ignore]

    patch = interpreter._patch_lang_tensor

    def patch_more(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_more)
