"""The probe: what it allows follows from exactness, not from the clock."""

import functools

import pytest
from torch import Tensor

from headrace.core.config import DTYPES
from headrace.core.errors import InvalidInput
from headrace.runner.cuda import presence
from headrace.runner.torch import probe
from headrace.runner.torch.int4 import has_native_kernel
from headrace.runner.torch.kernels import KERNELS, OneDnnKernel, WideKernel
from headrace.runner.torch.probe import Choice, KernelFigure, choose
from headrace.weights.shape import ModelShape
from tests.unit.runner.torch.model_rig import model


@functools.cache
def shape() -> ModelShape:
    return model("llama3")[1].shape


def test_a_configuration_may_name_what_any_device_can_do() -> None:
    assert set(DTYPES) == {*probe.DTYPES, *presence.DTYPES}


def test_every_dtype_asked_for_is_given_or_explained() -> None:
    for dtype in ("fp32", "int8", "int4"):
        made = choose(shape(), dtype)
        assert made.recipe.dtype == dtype or made.reasons
        assert made.recipe.kernel in KERNELS


def test_int8_is_row_exact_wherever_attention_is() -> None:
    made = choose(shape(), "int8")
    assert made.row_exact
    assert {"onednn", "wide", "fp32"} <= {figure.name for figure in made.figures}


def test_a_kernel_that_is_wrong_once_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Saturating(OneDnnKernel):
        def multiply(self, rows):  # type: ignore[no-untyped-def]
            return super().multiply(rows).clamp_(-1e6, 1e6)

    monkeypatch.setitem(KERNELS, "onednn", Saturating)
    made = choose(shape(), "int8")
    assert made.recipe.kernel != "onednn"
    assert any("onednn" in reason for reason in made.reasons)


def test_without_any_fast_kernel_the_wide_one_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(weight: object) -> OneDnnKernel:
        raise RuntimeError("no such engine")

    monkeypatch.setattr(probe, "KERNELS", {"fbgemm": missing, "onednn": missing, "wide": WideKernel})
    assert choose(shape(), "int8").recipe.kernel == "wide"


@pytest.mark.parametrize(
    ("lean", "heavy", "chosen"),
    [((2.0, 4.0), (2.1, 3.9), "fbgemm"), ((2.0, 4.0), (1.9, 3.8), "fbgemm"), ((2.0, 4.0), (1.9, 2.0), "onednn")],
)
def test_of_exact_kernels_the_leanest_serves_unless_another_is_clearly_quicker(
    lean: tuple[float, ...], heavy: tuple[float, ...], chosen: str
) -> None:
    figures = [KernelFigure("onednn", True, heavy), KernelFigure("fbgemm", True, lean)]
    assert probe._quickest(figures, 576) == chosen


def test_a_slow_moment_is_one_for_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two equally quick ones neither is found slower, however the machine's pace changes meanwhile."""
    now = [0.0]

    def work(rows: Tensor) -> Tensor:
        now[0] += 1.0 if now[0] < 15.0 else 10.0
        return rows

    monkeypatch.setattr("headrace.runner.torch.probe.time.perf_counter", lambda: now[0])
    found = probe._micros({"fbgemm": work, "onednn": work}, 8)
    assert found["fbgemm"] == found["onednn"] and found["fbgemm"][0] < found["fbgemm"][-1]


def test_int4_without_its_kernel_is_served_as_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_measure_int4", lambda *_: None)
    made = choose(shape(), "int4")
    assert made.recipe.dtype == "int8" and any("int4 is served as int8" in reason for reason in made.reasons)


FEW_BITS = "int4" if has_native_kernel() else "int8"


@pytest.mark.parametrize(("bits", "chosen"), [(5.8, FEW_BITS), (8.5, "int8"), (16.0, "int8")])
def test_auto_follows_what_the_file_holds_and_not_the_clock(bits: float, chosen: str) -> None:
    made: Choice = choose(shape(), stored_bits=bits)
    assert made.recipe.dtype == chosen and made.reasons[-1].startswith(f"auto: {chosen}")


def test_auto_without_the_4_bit_kernel_is_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_measure_int4", lambda *_: None)
    assert choose(shape(), stored_bits=4.5).recipe.dtype == "int8"


@pytest.mark.parametrize("dtype", ["auto", "fp32", "int8", "int4"])
@pytest.mark.parametrize("bits", [4.5, 16.0])
def test_a_brief_choice_is_the_same(dtype: str, bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for chance."""
    monkeypatch.setattr(probe, "_best_s", lambda runs, rows: dict.fromkeys(runs, 1e-6 * len(rows)))
    brief, whole = (choose(shape(), dtype, stored_bits=bits, brief=each) for each in (True, False))
    assert (brief.recipe.dtype, brief.recipe.kernel) == (whole.recipe.dtype, whole.recipe.kernel)
    assert brief.recipe.dtype == "int8" or brief.recipe.min_rows == whole.recipe.min_rows
    assert (brief.cuts, brief.row_exact, brief.reasons) == (whole.cuts, whole.row_exact, whole.reasons)


@pytest.mark.parametrize(
    ("dtype", "has_int4", "bits"), [("int8", True, 4.5), ("auto", False, 4.5), ("auto", True, 16.0)]
)
def test_what_will_be_int8_briefly_tries_nothing_else(
    dtype: str, has_int4: bool, bits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_has_int4", lambda _: has_int4)
    monkeypatch.setattr(probe, "_min_rows", lambda _: pytest.fail("float32 was tried"))
    assert choose(shape(), dtype, stored_bits=bits, brief=True).recipe.dtype == "int8"


def test_what_may_be_int4_is_tried_even_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_has_int4", lambda _: True)
    monkeypatch.setattr(probe, "_measure_int4", lambda *_: KernelFigure("int4", True, ()))
    assert choose(shape(), stored_bits=4.5, brief=True).recipe.dtype == "int4"


@pytest.mark.parametrize("brief", [True, False])
def test_a_kernel_that_fails_at_the_size_of_the_model_is_not_used(brief: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Narrow(WideKernel):
        def multiply(self, rows: Tensor) -> Tensor:
            if len(rows) == max(probe.ROWS):
                raise RuntimeError("could not create a primitive")
            return super().multiply(rows)

    monkeypatch.setattr(probe, "KERNELS", {"onednn": Narrow, "wide": WideKernel})
    made = choose(shape(), "int8", brief=brief)
    assert made.recipe.kernel == "wide"
    assert any("onednn" in reason for reason in made.reasons)


@pytest.mark.parametrize("brief", [True, False])
def test_the_last_kernel_serves_whatever_is_found_of_it(brief: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "is_exact", lambda *_: False)
    assert choose(shape(), "int8", brief=brief).recipe.kernel == "wide"


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(InvalidInput, match="dtype must be one of auto, fp32, int8, int4"):
        choose(shape(), "bf16")
