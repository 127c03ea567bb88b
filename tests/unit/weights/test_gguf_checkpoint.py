"""GGUF files: names, order of rows, every quantisation, the vocabulary, and what is refused."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from headrace.core import proc
from headrace.core.errors import InvalidModel
from headrace.weights import weight_file
from headrace.weights.checkpoint import open_checkpoint
from headrace.weights.encodings import GGUF_ENCODINGS
from headrace.weights.layout import tensor_dims
from headrace.weights.shape import ModelShape
from tests.unit.weights.files import PIECES, Tensors, random_tensors, tiny_shape, write_gguf

pytestmark = pytest.mark.unit

Kind = GGMLQuantizationType
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}


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


@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_come_back_in_the_order_of_hugging_face(tmp_path: Path, name: str) -> None:
    shape = tiny_shape(architecture=name, **FAMILIES[name])
    tensors = random_tensors(shape)
    found_shape, found = read_all(write_gguf(tmp_path / "m.gguf", shape, tensors))
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)
    assert all(values.flags.c_contiguous and values.dtype == np.float32 for values in found.values())
    for field in ("architecture", "num_layers", "num_kv_heads", "head_dim", "qkv_bias", "qk_norm", "tied_embeddings"):
        assert getattr(found_shape, field) == getattr(shape, field)


def test_large_tensors_are_read_as_others_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def new_pages(size_bytes: int) -> Any:
        asked.append(size_bytes)
        return proc.new_pages(size_bytes)

    monkeypatch.setattr(weight_file, "_LARGE_BYTES", 1)
    monkeypatch.setattr(weight_file, "new_pages", new_pages)
    tensors = random_tensors(tiny_shape())
    _, found = read_all(write_gguf(tmp_path / "m.gguf", tiny_shape(), tensors))
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)
    assert all(values.flags.c_contiguous and values.flags.writeable for values in found.values())
    # Queries and keys of each layer once more: their rows lie in another order.
    assert len(asked) == len(tensors) + 2 * tiny_shape().num_layers


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_quantised_matrices_are_near_what_they_were(tmp_path: Path, kind: Kind) -> None:
    tensors = random_tensors(tiny_shape())
    _, found = read_all(write_gguf(tmp_path / "m.gguf", tiny_shape(), tensors, kind=kind))
    steps = {Kind.F16: 2**-10, Kind.BF16: 2**-7, Kind.Q8_0: 0.02, Kind.Q5_0: 0.15, Kind.Q5_1: 0.15}
    for name, values in tensors.items():
        assert np.abs(found[name] - values).max() <= steps.get(kind, 0.3) * max(1, np.abs(values).max())
        assert values.ndim == 1 or np.corrcoef(found[name].ravel(), values.ravel())[0, 1] > 0.99


def test_q4_1_by_hand(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_shape())
    _, found = read_all(write_gguf(tmp_path / "m.gguf", tiny_shape(), tensors, kind=Kind.Q4_1))
    block = quantize(tensors["model.embed_tokens.weight"], Kind.Q4_1)[5, :20]
    scale, least = (float(number) for number in block[:4].view("<f2"))
    nibbles = [int(byte) & 15 for byte in block[4:]] + [int(byte) >> 4 for byte in block[4:]]
    expected = np.array([scale * nibble + least for nibble in nibbles], np.float32)
    np.testing.assert_allclose(found["model.embed_tokens.weight"][5, :32], expected, rtol=1e-5, atol=1e-6)


def random_blocks(kind: Kind, rows: int, columns: int) -> NDArray[np.uint8]:
    """Bytes of that kind whose scales are small numbers. Python cannot quantise to these kinds."""
    values, size_bytes = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(int(kind)).integers(0, 256, (rows * columns // values, size_bytes), dtype=np.uint8)
    halves = {
        Kind.Q2_K: (80, 84),
        Kind.Q6_K: (208, 210),
        Kind.Q3_K: (108, 110),
        Kind.IQ4_NL: (0, 2),
        Kind.IQ4_XS: (0, 2),
    }
    start, end = halves.get(kind, (0, 4))
    blocks[:, start:end] = np.full((len(blocks), (end - start) // 2), 0.01, "<f2").view(np.uint8)
    return blocks.reshape(rows, -1)


def write_blocks(path: Path, kind: Kind) -> NDArray[np.uint8]:
    """A model whose head is stored in that kind."""
    shape = tiny_shape(hidden_size=256, num_heads=8, head_dim=32, vocab_size=600)
    blocks = random_blocks(kind, shape.vocab_size, shape.hidden_size)
    tensors = random_tensors(shape)
    del tensors["lm_head.weight"]

    def add_head(writer: GGUFWriter) -> None:
        writer.add_tensor("output.weight", blocks, raw_dtype=kind)

    write_gguf(path, shape, tensors, change=add_head)
    return blocks


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS])
def test_other_quantisations_are_what_the_library_says_row_by_row(tmp_path: Path, kind: Kind) -> None:
    blocks = write_blocks(tmp_path / "m.gguf", kind)
    _, found = read_all(tmp_path / "m.gguf")
    for row in (0, 1, 299, 599):
        assert np.array_equal(found["lm_head.weight"][row], dequantize(blocks[row : row + 1], kind)[0])


def test_q4_k_by_hand(tmp_path: Path) -> None:
    block = write_blocks(tmp_path / "m.gguf", Kind.Q4_K)[7]
    _, found = read_all(tmp_path / "m.gguf")
    scale, least = (float(number) for number in block[:4].view("<f2"))
    packed, nibbles = [int(byte) for byte in block[4:16]], [int(byte) for byte in block[16:]]
    expected = []
    for part in range(8):
        if part < 4:
            factor, offset = packed[part] & 63, packed[part + 4] & 63
        else:
            factor = (packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4
            offset = (packed[part + 4] >> 4) | (packed[part] >> 6) << 4
        chunk = nibbles[part // 2 * 32 : part // 2 * 32 + 32]
        expected += [scale * factor * (byte >> 4 * (part % 2) & 15) - least * offset for byte in chunk]
    np.testing.assert_allclose(found["lm_head.weight"][7], expected, rtol=1e-4, atol=1e-5)


def test_every_encoding_of_the_table_says_its_size() -> None:
    for number, encoding in GGUF_ENCODINGS.items():
        assert (encoding.block_values, encoding.block_bytes) == GGML_QUANT_SIZES[Kind(number)]
        assert len(encoding.decode(np.zeros(3 * encoding.block_bytes, np.uint8))) == 3 * encoding.block_values


def test_a_kind_that_is_not_read_is_named(tmp_path: Path) -> None:
    def add_head(writer: GGUFWriter) -> None:
        writer.add_tensor("extra.weight", np.zeros((4, 54), np.uint8), raw_dtype=Kind.TQ1_0)

    path = write_gguf(tmp_path / "m.gguf", tiny_shape(), change=add_head)
    assert "extra.weight is quantised as TQ1_0" in refusal(path).message


def test_logits_survive_the_way_through_a_file(tmp_path: Path) -> None:
    """A model of transformers, written with permuted rows as llama.cpp does and read again, computes the same."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = tiny_shape(rope_theta=1000.0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=40,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    )
    original = transformers.LlamaForCausalLM(config).eval()
    stored = {name: values.numpy().copy() for name, values in original.state_dict().items()}
    assert {name: values.shape for name, values in stored.items()} == tensor_dims(shape)
    _, found = read_all(write_gguf(tmp_path / "m.gguf", shape, stored))
    again = transformers.LlamaForCausalLM(config).eval()
    again.load_state_dict({name: torch.from_numpy(values) for name, values in found.items()})
    ids = torch.arange(3, 33)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, original(ids).logits)


