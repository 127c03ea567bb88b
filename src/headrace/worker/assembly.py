"""A runner and its engine's configuration from a checkpoint: kernels chosen, weights packed, memory planned, steps timed.

Owns the order of these and the record of what was decided. Torch is imported here only when a model is loaded.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from headrace.core.config import EngineConfig
from headrace.core.errors import InvalidInput
from headrace.weights.checkpoint import Checkpoint, Progress
from headrace.weights.layout import num_parameters
from headrace.worker.warmup import measure_profile

if TYPE_CHECKING:
    from headrace.runner.torch.memory import MemoryPlan
    from headrace.runner.torch.probe import Choice
    from headrace.runner.torch.runner import TorchRunner


class LoadSettings(Struct, frozen=True):
    """What an operator may say about loading. None and 0 leave it to the model and the machine."""

    dtype: str = "auto"
    slots: int = 32
    context_len: int | None = None
    # Most tokens that KV memory is taken for.
    kv_tokens: int | None = None
    block_size: int = 16
    # A step is bounded by its time; this bounds its memory.
    max_step_tokens: int = 256
    threads: int = 0


@dataclass(slots=True)
class LoadedModel:
    runner: "TorchRunner"
    config: EngineConfig
    memory: "MemoryPlan"
    choice: "Choice"


def load_model(checkpoint: Checkpoint, settings: LoadSettings, progress: Progress | None = None) -> LoadedModel:
    """Raises InvalidModel for files that are no model, ModelTooLarge when it does not fit; nothing is kept then."""
    loaded = load_weights(checkpoint, settings, progress)
    loaded.config = replace(loaded.config, profile=measure_profile(loaded.runner, loaded.config))
    return loaded


def load_weights(checkpoint: Checkpoint, settings: LoadSettings, progress: Progress | None = None) -> LoadedModel:
    """`load_model` without timing its steps: the profile is a guess."""
    from headrace.runner.torch.probe import choose
    from headrace.runner.torch.runner import TorchRunner

    config = engine_config(checkpoint, settings)
    choice = choose(checkpoint.shape, settings.dtype, stored_bits=stored_bits(checkpoint))
    runner = TorchRunner(
        config,
        checkpoint,
        choice.recipe,
        cuts=choice.cuts,
        threads=settings.threads or None,
        progress=progress,
    )
    memory = runner.fit()
    return LoadedModel(runner, replace(config, blocks=memory.blocks), memory, choice)


def stored_bits(checkpoint: Checkpoint) -> float:
    """Bits of a weight as the files hold it, scales and all else included."""
    return 8.0 * checkpoint.size_bytes / num_parameters(checkpoint.shape)


def engine_config(checkpoint: Checkpoint, settings: LoadSettings) -> EngineConfig:
    """Sizes from the model; `blocks` is the most that could be used and shrinks to what memory holds."""
    shape = checkpoint.shape
    context_len = settings.context_len or shape.context_len
    if not 2 <= context_len <= shape.context_len:
        raise InvalidInput(f"the context must be from 2 to the model's {shape.context_len} tokens", param="context_len")
    tokens = min(settings.kv_tokens or settings.slots * context_len, settings.slots * context_len)
    return EngineConfig(
        slots=settings.slots,
        blocks=max(1, -(-tokens // settings.block_size)),
        block_size=settings.block_size,
        context_len=context_len,
        vocab_size=shape.vocab_size,
        eos_ids=shape.eos_ids,
        max_step_tokens=max(settings.max_step_tokens, settings.slots),
    )
