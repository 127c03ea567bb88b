"""Small random models for the torch runner's tests: transformers' weights behind the Checkpoint protocol.

`Desk` drives a runner through real plans: it hands out blocks, chunks prompts and keeps every logit.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.config import EngineConfig
from headrace.core.plan import Plan, SlotStart, StepResult
from headrace.core.request import SamplingParams
from headrace.runner.torch.attention import CUTS, Cuts
from headrace.runner.torch.kernels import KERNELS
from headrace.runner.torch.packing import Recipe
from headrace.runner.torch.runner import TorchRunner
from headrace.weights.checkpoint import Checkpoint
from headrace.weights.encodings import F32
from headrace.weights.generation import GenerationDefaults
from headrace.weights.pouring import OpenTap
from headrace.weights.shape import ExpertShape, ModelShape, RopeScaling
from headrace.weights.vocabulary import Vocabulary
from headrace.weights.weight_file import StoredTensor
from tests.unit.runner.plans import plan

# The quick kernels for integers that this processor has.
QUICK = tuple(KERNELS)[:-1]
GREEDY = SamplingParams(temperature=0.0)

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 160, "max_position_embeddings": 2048}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

_QWEN3_MOE = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 7,
    "num_experts_per_tok": 3,
}


class TensorCheckpoint:
    """A model's state as the weights package would read it from files."""

    def __init__(self, shape: ModelShape, tensors: dict[str, Tensor]) -> None:
        self.shape = shape
        self.vocabulary = Vocabulary()
        self.generation = GenerationDefaults()
        self.path = Path("random")
        self.size_bytes = 0
        self.state = tensors

    def tensors(self, progress: Any = None) -> Iterator[tuple[str, NDArray[np.float32]]]:
        for name, tensor in self.state.items():
            yield name, np.array(tensor.numpy(), np.float32)

    def pour(self, open_tap: OpenTap, progress: Any = None) -> None:
        with open_tap() as tap:
            for name, values in self.tensors():
                stored, raw = StoredTensor(name, values.shape, F32, 0, values.nbytes), values.tobytes()
                for start in range(0, len(raw), 1 << 20):
                    part = raw[start : start + (1 << 20)]
                    room = tap.lend()[: len(part)]
                    room[:] = part
                    tap.take(stored, start, room)

    def hash_ahead(self) -> None: ...

    def digest(self) -> dict[str, str]:
        return {"random": "0"}

    def close(self) -> None: ...


def model(family: str) -> tuple[torch.nn.Module, TensorCheckpoint]:
    """A random model of this family, as transformers has it and as a checkpoint."""
    import transformers  # here: it takes as long to import as everything else together

    torch.manual_seed(len(family))
    makers: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama2": (
            transformers.LlamaForCausalLM,
            transformers.LlamaConfig,
            {"num_attention_heads": 4, "intermediate_size": 96},
        ),
        "llama3": (
            transformers.LlamaForCausalLM,
            transformers.LlamaConfig,
            {
                "hidden_size": 96,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "intermediate_size": 128,
                "rope_parameters": {**_LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 64},
                "tie_word_embeddings": True,
            },
        ),
        "mistral": (
            transformers.MistralForCausalLM,
            transformers.MistralConfig,
            {
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "intermediate_size": 160,
                "sliding_window": None,
            },
        ),
        "qwen2": (
            transformers.Qwen2ForCausalLM,
            transformers.Qwen2Config,
            {"num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 128},
        ),
        "qwen3": (
            transformers.Qwen3ForCausalLM,
            transformers.Qwen3Config,
            {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128},
        ),
        "mixtral": (
            transformers.MixtralForCausalLM,
            transformers.MixtralConfig,
            {
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 96,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
            },
        ),
        "qwen3moe": (
            transformers.Qwen3MoeForCausalLM,
            transformers.Qwen3MoeConfig,
            {**_QWEN3_MOE, "mlp_only_layers": [1]},
        ),
        "qwen3moe, normed": (
            transformers.Qwen3MoeForCausalLM,
            transformers.Qwen3MoeConfig,
            {**_QWEN3_MOE, "decoder_sparse_step": 2, "norm_topk_prob": True},
        ),
    }
    network, config_class, sizes = makers[family]
    config = config_class(**{**_SIZES, **sizes})
    made = network(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in name else 0.0))
            else:
                parameter.mul_(4.0)
    return made, TensorCheckpoint(_shape(family, config), _by_expert(made.state_dict()))


