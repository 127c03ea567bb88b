"""Which device a model runs on, and what its numerics are called, on machines with and without a card."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from headrace.core.errors import HeadraceError, InvalidInput, InvalidModel
from headrace.runner.cuda import presence
from headrace.runner.cuda.fingerprint import fingerprint, kernels_version
from headrace.runner.cuda.presence import CardLook, WokenCard, choose_device, look_for_card, may_take_card
from headrace.weights.shape import ExpertShape, ModelShape

SHAPE = ModelShape("llama", 576, 30, 9, 3, 64, 1536, 49152, 8192, 1e-5, 1e5)
ODD = replace(SHAPE, head_dim=80)
CARD = CardLook(True, "a card")
OLD = CardLook(True, "an old card", "an old card has no products of eight bits")
EXPERTS = replace(SHAPE, experts=ExpertShape(8, 2, 1536))
UNEVEN = replace(SHAPE, intermediate_size=1500)
NONE = CardLook(False, "torch sees no CUDA card")
CPU = torch.device("cpu")
NO_LIBRARY = "libnobody.so.1"


@pytest.mark.parametrize(
    ("device", "dtype", "shape", "look", "chosen"),
    [
        ("auto", "auto", SHAPE, CARD, "cuda"),
        ("auto", "bf16", SHAPE, CARD, "cuda"),
        ("auto", "fp8", SHAPE, CARD, "cuda"),
        ("cuda", "fp8", SHAPE, CARD, "cuda"),
        ("auto", "auto", SHAPE, OLD, "cuda"),
        ("auto", "auto", EXPERTS, CARD, "cuda"),
        ("auto", "auto", SHAPE, NONE, "cpu"),
        # What only the CPU has is asked of the CPU.
        ("auto", "int8", SHAPE, CARD, "cpu"),
        ("auto", "auto", ODD, CARD, "cpu"),
        ("cuda", "auto", SHAPE, CARD, "cuda"),
        ("cpu", "auto", SHAPE, CARD, "cpu"),
        ("cpu", "int4", ODD, NONE, "cpu"),
    ],
)
def test_a_card_is_taken_where_it_can_be_used(
    device: str, dtype: str, shape: ModelShape, look: CardLook, chosen: str
) -> None:
    assert choose_device(device, dtype, shape, look) == chosen


@pytest.mark.parametrize(
    ("device", "dtype", "shape", "look", "error", "told"),
    [
        ("cuda", "auto", SHAPE, NONE, InvalidInput, 'device is "cuda": torch sees no CUDA card'),
        ("cuda", "int8", SHAPE, CARD, InvalidInput, "dtype must be auto, bf16 or fp8, not int8"),
        ("cuda", "fp8", SHAPE, OLD, InvalidInput, "dtype is fp8: an old card has no products of eight bits"),
        ("auto", "fp8", SHAPE, OLD, InvalidInput, "dtype is fp8: an old card has no products of eight bits"),
        ("auto", "fp8", SHAPE, NONE, InvalidInput, "fp8 needs a CUDA card: torch sees no CUDA card"),
        ("cuda", "fp8", EXPERTS, CARD, InvalidModel, "products of its experts are in bf16 alone"),
        ("auto", "fp8", UNEVEN, CARD, InvalidModel, "widths in multiples of 16, and one is 1500"),
        ("cuda", "auto", ODD, CARD, InvalidModel, "its heads have 80 dimensions"),
        ("auto", "bf16", SHAPE, NONE, InvalidInput, "bf16 needs a CUDA card: torch sees no CUDA card"),
        ("tpu", "auto", SHAPE, CARD, InvalidInput, "device must be one of auto, cuda, cpu"),
    ],
)
def test_what_is_not_there_is_refused_in_one_sentence(
    device: str, dtype: str, shape: ModelShape, look: CardLook, error: type[HeadraceError], told: str
) -> None:
    with pytest.raises(error) as caught:
        choose_device(device, dtype, shape, look)
    assert told in caught.value.message


class Machine:
    """What torch and Triton say of a machine with a card, to be changed by a test."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.cuda(is_available=True, get_device_capability=(9, 0), get_device_name="NVIDIA H200")
        self.cuda(get_device_properties=SimpleNamespace(total_memory=140 << 30))
        patch.setattr(torch.version, "cuda", "13.0")
        self.triton(SimpleNamespace(__version__="3.6.0"))

    def cuda(self, **answers: Any) -> None:
        for name, answer in answers.items():
            self._patch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)

    def triton(self, module: Any) -> None:
        def load(name: str) -> Any:
            if isinstance(module, ImportError):
                raise module
            return module

        self._patch.setattr(presence, "find_spec", lambda name: module)
        self._patch.setattr(presence, "import_module", load)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_card_is_named(machine: Machine) -> None:
    assert look_for_card() == CardLook(True, "NVIDIA H200, 140 GiB, CUDA 13.0, Triton 3.6.0")


def test_a_card_without_eight_bits_says_so(machine: Machine) -> None:
    machine.cuda(get_device_capability=(8, 6), get_device_name="NVIDIA A10")
    assert look_for_card().usable
    assert look_for_card().no_fp8 == "NVIDIA A10 has no products of eight bits (compute capability 8.6)"


