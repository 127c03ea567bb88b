"""The CUDA runner on a CPU: the same runner over the plain reference of its kernels, in float32, without graphs."""

from collections.abc import Callable

import numpy as np
import torch

from headrace.core.config import EngineConfig
from headrace.core.plan import SlotStart
from headrace.runner.cuda.lane import HostLane, Lane
from headrace.runner.cuda.ops import Ops
from headrace.runner.cuda.reference_ops import ReferenceOps
from headrace.runner.cuda.runner import CudaRunner
from headrace.runner.cuda.weights import from_checkpoint
from headrace.weights.shape import ModelShape
from tests.unit.runner.torch.model_rig import Desk, TensorCheckpoint

MakeOps = Callable[[ModelShape, int, torch.device], Ops]


class CudaDesk(Desk):
    """A loaded runner under poison, as `Desk` drives it."""

    def __init__(
        self,
        checkpoint: TensorCheckpoint,
        *,
        slots: int = 9,
        blocks: int = 200,
        context_len: int = 1024,
        max_step_tokens: int = 256,
        ops: MakeOps | None = None,
        fp8: bool = False,
    ) -> None:
        self.config = EngineConfig(
            slots=slots,
            blocks=blocks,
            block_size=16,
            context_len=context_len,
            vocab_size=checkpoint.shape.vocab_size,
            eos_ids=(0,),
            max_step_tokens=max_step_tokens,
        )
        self.runner = cuda_runner(self.config, checkpoint, ops, fp8=fp8)  # type: ignore[assignment]
        self.runner.load()
        self.free = list(range(blocks))
        np.random.default_rng(3).shuffle(self.free)
        self.logits = {}
        self.blocks = {}
        self.lengths = {}
        self.computed = {}
        self.begun: list[SlotStart] = []
        self.freed = []
        self.step = 0


def cuda_runner(
    config: EngineConfig,
    checkpoint: TensorCheckpoint,
    ops: MakeOps | None = None,
    *,
    lane: Lane | None = None,
    fp8: bool = False,
    keep_logits: bool = True,
) -> CudaRunner:
    """Over the reference, unless other operations are given."""
    lane = HostLane() if lane is None else lane
    return CudaRunner(
        config,
        checkpoint.shape,
        from_checkpoint(checkpoint),
        ReferenceOps() if ops is None else ops(checkpoint.shape, config.slots, lane.device),
        lane,
        dtype=torch.float32,
        fp8=fp8,
        digest=checkpoint.digest,
        poison=True,
        keep_logits=keep_logits,
    )
