"""Models with experts on disk: what their configs say, how folders and GGUF files name and stack them, what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from headrace.core.errors import InvalidModel
from headrace.weights.checkpoint import open_checkpoint
from headrace.weights.config import HfConfig, HfGeneration, shape_of_config
from headrace.weights.document import parse_json
from headrace.weights.layout import num_parameters, tensor_dims
from headrace.weights.shape import ExpertShape, ModelShape
from tests.unit.weights.files import Tensors, config_of, random_tensors, tiny_shape, write_folder, write_gguf

pytestmark = pytest.mark.unit

MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def shape_of(**others: Any) -> ModelShape:
    config = parse_json(json.dumps(config_of(tiny_shape(), **others)).encode(), HfConfig, "config.json")
    return shape_of_config(config, HfGeneration(), "config.json")


def experts_of(**others: Any) -> ExpertShape:
    found = shape_of(**others).experts
    assert found is not None
    return found


def test_mixtral_has_experts_as_wide_as_its_layers_in_all_of_them() -> None:
    shape = shape_of(**MIXTRAL, norm_topk_prob=False, moe_intermediate_size=8, mlp_only_layers=[0])
    assert shape.experts == ExpertShape(4, 2, 96, normed=True)
    assert (shape.architecture, shape.qk_norm, shape.num_dense_layers, shape.inner_sizes) == (
        "mixtral",
        False,
        0,
        (96,),
    )


def test_qwen_says_which_layers_have_experts_and_how_they_are_weighed() -> None:
    shape = shape_of(**QWEN, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3, 3])
    assert shape.experts == ExpertShape(4, 2, 32, normed=False, dense_layers=(0, 2, 3, 4))
    assert (shape.qk_norm, shape.inner_sizes) == (True, (96, 32))
    assert [shape.experts_of(layer) is not None for layer in range(6)] == [False, True, False, False, False, True]
    assert experts_of(**QWEN, norm_topk_prob=True) == ExpertShape(4, 2, 32, normed=True)


def test_either_spelling_of_their_number_will_do() -> None:
    assert experts_of(**QWEN, num_local_experts=4) == experts_of(**QWEN)
    assert experts_of(**{**QWEN, "num_experts": None}, num_local_experts=4) == experts_of(**QWEN)


def test_other_families_have_none_whatever_their_config_says() -> None:
    assert shape_of(num_local_experts=8, num_experts_per_tok=2).experts is None


@pytest.mark.parametrize(
    ("others", "param"),
    [
        ({"num_experts": 8, "num_local_experts": 4}, "num_experts"),
        ({"num_experts": None}, "num_experts"),
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts": -4}, "num_experts"),
        ({"num_experts": 2**40}, "num_experts"),
        ({"num_experts": 1000, "num_hidden_layers": 100}, "num_experts"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 0}, "num_chosen"),
        ({"num_experts_per_tok": 5}, "num_chosen"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"moe_intermediate_size": 0}, "inner_size"),
        ({"moe_intermediate_size": 2**40}, "inner_size"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"decoder_sparse_step": -1}, "decoder_sparse_step"),
        ({"decoder_sparse_step": 3}, "dense_layers"),
        ({"mlp_only_layers": [0, 1]}, "dense_layers"),
        ({"mlp_only_layers": [2]}, "dense_layers"),
        ({"mlp_only_layers": [-1]}, "dense_layers"),
        ({"num_hidden_layers": 10**9}, "num_layers"),
    ],
)
def test_refusals_name_the_field(others: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidModel) as refused:
        shape_of(**{**QWEN, **others})
    assert refused.value.param == param
    assert refused.value.message.startswith("config.json: ")


@pytest.mark.parametrize("value", ["4", 1.5, [4], True])
def test_a_field_of_the_wrong_type_is_named(value: object) -> None:
    with pytest.raises(InvalidModel, match="num_experts"):
        shape_of(**{**QWEN, "num_experts": value})


def test_every_expert_counts_as_a_parameter() -> None:
    shape = tiny_shape(num_layers=3, experts=ExpertShape(5, 2, 32, dense_layers=(1,)))
    plain = tiny_shape(num_layers=3)
    feed = 3 * 64 * 96
    assert num_parameters(shape) - num_parameters(plain) == 2 * (5 * 3 * 64 * 32 + 5 * 64 - feed)
    dims = tensor_dims(shape)
    assert dims["model.layers.0.mlp.gate.weight"] == (5, 64)
    assert dims["model.layers.2.mlp.experts.4.down_proj.weight"] == (64, 32)
    assert "model.layers.1.mlp.gate_proj.weight" in dims and "model.layers.0.mlp.gate_proj.weight" not in dims


def read_all(path: Path) -> tuple[ModelShape, Tensors]:
    checkpoint = open_checkpoint(path)
    try:
        return checkpoint.shape, dict(checkpoint.tensors())
    finally:
        checkpoint.close()


def refusal(path: Path) -> InvalidModel:
    with pytest.raises(InvalidModel) as refused:
        read_all(path)
    return refused.value


def as_mixtral(tensors: Tensors) -> Tensors:
    """Under the names of Mixtral's own files."""
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    found: Tensors = {}
    for name, values in tensors.items():
        before, inside, after = name.partition(".mlp.")
        for ours, theirs in names.items():
            after = after.replace(ours, theirs)
        found[f"{before}.block_sparse_moe.{after}" if inside else name] = values
    return found


