"""Small random models as transformers makes them and as our loader reads them, and a desk that drives the CUDA runner.

On a CPU the same runner runs over the plain reference of its kernels: slow, but it proves the checks themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor

from headrace.core.config import EngineConfig, TierTargets
from headrace.core.plan import Masks, Plan, SlotStart, StepResult, measure_work
from headrace.core.request import SamplingParams
from headrace.runner.cuda.lane import CudaLane, HostLane
from headrace.runner.cuda.reference_ops import ReferenceOps
from headrace.runner.cuda.runner import CudaRunner
from headrace.runner.cuda.weights import from_checkpoint
from headrace.weights.checkpoint import Checkpoint, open_checkpoint

GREEDY = SamplingParams(temperature=0.0)
VOCAB = 2053
CONTEXT = 2048
EOS = 7
_SIZES = {"num_hidden_layers": 4, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "eos_token_id": EOS}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_NO_WORDS = np.zeros(0, np.int32)
# Checks submit everything at once, and nothing of it may be refused: who would wait longer than a part of its target is.
_PATIENT_S = 1e6


def _sizes(hidden: int, heads: int, kv_heads: int, dim: int, inner: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "intermediate_size": inner,
        **more,
    }


# Heads, key heads and head sizes as the families' real models have them, hidden sizes small.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "Llama",
        _sizes(
            576,
            9,
            3,
            64,
            1536,
            tie_word_embeddings=True,
            rope_parameters={**_LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 256},
        ),
    ),
    "mistral": ("Mistral", _sizes(512, 8, 2, 128, 1792, sliding_window=None)),
    "qwen2": ("Qwen2", _sizes(896, 14, 2, 64, 1216)),
    "qwen3": ("Qwen3", _sizes(512, 16, 8, 128, 1536, tie_word_embeddings=True)),
    # Their matrices are large enough for products of their own.
    "middling": ("Qwen2", _sizes(1024, 16, 8, 64, 2816)),
    "wide": ("Mistral", _sizes(2048, 16, 4, 128, 4608, sliding_window=None)),
    "mixtral": ("Mixtral", _sizes(512, 8, 2, 128, 1024, num_local_experts=8, num_experts_per_tok=2)),
    "qwen3moe": (
        "Qwen3Moe",
        _sizes(512, 16, 4, 128, 1536, moe_intermediate_size=256, num_experts=16, num_experts_per_tok=4)
        | {"norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
}


class Choice(NamedTuple):
    """Another choice of experts: the layer, the place before the end, how near it was in errors, and the logits then."""

    layer: int
    place: int
    margin: float
    logits: Tensor


@dataclass
class Family:
    """`exact` is in float32, `peer` the same weights in bfloat16, `checkpoint` their files."""

    name: str
    exact: Any
    peer: Any
    checkpoint: Checkpoint

    def truth(self, ids: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
        """Logits after the last `count` ids, of the exact model and of its peer."""
        given = torch.tensor([list(ids)], device=self.exact.device)
        with torch.inference_mode():
            exact, peer = (
                network(given, logits_to_keep=count).logits[0].float() for network in (self.exact, self.peer)
            )
        return exact, peer

    def other_choices(self, ids: Sequence[int], near: float) -> list[Choice]:
        """What the exact model says after the last of `ids` if one of them had been given another choice of experts in one
        layer: for each that nearly was, its own being within `near` errors of it, the error being the peer's in that layer,
        at the median of all places. A choice changes what all later tokens see, and they choose by it."""
        given = torch.tensor([list(ids)], device=self.exact.device)
        networks = (self.exact, self.peer)
        routers = [[each for each in network.modules() if hasattr(each, "top_k") and hasattr(each, "num_experts")]
                   for network in networks]  # fmt: skip
        choices = []
        with torch.inference_mode():
            found = [_routed(network, own, given) for network, own in zip(networks, routers, strict=True)]
            for layer, (router, exact, peer) in enumerate(zip(routers[0], *found, strict=True)):
                best, error = exact.topk(router.top_k + 1), (peer - exact).abs().amax(1).median()
                margins = (best.values[:, -2] - best.values[:, -1]) / error
                for place in torch.nonzero(margins <= near).flatten().tolist():
                    weakest, next_one = best.indices[place, -2:].tolist()
                    hook = router.register_forward_hook(partial(_swap, place, weakest, next_one))
                    logits = self.exact(given, logits_to_keep=1).logits[0, -1].float()
                    hook.remove()
                    choices.append(Choice(layer, place - len(ids), float(margins[place]), logits))
        return choices


def _routed(network: Any, routers: list[Any], given: Tensor) -> list[Tensor]:
    """What each layer's router says of every token."""
    said: list[Tensor] = []
    hooks = [each.register_forward_hook(lambda _, __, out: said.append(out[0].float())) for each in routers]
    network(given, logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    return said


def _swap(
    place: int, weakest: int, next_one: int, router: Any, given: Any, out: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The weakest expert that a token chose becomes the one that it nearly chose."""
    logits, scores, chosen = out
    chosen = chosen.clone()
    chosen[place] = torch.where(chosen[place] == weakest, next_one, chosen[place])
    return logits, scores, chosen


def make_family(name: str, folder: Path, device: torch.device) -> Family:
    """Weights are of such a size that some tokens are clearly likelier than others."""
    torch.manual_seed(len(name))
    kind, sizes = FAMILIES[name]
    config = getattr(transformers, f"{kind}Config")(**{**_SIZES, **sizes})
    network = getattr(transformers, f"{kind}ForCausalLM")
    exact = network(config).eval()
    with torch.no_grad():
        for key, parameter in exact.named_parameters():
            if "norm" in key or "bias" in key:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in key else 0.0))
            else:
                parameter.mul_(1.5)
            parameter.copy_(parameter.bfloat16())
    stored = copy.deepcopy(exact).bfloat16().state_dict()
    config.dtype = "bfloat16"
    exact.save_pretrained(folder, state_dict=stored)
    _save_tokenizer(folder)
    peer = network.from_pretrained(folder, dtype=torch.bfloat16).eval().to(device)
    return Family(name, exact.to(device), peer, open_checkpoint(folder))


def _save_tokenizer(folder: Path) -> None:
    """Bytes, so that the folder is a whole model and every command can serve it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def engine_config(family: Family, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {"slots": 40, "blocks": 1500, "max_step_tokens": 1024, **changes}
    return EngineConfig(
        block_size=16,
        context_len=CONTEXT,
        vocab_size=VOCAB,
        eos_ids=(EOS,),
        max_queue_s=_PATIENT_S,
        targets={name: TierTargets(_PATIENT_S, target.itl_s) for name, target in EngineConfig().targets.items()},
        **settings,
    )


def open_runner(
    family: Family,
    config: EngineConfig,
    device: torch.device,
    *,
    graphs: bool = False,
    exact: bool = False,
    clustered: bool = False,
    fp8: bool = False,
    plain: bool = False,
) -> CudaRunner:
    """Under poison: what is nobody's is NaN. `plain`: over the kernels' reference, on the same device. `clustered`: with all
    that clusters can make made by them."""
    shape, lane, ops = family.checkpoint.shape, HostLane(), ReferenceOps()
    if device.type == "cuda":
        from clustered_ops import ClusteredOps

        from headrace.runner.cuda.exact_ops import ExactOps
        from headrace.runner.cuda.triton_ops import TritonOps

        lane = CudaLane()  # type: ignore[assignment]
        if not plain:
            kind = ClusteredOps if clustered else ExactOps if exact else TritonOps
            ops = kind(shape, config.slots, lane.device)  # type: ignore[assignment]
    source = from_checkpoint(family.checkpoint)
    runner = CudaRunner(config, shape, source, ops, lane, fp8=fp8, poison=True, keep_logits=True)
    runner.load()
    if graphs:
        runner.warm_up()
    return runner


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([5, seed]).integers(10, VOCAB, count).tolist()


@dataclass
class Trace:
    """What one sequence was given, what it said, and the logits of each token."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


MaskMaker = Callable[[Plan], Masks | None]


class Desk:
    """Drives a runner through plans of its own: hands out blocks, and gives back those of whoever is replaced."""

    def __init__(self, runner: CudaRunner) -> None:
        self.runner = runner
        self.free = list(range(runner.config.blocks))
        np.random.default_rng(3).shuffle(self.free)
        self.blocks: dict[int, list[int]] = {}
        self.traces: dict[int, Trace] = {}
        self.computed: dict[int, int] = {}
        self.begun: list[SlotStart] = []
        self.freed: list[int] = []
        self.step = 0

    def begin(
        self, slot: int, prompt: list[int], *, shared: Sequence[int] = (), sampling: SamplingParams = GREEDY
    ) -> Trace:
        """A new occupant; `shared` are blocks that hold its first ids already."""
        if slot in self.blocks:
            self.end(slot)
        own = -(-(len(prompt) + 1) // 16) - len(shared)
        self.blocks[slot] = [*shared, *(self.free.pop() for _ in range(own))]
        self.traces[slot] = Trace(prompt)
        self.computed[slot] = 16 * len(shared)
        blocks = tuple(self.blocks[slot])
        start = SlotStart(
            slot, slot, f"r{slot}", tuple(prompt), len(prompt), 16 * len(shared), blocks, sampling, choice=0
        )
        self.begun.append(start)
        return self.traces[slot]

    def end(self, slot: int, keep: int = 0) -> None:
        """The slot's blocks go back, but for the first `keep`, which somebody shares."""
        self.freed += self.blocks[slot][keep:]
        self.free = self.blocks.pop(slot)[keep:] + self.free

    def missing(self, slot: int) -> int:
        trace = self.traces[slot]
        return len(trace.prompt) + len(trace.tokens) - self.computed[slot]

    def advance(self, chunks: dict[int, int], masks: MaskMaker | None = None) -> StepResult:
        """One step: at most so many tokens of each slot."""
        rows, grown = [], []
        for slot, most in chunks.items():
            start, count = self.computed[slot], min(most, self.missing(slot))
            while start + count > 16 * len(self.blocks[slot]):
                self.blocks[slot].append(self.free.pop())
                grown.append((slot, self.blocks[slot][-1]))
            rows.append((slot, start, count, count == self.missing(slot)))
        plan = self._plan(rows, grown)
        self.begun, self.freed, self.step = [], [], self.step + 1
        self.runner.launch(plan)
        self.runner.sample(plan.step, masks(plan) if masks else None)
        result = self.runner.collect()
        for row, (slot, start, count, samples) in enumerate(rows):
            self.computed[slot] = start + count
            if samples and result.tokens[row] >= 0:
                self.traces[slot].tokens.append(int(result.tokens[row]))
                self.traces[slot].logits.append(self.runner.last_logits[row])
        return result

    def generate(self, slot: int, num_tokens: int, chunk: int = 10**6) -> Trace:
        trace = self.traces[slot]
        while len(trace.tokens) < num_tokens:
            assert not self.advance({slot: chunk}).statuses.any()
        return trace

    def _plan(self, rows: list[tuple[int, int, int, bool]], grown: list[tuple[int, int]]) -> Plan:
        slots, starts, counts = (np.array([row[i] for row in rows], np.int32) for i in range(3))
        grown_slots, grown_blocks = (np.array([pair[i] for pair in grown], np.int32) for i in range(2))
        return Plan(
            step=self.step,
            slots=slots,
            starts=starts,
            counts=counts,
            samples=np.array([row[3] for row in rows], np.bool_),
            masked_rows=_NO_WORDS,
            begun=tuple(self.begun),
            grown_slots=grown_slots,
            grown_blocks=grown_blocks,
            freed_blocks=np.array(self.freed, np.int32),
            work=measure_work(starts, counts),
            predicted_s=0.0,
            budget_s=0.0,
        )
