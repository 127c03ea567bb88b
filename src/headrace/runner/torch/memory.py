"""What the weights and the largest step take of a machine's memory, and how many KV blocks are left.

Owns the arithmetic and its sentences; allocates nothing.
"""

from msgspec import Struct

from headrace.core.errors import ModelTooLarge
from headrace.runner.torch.attention import MAX_GATHERED
from headrace.runner.torch.kv_cache import block_bytes
from headrace.weights.shape import ModelShape

# Of what is free; the rest is for other processes and for what the allocator does not give back.
DEFAULT_SHARE = 0.8
# A model that cannot hold one sequence of this length is not worth starting.
_LEAST_CONTEXT = 2048
_MIB = 1 << 20


class MemoryPlan(Struct, frozen=True):
    """All in bytes but blocks, of which there are at most `max_blocks`. `free_bytes` was measured with the weights in place."""

    free_bytes: int
    share: float
    weights_bytes: int
    workspace_bytes: int
    block_bytes: int
    block_size: int
    blocks: int
    max_blocks: int

    @property
    def kv_bytes(self) -> int:
        return self.blocks * self.block_bytes

    def sentences(self) -> tuple[str, ...]:
        return (
            f"weights take {_mib(self.weights_bytes)}; {_mib(self.free_bytes)} are free beside them",
            f"of these {self.share:.0%} may be used, less {_mib(self.workspace_bytes)} for the largest step",
            self.kv_sentence(),
        )

    def kv_sentence(self) -> str:
        capped = ", the most that the settings allow" if self.blocks == self.max_blocks else ""
        return (
            f"KV: {_mib(self.kv_bytes)} / {self.block_bytes // self.block_size:,} bytes per token"
            f" = {self.blocks * self.block_size:,} tokens in {self.blocks:,} blocks of {self.block_size}{capped}"
        )


def workspace_bytes(shape: ModelShape, max_step_tokens: int, slots: int) -> int:
    """What the largest step holds at once, from the sizes of its tensors: activations, logits, gathered keys and values."""
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    per_token = 4 * (6 * shape.hidden_size + 6 * heads + 10 * shape.inner_sizes[0])
    if shape.experts is not None:
        # One expert at a time, perhaps with all rows; their copy, what it gives and the total; scores and their order.
        per_token += 4 * (4 * shape.hidden_size + 8 * shape.experts.num_experts)
    per_row = 4 * 6 * shape.vocab_size
    gathered = 4 * 2 * MAX_GATHERED * shape.num_kv_heads * shape.head_dim
    return max_step_tokens * per_token + slots * per_row + gathered


def plan_memory(
    shape: ModelShape,
    *,
    block_size: int,
    context_len: int,
    max_blocks: int,
    free_bytes: int,
    weights_bytes: int,
    workspace_bytes: int,
    share: float = DEFAULT_SHARE,
) -> MemoryPlan:
    """As many blocks as fit, at most `max_blocks`; refuses when not even one sequence would."""
    each = block_bytes(shape, block_size)
    usable = int(free_bytes * share) - workspace_bytes
    blocks = min(max_blocks, max(0, usable) // each)
    least = -(-min(_LEAST_CONTEXT, context_len) // block_size)
    if blocks < min(least, max_blocks):
        raise ModelTooLarge(
            f"one sequence of {min(_LEAST_CONTEXT, context_len)} tokens needs {_mib(least * each)} of KV memory, and"
            f" {_mib(max(0, usable))} are left beside {_mib(weights_bytes)} of weights and {_mib(workspace_bytes)}"
            f" for a step"
        )
    return MemoryPlan(free_bytes, share, weights_bytes, workspace_bytes, each, block_size, blocks, max_blocks)


def check_weights_fit(needed_bytes: int, free_bytes: int) -> None:
    """Before anything is read."""
    if needed_bytes > free_bytes:
        raise ModelTooLarge(f"the weights take {_mib(needed_bytes)} and {_mib(free_bytes)} of memory are free")


def _mib(count: int) -> str:
    return f"{count / _MIB:,.0f} MiB"
