"""Integer kernels, planes, groups and rotations, each against plain arithmetic."""

import pytest
import torch

from headrace.runner.torch import int8, kernels
from headrace.runner.torch.int4 import GROUP, quantise_groups
from headrace.runner.torch.int8 import quantise
from headrace.runner.torch.kernels import KERNELS, LARGEST, OneDnnKernel, WideKernel, with_margin
from headrace.runner.torch.planes import MARGIN, PEAK, STEP, RowPlanes
from headrace.runner.torch.rotation import Rotation


@pytest.mark.parametrize("width", [64, 576, 2400])
@pytest.mark.parametrize("name", KERNELS)
def test_sums_are_exact_up_to_the_largest(name: str, width: int) -> None:
    torch.manual_seed(0)
    weight = torch.randint(-LARGEST, LARGEST + 1, (40, width))
    weight[0], weight[1] = LARGEST, -LARGEST
    kernel = KERNELS[name](with_margin(weight.to(torch.int8)))
    for count in [*range(1, 18), 33, 130]:
        rows = torch.randint(-PEAK, PEAK + 1, (count, width))
        rows[0] = PEAK
        rows[:, 0] = PEAK
        integers, _ = RowPlanes(count, width, 1).split(rows.float())
        assert torch.equal(kernel.multiply(integers), (rows.double() @ weight.double().t()).float())


