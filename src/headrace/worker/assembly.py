"""A runner and its engine's configuration from a checkpoint: device and kernels chosen, weights packed, memory planned,
steps timed.

Owns the order of these and the record of what was decided. Torch is imported here only when a model is loaded.
"""

from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct
from msgspec.structs import replace

from headrace.core.config import EngineConfig
from headrace.core.errors import InvalidInput
from headrace.core.ports import Runner
from headrace.runner.torch.threads import take_threads
from headrace.weights.checkpoint import Checkpoint, Progress
from headrace.weights.layout import num_parameters
from headrace.worker.warmup import CARD_SCENES, SCENES, Scenes, measure_profile

if TYPE_CHECKING:
    from headrace.runner.cuda.compilers import Compilers
    from headrace.runner.torch.memory import MemoryPlan

# A step is bounded by its time; these bound its memory.
_STEP_TOKENS = {"cpu": 256, "cuda": 8192}
# Prompts share whole blocks: a processor, which computes a token in milliseconds, wants them short.
_BLOCK_TOKENS = {"cpu": 8, "cuda": 16}


class LoadSettings(Struct, frozen=True):
    """What an operator may say about loading. None and 0 leave it to the model and the machine."""

    device: str = "auto"
    dtype: str = "auto"
    slots: int = 32
    context_len: int | None = None
    # Most tokens that KV memory is taken for.
    kv_tokens: int | None = None
    block_size: int = 0
    max_step_tokens: int = 0
    threads: int = 0
    # A row's bits must depend on its own sequence alone.
    deterministic: bool = False
    # Which of the machine's cards; counted around.
    card: int = 0


class ModelRunner(Runner, Protocol):
    """A runner of real weights."""

    @property
    def fingerprint(self) -> str: ...


@dataclass(slots=True)
class LoadedModel:
    """`notes` say in words what was decided, `scenes` what to time it by. `device_id` is the card's own, where it is on
    one."""

    runner: ModelRunner
    config: EngineConfig
    memory: "MemoryPlan"
    device: str
    dtype: str
    notes: tuple[str, ...]
    scenes: Scenes
    device_id: str = ""


def load_model(checkpoint: Checkpoint, settings: LoadSettings, progress: Progress | None = None) -> LoadedModel:
    """Raises InvalidModel for files that are no model, ModelTooLarge when it does not fit; nothing is kept then."""
    loaded = load_weights(checkpoint, settings, progress)
    loaded.config = replace(loaded.config, profile=measure_profile(loaded.runner, loaded.config, loaded.scenes))
    return loaded


def load_weights(checkpoint: Checkpoint, settings: LoadSettings, progress: Progress | None = None) -> LoadedModel:
    """`load_model` without timing its steps: the profile is a guess."""
    from headrace.runner.cuda.compilers import Compilers
    from headrace.runner.cuda.presence import WokenCard, choose_device, look_for_card, may_take_card

    with ExitStack() as stack:
        compilers = None
        if may_take_card(settings.device, settings.dtype, checkpoint.shape):
            # What a card then reads it reads faster than it could be hashed; torch is imported meanwhile.
            checkpoint.hash_ahead()
            compilers = stack.enter_context(closing(Compilers()))
            stack.enter_context(closing(WokenCard(settings.card)))
        look = look_for_card()
        device = choose_device(settings.device, settings.dtype, checkpoint.shape, look)
        config = engine_config(checkpoint, settings, device)
        take_threads(settings.threads)
        if device == "cuda":
            return _load_on_card(checkpoint, settings, config, look.words, progress, compilers)
        stack.close()
        return _load_on_cpu(checkpoint, settings, config, progress)


def _load_on_cpu(
    checkpoint: Checkpoint, settings: LoadSettings, config: EngineConfig, progress: Progress | None
) -> LoadedModel:
    from headrace.runner.torch.probe import choose
    from headrace.runner.torch.runner import TorchRunner

    choice = choose(checkpoint.shape, settings.dtype, stored_bits=stored_bits(checkpoint), brief=True)
    if settings.deterministic and not choice.row_exact:
        raise InvalidInput(f"{choice.recipe.dtype} is not row-exact on this processor", param="deterministic")
    runner = TorchRunner(config, checkpoint, choice.recipe, cuts=choice.cuts, progress=progress)
    memory = runner.fit()
    notes = (*choice.reasons, *memory.sentences())
    config = replace(config, blocks=memory.blocks)
    return LoadedModel(runner, config, memory, "cpu", choice.recipe.dtype, notes, SCENES)


def _load_on_card(
    checkpoint: Checkpoint,
    settings: LoadSettings,
    config: EngineConfig,
    card: str,
    progress: Progress | None,
    compilers: "Compilers | None",
) -> LoadedModel:
    """With its graphs captured: a step that meets one it lacks would be late."""
    import torch

    from headrace.runner.cuda.exact_ops import ExactOps
    from headrace.runner.cuda.lane import CudaLane
    from headrace.runner.cuda.runner import CudaRunner
    from headrace.runner.cuda.triton_ops import TritonOps
    from headrace.runner.cuda.weights import from_checkpoint

    lane = CudaLane(settings.card % torch.cuda.device_count())
    shape = checkpoint.shape
    ops = (ExactOps if settings.deterministic else TritonOps)(shape, config.slots, lane.device, compilers)
    source, dtype = from_checkpoint(checkpoint, progress), "fp8" if settings.dtype == "fp8" else "bf16"
    runner = CudaRunner(config, shape, source, ops, lane, fp8=dtype == "fp8", digest=checkpoint.digest)
    try:
        memory = runner.fit()
        runner.warm_up()
    except BaseException:
        runner.close()
        raise
    exact = "rows are exact: alone or in any batch, the same bits" if ops.row_exact else "rows may differ in last bits"
    notes = (f"{dtype} on {card}; {exact}", *runner.notes, f"{runner.num_graphs} graphs of steps")
    device_id = f"GPU-{torch.cuda.get_device_properties(lane.device).uuid}"
    return LoadedModel(runner, runner.config, memory, "cuda", dtype, notes, CARD_SCENES, device_id)


def stored_bits(checkpoint: Checkpoint) -> float:
    """Bits of a weight as the files hold it, scales and all else included."""
    return 8.0 * checkpoint.size_bytes / num_parameters(checkpoint.shape)


def engine_config(checkpoint: Checkpoint, settings: LoadSettings, device: str = "cpu") -> EngineConfig:
    """Sizes from the model; `blocks` is the most that could be used and shrinks to what memory holds."""
    shape = checkpoint.shape
    context_len = settings.context_len or shape.context_len
    if not 2 <= context_len <= shape.context_len:
        raise InvalidInput(f"the context must be from 2 to the model's {shape.context_len} tokens", param="context_len")
    tokens = min(settings.kv_tokens or settings.slots * context_len, settings.slots * context_len)
    block_size = settings.block_size or _BLOCK_TOKENS[device]
    return EngineConfig(
        slots=settings.slots,
        blocks=max(1, -(-tokens // block_size)),
        block_size=block_size,
        context_len=context_len,
        vocab_size=shape.vocab_size,
        eos_ids=shape.eos_ids,
        max_step_tokens=max(settings.max_step_tokens or _STEP_TOKENS[device], settings.slots),
    )
