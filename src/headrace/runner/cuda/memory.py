"""How many KV blocks a card has room for beside weights, workspace and graphs. Arithmetic only; allocates nothing."""

import torch

from headrace.core.config import EngineConfig
from headrace.core.errors import ModelTooLarge
from headrace.runner.cuda.kv_pool import block_bytes
from headrace.runner.cuda.odd_space import odd_bytes
from headrace.runner.cuda.prompt_scores import prompt_bytes
from headrace.runner.torch.memory import MemoryPlan
from headrace.weights.shape import ModelShape

# Of what is free; the rest is for other processes on the card and for the allocator's own.
DEFAULT_SHARE = 0.92
# What a captured graph keeps: its nodes, and the library's memory for its products.
GRAPH_BYTES = 24 << 20
# A model that cannot hold one sequence of this length is not worth starting.
_LEAST_CONTEXT = 2048
_MIB = 1 << 20


def look_bytes(config: EngineConfig) -> int:
    """The most that requests take, whatever they ask for, beside their blocks and the graphs."""
    return odd_bytes(config) + prompt_bytes(config)


def plan_blocks(
    shape: ModelShape,
    config: EngineConfig,
    dtype: torch.dtype,
    *,
    free_bytes: int,
    weights_bytes: int,
    workspace_bytes: int,
    num_graphs: int,
    share: float = DEFAULT_SHARE,
) -> MemoryPlan:
    """At most `config.blocks`. `free_bytes` was measured with weights and workspace in place; graphs are still to come, and
    so are the first requests that ask for more than a graph does."""
    each = block_bytes(shape, config.block_size, dtype)
    to_come = num_graphs * GRAPH_BYTES + look_bytes(config)
    usable = max(0, int(free_bytes * share) - to_come)
    blocks = min(config.blocks, usable // each)
    tokens = min(_LEAST_CONTEXT, config.context_len)
    least = -(-tokens // config.block_size)
    if blocks < min(least, config.blocks):
        raise ModelTooLarge(
            f"one sequence of {tokens} tokens needs {least * each / _MIB:,.0f} MiB of KV memory, and"
            f" {usable / _MIB:,.0f} MiB are left on the card beside {weights_bytes / _MIB:,.0f} MiB of weights,"
            f" {workspace_bytes / _MIB:,.0f} MiB for a step and {to_come / _MIB:,.0f} MiB for graphs and sampling"
        )
    return MemoryPlan(free_bytes, share, weights_bytes, to_come, each, config.block_size, blocks, config.blocks)


def sentences(plan: MemoryPlan, workspace_bytes: int) -> tuple[str, ...]:
    """The arithmetic in words."""
    return (
        f"weights take {plan.weights_bytes / _MIB:,.0f} MiB and the largest step {workspace_bytes / _MIB:,.0f} MiB;"
        f" {plan.free_bytes / _MIB:,.0f} MiB are free beside them",
        f"of these {plan.share:.0%} may be used, less {plan.workspace_bytes / _MIB:,.0f} MiB for graphs and sampling",
        plan.kv_sentence(),
    )
