"""What a card's driver says, in our words; and what it means when it says nothing."""

import sys

import pytest

from headrace.core.errors import NotFound
from headrace.core.messages import DeviceHealth
from headrace.worker.nvml import all_devices, find_device, words
from tests.unit.worker.fake_nvml import GPU_IS_LOST, NOT_SUPPORTED, FakeNvml, NVMLError


def test_a_card_is_found_by_its_id_and_read() -> None:
    library = FakeNvml("GPU-0", "GPU-1")
    assert find_device("GPU-1", library).read() == DeviceHealth("NVIDIA X", 3 << 30, 80 << 30, 31.0, 71.5, 2)
    assert [device.name for device in all_devices(library)] == ["NVIDIA X", "NVIDIA X"]


def test_what_a_card_does_not_tell_is_not_told() -> None:
    library = FakeNvml()
    for name in ("power", "errors"):
        library.figures[name] = NVMLError(NOT_SUPPORTED)
    health = find_device("GPU-1", library).read()
    assert (health.power_w, health.ecc_uncorrected, health.fault) == (None, None, "")
    assert words(health) == "NVIDIA X: 3.0 of 80.0 GiB used, 31 °C"


def test_a_card_that_is_lost_is_a_fault() -> None:
    library = FakeNvml()
    device = find_device("GPU-1", library)
    library.figures = dict.fromkeys(library.figures, NVMLError(GPU_IS_LOST))
    health = device.read()
    assert health == DeviceHealth("NVIDIA X", fault="NVIDIA X has fallen off the bus")
    assert words(health) == "NVIDIA X: NVIDIA X has fallen off the bus"


@pytest.mark.parametrize(
    ("library", "why"), [(FakeNvml(fails=9), "cannot be opened: NVML error 9"), (FakeNvml("GPU-7"), "knows no card")]
)
def test_without_a_driver_or_a_card_it_says_why(library: FakeNvml, why: str) -> None:
    with pytest.raises(NotFound, match=why):
        find_device("GPU-1", library)


def test_without_the_library_it_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NotFound, match=r"headrace\[gpu\]"):
        all_devices()


def test_the_library_is_found_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert words(all_devices()[0].read()).endswith("72 W, 2 uncorrected memory errors")