def same(found: Tensors, wanted: Tensors) -> bool:
    return found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_a_folder_of_mixtral_in_shards(tmp_path: Path) -> None:
    shape = tiny_shape(experts=ExpertShape(4, 2, 96))
    tensors = random_tensors(shape)
    found_shape, found = read_all(write_folder(tmp_path, shape, as_mixtral(tensors), shards=3, config=MIXTRAL))
    assert found_shape.experts == shape.experts
    assert same(found, tensors)


def test_a_folder_of_qwen_with_a_plain_layer(tmp_path: Path) -> None:
    shape = tiny_shape(qk_norm=True, experts=ExpertShape(4, 2, 32, normed=False, dense_layers=(0,)))
    tensors = random_tensors(shape)
    found_shape, found = read_all(write_folder(tmp_path, shape, tensors, config={**QWEN, "mlp_only_layers": [0]}))
    assert found_shape.experts == shape.experts
    assert same(found, tensors)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    shape = tiny_shape(experts=ExpertShape(4, 2, 96))
    config = {**MIXTRAL, "num_local_experts": 5}
    error = refusal(write_folder(tmp_path, shape, as_mixtral(random_tensors(shape)), config=config))
    assert error.param == "model.layers.0.mlp.gate.weight"
    tensors = as_mixtral(random_tensors(shape))
    del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    error = refusal(write_folder(tmp_path, shape, tensors, config=MIXTRAL))
    assert error.param == "model.layers.1.mlp.experts.3.down_proj.weight"


def test_an_expert_too_many_has_no_place(tmp_path: Path) -> None:
    shape = tiny_shape(experts=ExpertShape(4, 2, 96))
    tensors = as_mixtral(random_tensors(shape))
    tensors["model.layers.1.block_sparse_moe.experts.4.w2.weight"] = np.zeros((64, 96), np.float32)
    error = refusal(write_folder(tmp_path, shape, tensors, config=MIXTRAL))
    assert "experts.4.down_proj.weight has no place" in error.message


F32 = GGMLQuantizationType.F32


def gguf(
    path: Path,
    architecture: str,
    tensors: Tensors,
    *,
    kind: GGMLQuantizationType = F32,
    metadata: dict[str, Any] | None = None,
    stacked_of: int = 4,
) -> Path:
    """Experts lie stacked, as llama.cpp's conversion writes them."""
    plain = {name: values for name, values in tensors.items() if ".mlp." not in name}
    said: dict[str, Any] = {
        f"{architecture}.expert_count": 4,
        f"{architecture}.expert_used_count": 2,
        f"{architecture}.expert_feed_forward_length": 32,
    }

    def add_experts(writer: GGUFWriter) -> None:
        for layer in range(2):
            prefix = f"model.layers.{layer}.mlp"
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", tensors[f"{prefix}.gate.weight"])
            for part in ("gate", "up", "down"):
                names = [f"{prefix}.experts.{expert}.{part}_proj.weight" for expert in range(stacked_of)]
                stack = quantize(np.stack([tensors[name] for name in names]), kind)
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", stack, raw_dtype=kind)

    shape = tiny_shape(architecture=architecture, qk_norm=architecture == "qwen3moe")
    return write_gguf(path, shape, plain, metadata=said | (metadata or {}), change=add_experts)