def test_the_library_sees_few_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new one makes it pack the weights again."""
    kernel = OneDnnKernel(with_margin(torch.randint(-LARGEST, LARGEST + 1, (8, 64)).to(torch.int8)))
    multiply, seen = torch.ops.quantized.linear_dynamic, set()

    def watched(rows: torch.Tensor, packed: object) -> torch.Tensor:
        seen.add(rows.shape[0])
        product: torch.Tensor = multiply(rows, packed)
        return product

    monkeypatch.setattr(torch.ops.quantized, "linear_dynamic", watched)
    for count in range(1, 65):
        integers, _ = RowPlanes(count, 64, 1).split(torch.randn(count, 64))
        assert kernel.multiply(integers).shape == (count, 8)
    assert seen == set(OneDnnKernel.FORMS)


@pytest.mark.parametrize(("planes", "levels"), [(1, PEAK), (2, PEAK * STEP)])
def test_planes_hold_a_row_to_half_a_level(planes: int, levels: int) -> None:
    rows = torch.randn(5, 96) * torch.tensor([[1e-9], [1.0], [1e3], [1e9], [0.0]])
    split = RowPlanes(8, 96, planes)
    integers, scales = split.split(rows)
    values = split.join(integers.clone())[:, :96] * scales
    assert ((values - rows).abs() <= rows.abs().amax(1, keepdim=True) / levels * 0.501).all()


def test_a_row_that_is_not_finite_is_zeros_under_a_bad_scale() -> None:
    rows = torch.randn(3, 32)
    rows[0, 4], rows[1, 5] = float("nan"), float("inf")
    integers, scales = RowPlanes(3, 32, 1).split(rows)
    assert integers.isfinite().all() and integers[:, :32].abs().max() <= PEAK
    assert scales.isfinite().view(-1).tolist() == [False, False, True]


def test_two_weight_planes_hold_fourteen_bits() -> None:
    weight = torch.randn(6, 50)
    integers, scales = quantise(weight, 2)
    whole = (integers[:6].double() * STEP + integers[6:].double())[:, :50]
    assert (whole * scales[:, None] - weight).abs().max() < weight.abs().max() / 2**13


@pytest.mark.parametrize("planes", [1, 2])
def test_weights_are_quantised_slice_by_slice_as_in_one_piece(planes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, factors = torch.randn(37, 50), torch.rand(50)
    weight[4], weight[5] = 0.0, -weight[5].abs()
    whole = quantise(weight * factors, planes)
    for size in (1, 100, 350):
        monkeypatch.setattr(int8, "_SLICE", size)
        assert all(torch.equal(*each) for each in zip(quantise(weight, planes, factors), whole, strict=True))
    assert whole[0].shape == (planes * 37, 50 + MARGIN) and whole[1][4] == 1.0
    assert not whole[0][:, 50:].any()
    assert whole[0][:37].abs().amax(1).tolist() == [LARGEST if row != 4 else 0 for row in range(37)]


def test_weights_are_turned_slice_by_slice_as_before_they_are_quantised() -> None:
    rotation, weight, factors = Rotation(576), torch.randn(1000, 576), torch.rand(576)
    turned = rotation.turn_inputs(weight * factors)
    assert all(
        torch.equal(*each) for each in zip(quantise(weight, 2, factors, rotation), quantise(turned, 2), strict=True)
    )


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("peak", [1.3e-43, 2e-43, 1e-40, 1e-36, 1e-30])
def test_the_smallest_weights_stay_within_bounds(planes: int, peak: float) -> None:
    integers, scales = quantise(torch.rand(20, 30) * peak, planes)
    assert integers.abs().max() <= LARGEST and (scales > 0.0).all()


@pytest.mark.parametrize(
    ("name", "width", "columns"),
    [
        ("fbgemm", 576, 768),
        ("fbgemm", 1536, 1792),
        ("fbgemm", 64, 256),
        ("onednn", 576, 4 * 608),
        ("wide", 576, 4 * 576),
    ],
)
def test_what_a_kernel_keeps_of_a_row_is_what_it_was_seen_to_take(name: str, width: int, columns: int) -> None:
    """FBGEMM's by the allocator's count: 1.34, 1.17 and 4.3 bytes of each weight."""
    assert kernels.weight_bytes(name, width) * width == pytest.approx(columns)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_wide_matrix_is_turned_slice_by_slice(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_SLICE", size)
    weight = torch.randint(-LARGEST, LARGEST + 1, (50, 1200))
    rows = torch.randint(-PEAK, PEAK + 1, (3, 1200))
    product = WideKernel(with_margin(weight.to(torch.int8))).multiply(rows.float())
    assert torch.equal(product, (rows.double() @ weight.double().t()).float())


def test_groups_return_what_four_bits_can_hold() -> None:
    digits = torch.randint(0, 16, (4, 3, GROUP))
    digits[..., 0], digits[..., 1] = 0, 15
    scales = (torch.rand(4, 3, 1) + 0.5).to(torch.bfloat16).float()
    weight = (digits * scales + torch.randn(4, 3, 1)).view(4, -1)
    found, steps, offsets = quantise_groups(weight)
    again = (found.view(4, 3, GROUP) - 8.0) * steps.float()[..., None] + offsets[..., None]
    assert torch.equal(found.view(4, 3, GROUP), digits.to(torch.uint8))
    assert (again.view(4, -1) - weight).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("size", "factors"),
    [
        (1, [1]),
        (7, [7]),
        (64, [64]),
        (96, [3, 32]),
        (128, [128]),
        (256, [4, 64]),
        (576, [9, 64]),
        (896, [7, 128]),
        (5120, [5, 16, 64]),
    ],
)
def test_a_rotation_is_the_product_of_its_factors(size: int, factors: list[int]) -> None:
    torch.manual_seed(1)
    whole, weight = torch.ones(1, 1, dtype=torch.float64), torch.randn(3, size)
    for width in factors:
        whole = torch.kron(whole, Rotation(width).turn_inputs(torch.eye(width)).double())
    assert (whole @ whole.t() - torch.eye(size)).abs().max() < 1e-5
    assert (Rotation(size).turn_inputs(weight) - weight.double() @ whole).abs().max() < 1e-5


@pytest.mark.parametrize("size", [64, 96, 576, 7, 4096])
def test_rotations_keep_products(size: int) -> None:
    torch.manual_seed(1)
    rows, weight = torch.randn(3, size), torch.randn(5, size)
    rotation = Rotation(size)
    turned = rotation.turn_inputs(rows) @ rotation.turn_inputs(weight).t()
    assert (turned - rows @ weight.t()).abs().max() < 1e-2
    assert torch.equal(rotation.turn_outputs(weight.t().contiguous()), rotation.turn_inputs(weight).t())


def test_rotations_turn_every_row_of_a_tall_matrix() -> None:
    torch.manual_seed(1)
    rotation, weight = Rotation(576), torch.randn(1000, 576)
    turned = rotation.turn_inputs(weight)
    for row in (0, 454, 455, 909, 910, 999):
        assert torch.allclose(turned[row], rotation.turn_inputs(weight[row : row + 1])[0], atol=1e-4)
    assert rotation.turn_inputs(weight, out=weight) is weight and torch.equal(weight, turned)


def test_rotations_spread_what_stands_out() -> None:
    spike = torch.zeros(1, 576)
    spike[0, 100] = 24.0
    assert Rotation(576).turn_inputs(spike).abs().max() < 2.0