def test_the_vocabulary_is_carried_whole(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tiny_shape()))
    vocabulary = checkpoint.vocabulary
    assert (vocabulary.model, vocabulary.pre, vocabulary.pieces) == ("gpt2", "smollm", PIECES)
    assert vocabulary.merges == ("a b", "c d") and vocabulary.kinds[:4] == (3, 3, 3, 1)
    assert (vocabulary.bos_token, vocabulary.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert vocabulary.chat_template == "{{ messages }}" and not vocabulary.add_bos
    checkpoint.close()


def test_sentencepiece_vocabularies_have_scores_and_a_first_token(tmp_path: Path) -> None:
    scores = [-float(place) for place in range(len(PIECES))]
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores, "tokenizer.ggml.merges": None}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tiny_shape(), metadata=metadata))
    assert checkpoint.vocabulary.scores == tuple(scores)
    assert checkpoint.vocabulary.add_bos and checkpoint.vocabulary.add_space_prefix
    checkpoint.close()


@pytest.mark.parametrize(
    ("metadata", "ends"),
    [
        ({}, (2, 0)),
        ({"tokenizer.ggml.eos_token_id": 0}, (0, 2)),
        ({"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 8}, (2, 7, 8, 0)),
        ({"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.token_type": [1] * len(PIECES)}, ()),
    ],
)
def test_what_ends_a_generation(tmp_path: Path, metadata: dict[str, Any], ends: tuple[int, ...]) -> None:
    shape, _ = read_all(write_gguf(tmp_path / "m.gguf", tiny_shape(), metadata=metadata))
    assert shape.eos_ids == ends


def test_rope_factors_are_carried_in_the_shape(tmp_path: Path) -> None:
    factors = np.array([1, 1, 1, 2, 4, 8, 8, 8], np.float32)
    path = write_gguf(tmp_path / "m.gguf", tiny_shape(), extra={"rope_freqs.weight": factors})
    shape, found = read_all(path)
    assert shape.rope_factors == tuple(factors.tolist())
    assert "rope_freqs.weight" not in found


def test_a_file_without_a_head_is_tied(tmp_path: Path) -> None:
    shape = tiny_shape(tied_embeddings=True)
    assert read_all(write_gguf(tmp_path / "m.gguf", shape))[0].tied_embeddings


def test_padding_rows_of_the_embeddings_are_kept(tmp_path: Path) -> None:
    shape, _ = read_all(write_gguf(tmp_path / "m.gguf", tiny_shape(vocab_size=64)))
    assert shape.vocab_size == 64


def test_the_file_is_hashed_while_it_is_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_shape(), kind=Kind.Q8_0)
    checkpoint = open_checkpoint(path)
    assert len(list(checkpoint.tensors())) > 0
    assert checkpoint.digest() == {"m.gguf": hashlib.sha256(path.read_bytes()).hexdigest()}
    checkpoint.close()


@pytest.mark.parametrize(
    ("metadata", "param"),
    [
        ({"llama.block_count": 10**6}, "num_layers"),
        ({"llama.block_count": 3}, "model.layers.2.input_layernorm.weight"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.block_count": "two"}, "llama.block_count"),
        ({"llama.embedding_length": 128}, "model.embed_tokens.weight"),
        ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count"),
        ({"llama.attention.head_count": 0, "llama.attention.key_length": None}, "llama.attention.head_count"),
        ({"llama.attention.head_count_kv": 3}, "num_kv_heads"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "rms_eps"),
        ({"llama.rope.freq_base": float("inf")}, "rope_theta"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type"),
        ({"llama.rope.scale_linear": 2.0}, "llama.rope.scale_linear"),
        ({"llama.expert_count": 8}, "llama.expert_used_count"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.token_type": [9] * len(PIECES)}, "tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.eos_token_id": 31}, "tokenizer.ggml.eos_token_id"),
        ({"tokenizer.ggml.tokens": ["a"] * 41, "tokenizer.ggml.token_type": [1] * 41}, "tokenizer.ggml.tokens"),
    ],
)
def test_refusals_name_the_key(tmp_path: Path, metadata: dict[str, Any], param: str) -> None:
    assert refusal(write_gguf(tmp_path / "m.gguf", tiny_shape(), metadata=metadata)).param == param


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    error = refusal(write_gguf(tmp_path / "m.gguf", tiny_shape(architecture="mamba")))
    assert "architecture mamba is not one of llama, qwen2, qwen3" in error.message


def test_a_window_ends_the_context(tmp_path: Path) -> None:
    metadata = {"llama.attention.sliding_window": 48}
    assert read_all(write_gguf(tmp_path / "m.gguf", tiny_shape(), metadata=metadata))[0].context_len == 48


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_shape(), extra={"blk.0.attn_sinks.weight": np.ones(32, np.float32)})
    assert "blk.0.attn_sinks.weight has no place" in refusal(path).message


def test_a_bias_that_only_one_layer_lacks_is_missed(tmp_path: Path) -> None:
    shape = tiny_shape(architecture="qwen2", qkv_bias=True)
    tensors = random_tensors(shape)
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    assert refusal(write_gguf(tmp_path / "m.gguf", shape, tensors)).param == "model.layers.1.self_attn.k_proj.bias"
