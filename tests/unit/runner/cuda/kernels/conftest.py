"""Kernels run in Triton's interpreter, on any processor. Where Triton is missing, `test_presence.py` says so."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

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


@pytest.fixture(autouse=True)
def _eights_as_cards_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own eight bits know neither NaN nor the largest number, and carry no rounding on."""
    if find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    convert, eights = interpreter._convert_float, interpreter.tl.float8e4nv

    def convert_more(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target == eights:
            wide = torch.from_numpy(np.array(data, np.float32)).clamp(-448.0, 448.0)
            return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if source == eights and target == interpreter.tl.float32:
            wide = torch.from_numpy(np.array(data, np.uint8)).view(torch.float8_e4m3fn).float()
            return wide.numpy().view(np.uint32)
        return convert(data, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", convert_more)


class _PatchOnce:
    """Triton's language is patched for interpretation by every launch, which undoes it, and again by every function that
    a kernel calls, `tl.sum` and its like among them, which does not: most of the interpreter's time. Once a launch will do.
    """

    def __init__(self, interpreter: Any) -> None:
        self._patch: Callable[[Any], Any] = interpreter._patch_lang
        self._no_scope: Callable[[], Any] = interpreter._LangPatchScope
        self._languages = {id(interpreter.tl), id(interpreter.tl.core)}
        # Of the launch at hand; None between launches.
        self._patched: set[int] | None = None

    def __call__(self, function: Any) -> Any:
        seen = self._languages & {id(value) for value in function.__globals__.values()}
        if self._patched is None:
            scope = self._patch(function)
            self._patched, restore = seen, scope.restore

            def leave() -> None:
                self._patched = None
                restore()

            scope.restore = leave
            return scope
        if seen <= self._patched:
            return self._no_scope()
        self._patched |= seen
        return self._patch(function)


@pytest.fixture(autouse=True)
def _patched_once(monkeypatch: pytest.MonkeyPatch, _numbers_from_arrays: None) -> None:
    if find_spec("triton") is not None:
        from triton.runtime import interpreter

        monkeypatch.setattr(interpreter, "_patch_lang", _PatchOnce(interpreter))