def expert_tensors(architecture: str) -> Tensors:
    return random_tensors(tiny_shape(qk_norm=architecture == "qwen3moe", experts=ExpertShape(4, 2, 32)))


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_stacked_experts_come_one_by_one(tmp_path: Path, architecture: str) -> None:
    tensors = expert_tensors(architecture)
    shape, found = read_all(gguf(tmp_path / "m.gguf", architecture, tensors))
    assert shape.experts == ExpertShape(4, 2, 32, normed=True)
    assert same(found, tensors)


def test_quantised_stacks_are_cut_at_their_experts(tmp_path: Path) -> None:
    kind = GGMLQuantizationType.Q8_0
    tensors = expert_tensors("qwen3moe")
    _, found = read_all(gguf(tmp_path / "m.gguf", "qwen3moe", tensors, kind=kind))
    for name in (name for name in tensors if ".experts." in name):
        assert np.array_equal(found[name], dequantize(quantize(tensors[name], kind), kind))


def test_experts_as_wide_as_a_layer_need_not_say_so(tmp_path: Path) -> None:
    """So do Mixtral's files."""
    metadata = {"llama.expert_feed_forward_length": None, "llama.feed_forward_length": 32}
    shape, _ = read_all(gguf(tmp_path / "m.gguf", "llama", expert_tensors("llama"), metadata=metadata))
    assert shape.experts == ExpertShape(4, 2, 32)


@pytest.mark.parametrize(
    ("metadata", "param"),
    [
        ({"expert_count": 0}, "qwen3moe.expert_count"),
        ({"expert_count": None}, "qwen3moe.expert_count"),
        ({"expert_count": 5}, "blk.0.ffn_gate_exps.weight"),
        ({"expert_count": 10**6}, "num_experts"),
        ({"expert_used_count": None}, "qwen3moe.expert_used_count"),
        ({"expert_used_count": 5}, "num_chosen"),
        ({"expert_feed_forward_length": 0}, "inner_size"),
        ({"expert_feed_forward_length": 64}, "model.layers.0.mlp.experts.0.gate_proj.weight"),
        ({"expert_shared_count": 1}, "qwen3moe.expert_shared_count"),
        ({"expert_group_count": 2}, "qwen3moe.expert_group_count"),
        ({"expert_gating_func": 2}, "qwen3moe.expert_gating_func"),
        ({"expert_weights_scale": 2.5}, "qwen3moe.expert_weights_scale"),
        ({"expert_weights_norm": False}, "qwen3moe.expert_weights_norm"),
    ],
)
def test_what_gguf_files_may_not_say(tmp_path: Path, metadata: dict[str, Any], param: str) -> None:
    said = {f"qwen3moe.{name}": value for name, value in metadata.items()}
    assert refusal(gguf(tmp_path / "m.gguf", "qwen3moe", expert_tensors("qwen3moe"), metadata=said)).param == param


def test_stacks_of_too_few(tmp_path: Path) -> None:
    error = refusal(gguf(tmp_path / "m.gguf", "llama", expert_tensors("llama"), stacked_of=3))
    assert "is (3, 32, 64), its metadata says 4 experts" in error.message


def test_families_that_have_none_refuse_them(tmp_path: Path) -> None:
    shape = tiny_shape(architecture="qwen3", qk_norm=True)
    error = refusal(write_gguf(tmp_path / "m.gguf", shape, metadata={"qwen3.expert_count": 4}))
    assert error.param == "qwen3.expert_count"