def _by_expert(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers stacks experts when it loads them; files and we have them one by one. The memory stays theirs."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        prefix, stacked, part = name.rpartition(".experts.")
        if not stacked:
            found[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            pieces = weight.chunk(len(names))
            found |= {f"{prefix}.experts.{expert}.{n}.weight": w for n, w in zip(names, pieces, strict=True)}
    return found


def _experts(family: str, config: Any) -> ExpertShape | None:
    if family == "mixtral":
        return ExpertShape(config.num_local_experts, config.num_experts_per_tok, config.intermediate_size)
    if not family.startswith("qwen3moe"):
        return None
    return ExpertShape(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        config.norm_topk_prob,
        dense_layers=(1,) if config.mlp_only_layers else (0, 2),
    )


def _shape(family: str, config: Any) -> ModelShape:
    rope = config.rope_parameters
    scaling = None
    if rope.get("rope_type") == "llama3":
        scaling = RopeScaling(
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        )
    return ModelShape(
        architecture=family,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        context_len=config.max_position_embeddings,
        rms_eps=config.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        rope_scaling=scaling,
        qkv_bias=family == "qwen2",
        qk_norm=family.startswith("qwen3"),
        tied_embeddings=config.tie_word_embeddings,
        experts=_experts(family, config),
    )


def ids(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([5, seed]).integers(1, 150, count).tolist())


class Desk:
    """A loaded runner under poison, and the blocks it has left. `logits[slot]` lists a slot's logits as they came."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: Recipe,
        *,
        slots: int = 33,
        blocks: int = 400,
        cuts: Cuts = CUTS[0],
        context_len: int = 1024,
    ) -> None:
        self.config = EngineConfig(
            slots=slots,
            blocks=blocks,
            block_size=16,
            context_len=context_len,
            vocab_size=checkpoint.shape.vocab_size,
            eos_ids=(0,),
            max_step_tokens=2048,
        )
        self.runner = TorchRunner(self.config, checkpoint, recipe, cuts=cuts, poison=True, keep_logits=True)
        self.runner.load()
        self.free = list(range(blocks))
        np.random.default_rng(3).shuffle(self.free)
        self.logits: dict[int, list[Tensor]] = {}
        self.blocks: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.begun: list[SlotStart] = []
        self.freed: list[int] = []
        self.step = 0

    def begin(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        shared: Sequence[int] = (),
        sampling: SamplingParams = GREEDY,
        num_prompt: int | None = None,
    ) -> None:
        """A new occupant; `shared` are blocks that hold its first ids already."""
        own = -(-(len(tokens) + 1) // 16) - len(shared)
        self.blocks[slot] = [*shared, *(self.free.pop() for _ in range(own))]
        self.logits[slot], self.lengths[slot], self.computed[slot] = [], len(tokens), 16 * len(shared)
        count = len(tokens) if num_prompt is None else num_prompt
        self.begun.append(
            SlotStart(
                slot, slot, f"r{slot}", tuple(tokens), count, 16 * len(shared), tuple(self.blocks[slot]), sampling, 0
            )
        )

    def end(self, slot: int, *, keep: int = 0) -> None:
        """The slot's blocks go back, but for the first `keep`, which somebody shares."""
        self.freed += self.blocks[slot][keep:]
        self.free = self.blocks.pop(slot)[keep:] + self.free

    def advance(self, chunks: dict[int, int]) -> StepResult:
        """One step: so many tokens of each slot."""
        rows, grown = [], []
        for slot, count in chunks.items():
            start, count = self.computed[slot], min(count, self.lengths[slot] - self.computed[slot])
            while start + count > 16 * len(self.blocks[slot]):
                self.blocks[slot].append(self.free.pop())
                grown.append((slot, self.blocks[slot][-1]))
            rows.append((slot, start, count, start + count == self.lengths[slot]))
        made = plan(self.step, rows, begun=self.begun, grown=grown, freed=self.freed)
        self.begun, self.freed, self.step = [], [], self.step + 1
        result = self.run(made)
        for row, (slot, start, count, samples) in enumerate(rows):
            self.computed[slot] = start + count
            if samples and result.tokens[row] >= 0:
                self.lengths[slot] += 1
                self.logits[slot].append(self.runner.last_logits[row])
        return result

    def run(self, made: Plan) -> StepResult:
        self.runner.launch(made)
        self.runner.sample(made.step, None)
        return self.runner.collect()

    def prefill(self, slot: int, chunk: int = 10**6) -> int:
        """All that is missing of the slot's ids; returns the token that follows."""
        while True:
            result = self.advance({slot: chunk})
            assert not result.statuses.any()
            if self.computed[slot] == self.lengths[slot] - 1 and result.tokens[0] >= 0:
                return int(result.tokens[0])

    def generate(self, slot: int, num_tokens: int, chunk: int = 10**6) -> list[int]:
        tokens = [self.prefill(slot, chunk)]
        while len(tokens) < num_tokens:
            tokens.append(int(self.advance({slot: 1}).tokens[0]))
        return tokens


def same_bits(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    assert len(some) == len(others) and len(some) > 0
    return all(
        torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in zip(some, others, strict=True)
    )
