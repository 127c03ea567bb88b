"""Hugging Face folders: what is read is what was written, and whatever is wrong is named before a tensor is read."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from headrace.core.errors import InvalidModel
from headrace.weights.checkpoint import GenerationDefaults, open_checkpoint
from tests.unit.weights.files import (
    PIECES,
    Tensors,
    random_tensors,
    tiny_shape,
    write_folder,
    write_json,
    write_raw_safetensors,
    write_tokenizer,
)

pytestmark = pytest.mark.unit


def read_all(path: Path) -> Tensors:
    checkpoint = open_checkpoint(path)
    try:
        return dict(checkpoint.tensors())
    finally:
        checkpoint.close()


def same(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)


def refusal(path: Path) -> InvalidModel:
    with pytest.raises(InvalidModel) as refused:
        open_checkpoint(path)
    return refused.value


def test_tensors_come_back_as_they_were_written(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_shape())
    found = read_all(write_folder(tmp_path, tiny_shape(), tensors))
    assert same(found, tensors)
    assert all(values.dtype == np.float32 and values.flags.c_contiguous for values in found.values())


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_becomes_float32(tmp_path: Path, dtype: str) -> None:
    # Sixteenths below 8 fit into both halves exactly.
    tensors = {
        name: (np.round(values * 16) / 16).astype(np.float32) for name, values in random_tensors(tiny_shape()).items()
    }
    assert same(read_all(write_folder(tmp_path, tiny_shape(), tensors, dtype=dtype)), tensors)


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_shape())
    folder = write_folder(tmp_path, tiny_shape())
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    assert same(read_all(folder), tensors)


def test_shards_are_one_model(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_shape())
    assert same(read_all(write_folder(tmp_path, tiny_shape(), tensors, shards=3)), tensors)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tiny_shape(), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors is missing" in refusal(folder).message


def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", tiny_shape(), shards=2)
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"x": "../b/model.safetensors"}})
    assert "is not the name of a shard" in refusal(folder).message


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tiny_shape(), shards=2)
    (folder / "model-00002-of-00002.safetensors").write_bytes(
        (folder / "model-00001-of-00002.safetensors").read_bytes()
    )
    assert "in another shard too" in refusal(folder).message


def test_every_file_is_hashed_while_it_is_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tiny_shape(), shards=2)
    checkpoint = open_checkpoint(folder)
    assert len(list(checkpoint.tensors())) > 0
    expected = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    assert checkpoint.digest() == expected
    checkpoint.close()


def test_hashing_needs_no_reading_of_tensors(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_folder(tmp_path, tiny_shape()))
    assert (
        checkpoint.digest()["model.safetensors"]
        == hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    )
    checkpoint.close()


def test_progress_ends_at_the_size_of_all_files(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_folder(tmp_path, tiny_shape(), shards=2))
    heard: list[tuple[int, int]] = []
    for _ in checkpoint.tensors(lambda done, total: heard.append((done, total))):
        pass
    assert heard[-1] == (checkpoint.size_bytes, checkpoint.size_bytes)
    assert heard == sorted(heard)
    checkpoint.close()


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_folder(tmp_path, tiny_shape()))
    tensors = checkpoint.tensors()
    next(tensors)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(checkpoint.size_bytes // 2)
    with pytest.raises(InvalidModel, match="too early"):
        list(tensors)
    checkpoint.close()


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_folder(tmp_path, tiny_shape()))
    tensors = checkpoint.tensors()
    next(tensors)
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(InvalidModel, match="changed"):
        list(tensors)
    checkpoint.close()


def test_a_number_that_is_not_finite_is_refused_by_tensor(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_shape())
    tensors["model.norm.weight"][3] = np.nan
    with pytest.raises(InvalidModel, match=r"model\.norm\.weight"):
        read_all(write_folder(tmp_path, tiny_shape(), tensors))


def test_tied_embeddings_need_no_head_and_ignore_one(tmp_path: Path) -> None:
    tied, untied = tiny_shape(tied_embeddings=True), tiny_shape()
    for folder, stored in ((tmp_path / "without", tied), (tmp_path / "with", untied)):
        found = read_all(write_folder(folder, tied, random_tensors(stored)))
        assert "lm_head.weight" not in found and len(found) == len(random_tensors(tied))


@pytest.mark.parametrize("field", ["qkv_bias", "qk_norm"])
def test_families_have_tensors_of_their_own(tmp_path: Path, field: str) -> None:
    shape = tiny_shape(architecture={"qkv_bias": "qwen2", "qk_norm": "qwen3"}[field], **{field: True})
    tensors = random_tensors(shape)
    assert same(read_all(write_folder(tmp_path, shape, tensors)), tensors)


def test_attention_bias_of_llama_includes_the_output(tmp_path: Path) -> None:
    shape = tiny_shape(qkv_bias=True, output_bias=True)
    found = read_all(write_folder(tmp_path, shape))
    assert found["model.layers.1.self_attn.o_proj.bias"].shape == (64,)


def test_missing_tensor(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_shape())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    error = refusal(write_folder(tmp_path, tiny_shape(), tensors))
    assert error.param == "model.layers.1.mlp.up_proj.weight" and "is missing" in error.message


def test_shape_that_disagrees_with_the_config(tmp_path: Path) -> None:
    error = refusal(write_folder(tmp_path, tiny_shape(), config={"intermediate_size": 128}))
    assert "(96, 64), its config says (128, 64)" in error.message


def test_a_tensor_without_a_place(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_shape()) | {"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}
    assert refusal(write_folder(tmp_path, tiny_shape(), tensors)).param == "model.layers.0.self_attn.q_proj.bias"


def test_frequencies_that_old_files_stored_are_skipped(tmp_path: Path) -> None:
    stored = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    found = read_all(write_folder(tmp_path, tiny_shape(), random_tensors(tiny_shape()) | stored))
    assert found.keys() == random_tensors(tiny_shape()).keys()


def test_a_vocabulary_larger_than_the_embeddings_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tiny_shape())
    write_tokenizer(folder, (*PIECES, *(f"more{place}" for place in range(40))))
    error = refusal(folder)
    assert error.param == "tokenizer.json" and "40 rows" in error.message


def test_special_tokens_and_template_of_the_tokenizer(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tiny_shape(), config={"eos_token_id": 0})
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    write_tokenizer(folder, bos_token={"content": "<|im_start|>"}, chat_template=templates)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.vocabulary.chat_template == "yes"
    assert (checkpoint.vocabulary.bos_id, checkpoint.vocabulary.eos_id) == (1, 2)
    assert checkpoint.shape.eos_ids == (0, 2)
    checkpoint.close()


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_a_template_file_wins(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path, tiny_shape())
    write_tokenizer(folder, chat_template="inside")
    text = json.dumps({"chat_template": "beside"}) if name.endswith("json") else "beside"
    (folder / name).write_text(text)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.vocabulary.chat_template == "beside"
    checkpoint.close()


def test_generation_config_is_advice_and_ends(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tiny_shape(), config={"eos_token_id": [5]})
    write_json(folder / "generation_config.json", {"temperature": 0.6, "top_k": 20, "eos_token_id": [7, 5]})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.generation == GenerationDefaults(temperature=0.6, top_k=20)
    assert checkpoint.shape.eos_ids == (7, 5, 2)
    checkpoint.close()


HEADER: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        ({"a": HEADER | {"data_offsets": [0, 16]}}, b"\0" * 8, "where it cannot"),
        ({"a": HEADER | {"data_offsets": [4, 12]}}, b"\0" * 12, "where it cannot"),
        ({"a": HEADER, "b": HEADER}, b"\0" * 8, "where it cannot"),
        ({"a": HEADER | {"data_offsets": [-8, 0]}}, b"\0" * 8, "where it cannot"),
        ({"a": HEADER | {"shape": [3]}}, b"\0" * 8, "does not fill"),
        ({"a": HEADER | {"shape": [2**62, 2**62]}}, b"\0" * 8, "does not fill"),
        ({"a": HEADER | {"dtype": "F8_E4M3"}}, b"\0" * 8, "only F32, F16, BF16"),
        ({"a": HEADER}, b"\0" * 9, "belong to no tensor"),
        ({"a": 5}, b"", "not what safetensors demands"),
        (b"[" * 100_000, b"", "not what safetensors demands"),
        (b"\xff\xfe", b"", "not what safetensors demands"),
        (b"", b"", "not what safetensors demands"),
    ],
)
def test_bad_safetensors_headers(tmp_path: Path, header: object, data: bytes, said: str) -> None:
    folder = write_folder(tmp_path, tiny_shape())
    write_raw_safetensors(folder / "model.safetensors", header, data)
    assert said in refusal(folder).message


def test_a_header_that_claims_to_be_enormous(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tiny_shape())
    for length in (2**63, 99_999_999):
        (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
        assert "model.safetensors: " in refusal(folder).message


def _without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _config_is_a_folder(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _pickled_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_without_tokenizer, "tokenizer.json is missing"),
        (_config_is_a_folder, "config.json: is not a file"),
        (_no_weights, "has neither model.safetensors nor"),
        (_pickled_only, "has neither model.safetensors nor"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: "),
        (lambda folder: (folder / "config.json").write_text("[" * 200_000), "config.json: "),
        (lambda folder: (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": -1}}}'), "go from -1"),
        (lambda folder: (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}}'), "tokenizer.json"),
        (lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"), "is not UTF-8"),
        (lambda folder: (folder / "generation_config.json").write_text('{"temperature": -1}'), "temperature is -1"),
    ],
)
def test_damaged_folders(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    folder = write_folder(tmp_path, tiny_shape())
    damage(folder)
    assert said in refusal(folder).message


def test_what_is_no_model_at_all(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    assert "neither a folder nor a .gguf file" in refusal(tmp_path / "model.bin").message
    assert "does not exist" in refusal(tmp_path / "nothing").message
    assert "has no config.json" in refusal(tmp_path).message