def test_what_is_missing_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.triton(ImportError("no libcuda"))
    assert look_for_card() == CardLook(False, "there is NVIDIA H200, but Triton cannot be imported: no libcuda")
    machine.triton(None)
    assert look_for_card() == CardLook(False, "there is NVIDIA H200, but Triton is not installed")
    machine.cuda(get_device_capability=(7, 5))
    assert look_for_card().words == "NVIDIA H200 has no bfloat16 (compute capability 7.5)"
    machine.cuda(is_available=False)
    assert look_for_card() == CardLook(False, "torch sees no CUDA card")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert look_for_card() == CardLook(False, "this torch is built without CUDA")


def test_other_weights_kernels_or_numbers_have_another_fingerprint() -> None:
    name = fingerprint({"a": "1"}, torch.bfloat16, "triton", CPU)
    assert name.startswith("cpu-bf16-")
    assert name == fingerprint({"a": "1"}, torch.bfloat16, "triton", CPU)
    others = {
        fingerprint({"a": "2"}, torch.bfloat16, "triton", CPU),
        fingerprint({"a": "1"}, torch.float32, "triton", CPU),
        fingerprint({"a": "1"}, torch.bfloat16, "reference", CPU),
    }
    assert len(others) == 3 and name not in others


def test_another_card_has_another_fingerprint(machine: Machine) -> None:
    card = torch.device("cuda", 0)
    name = fingerprint({}, torch.bfloat16, "triton", card)
    assert name.startswith("cuda-bf16-")
    machine.cuda(get_device_name="NVIDIA H100")
    assert fingerprint({}, torch.bfloat16, "triton", card) != name


def test_another_compiler_has_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for version in ("3.6.0", "3.7.0"):
        monkeypatch.setattr("headrace.runner.cuda.fingerprint.version", lambda name, version=version: version)
        names.add(fingerprint({}, torch.bfloat16, "triton", CPU))
    assert len(names) == 2


@pytest.mark.parametrize("source", ["kernels/norms.py", "kernels/clustered_product.cu", "native.py", "parted_ops.py"])
def test_the_version_of_kernels_is_that_of_their_sources(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = tmp_path / "cuda"
    shutil.copytree(Path(presence.__file__).parent, copy)
    before = kernels_version()
    monkeypatch.setattr("headrace.runner.cuda.fingerprint.files", lambda name: copy)
    assert kernels_version() == before
    with (copy / source).open("a") as file:
        file.write("\n")
    assert kernels_version() != before


@pytest.mark.parametrize(
    ("device", "dtype", "shape", "taken"),
    [
        ("auto", "auto", SHAPE, True),
        ("cuda", "fp8", SHAPE, True),
        ("cpu", "auto", SHAPE, False),
        ("auto", "int8", SHAPE, False),
        ("auto", "auto", EXPERTS, True),
        ("cuda", "auto", ODD, False),
    ],
)
def test_a_card_is_looked_for_without_torch(
    device: str, dtype: str, shape: ModelShape, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library, found in (("libc.so.6", taken), (NO_LIBRARY, False)):
        monkeypatch.setattr(presence, "_DRIVER", library)
        assert may_take_card(device, dtype, shape) is found


class Driver:
    """Of so many cards, broken or taken by somebody else; what was done with them."""

    def __init__(self, cards: int, state: str) -> None:
        self.cards, self.is_broken, self.is_taken = cards, state == "broken", state == "taken"
        self.calls: list[tuple[str, int]] = []

    def cuInit(self, flags: int) -> int:  # noqa: N802 - the driver's name
        return 999 if self.is_broken else 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802 - the driver's name
        count._obj.value = self.cards
        return 0

    def cuDeviceGet(self, card: Any, index: int) -> int:  # noqa: N802 - the driver's name
        card._obj.value = index
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, card: Any) -> int:  # noqa: N802 - the driver's name
        if self.is_taken:
            return 46
        self.calls.append(("taken", card.value))
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, card: Any) -> int:  # noqa: N802 - the driver's name
        self.calls.append(("given back", card.value))
        return 0


@pytest.mark.parametrize(
    ("cards", "state", "index", "card"),
    [(1, "", 0, 0), (3, "", 4, 1), (0, "", 0, None), (2, "broken", 0, None), (2, "taken", 0, None)],
)
def test_the_card_that_will_be_used_is_woken_and_given_back(
    cards: int, state: str, index: int, card: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(cards, state)
    monkeypatch.setattr(presence, "CDLL", lambda name: driver)
    WokenCard(index).close()
    assert driver.calls == ([] if card is None else [("taken", card), ("given back", card)])


def test_without_a_driver_there_is_nothing_to_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_DRIVER", NO_LIBRARY)
    # What a thread raises fails the test.
    WokenCard(0).close()


def test_without_triton_no_card_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_DRIVER", "libc.so.6")
    monkeypatch.setattr(presence, "find_spec", lambda name: None)
    assert not may_take_card("cuda", "auto", SHAPE)
