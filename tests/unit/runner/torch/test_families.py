"""The decoder against transformers on the same random weights."""

import pytest
import torch

from headrace.runner.torch.attention import CUTS, Cuts
from headrace.runner.torch.int4 import GROUP, quantise_groups
from headrace.runner.torch.packing import Recipe
from tests.unit.runner.torch.model_rig import QUICK, Desk, ids, model

FAMILIES = ["llama2", "llama3", "mistral", "qwen2", "qwen3"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cuts", CUTS)
def test_fp32_logits_are_those_of_transformers(family: str, cuts: Cuts) -> None:
    network, checkpoint = model(family)
    desk = Desk(checkpoint, Recipe("fp32"), cuts=cuts)
    prompt = ids(70)
    desk.begin(0, prompt)
    tokens = desk.generate(0, 4, chunk=33)
    with torch.inference_mode():
        truth = network(torch.tensor([prompt + tuple(tokens[:3])])).logits[0, 69:]
    assert (torch.stack(desk.logits[0]) - truth).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_logits_are_near_those_of_transformers(family: str, dtype: str) -> None:
    """Of weights that are 4-bit groups already: what is left is the rounding of activations, about 1 % a layer."""
    network, checkpoint = model(family)
    with torch.no_grad():
        for name, weight in checkpoint.state.items():
            if name.endswith("_proj.weight"):
                digits, scales, offsets = quantise_groups(weight.clone())
                groups = (digits.view(*scales.shape, GROUP) - 8.0) * scales.float()[..., None] + offsets[..., None]
                weight.copy_(groups.view_as(weight))
    prompt = ids(70)
    with torch.inference_mode():
        truth = network(torch.tensor([prompt])).logits[0, -1]
    desk = Desk(checkpoint, Recipe(dtype, QUICK[0]))
    desk.begin(0, prompt)
    desk.prefill(0)
    assert (desk.logits[0][0] - truth).norm() < 0.05 * truth.norm()
