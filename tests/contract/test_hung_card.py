"""A kernel that never ends, on the CUDA runner: its thread waits for the card for ever, and another one ends the worker."""

import asyncio
import threading

from headrace.core.config import EngineConfig
from headrace.runner.cuda.lane import HostLane, Mark
from headrace.transport.memory import MemoryNetwork
from headrace.worker.host import EXIT_HUNG
from headrace.worker.mounting import MountedModel
from tests.builders import part, request
from tests.unit.runner.cuda.cuda_rig import cuda_runner
from tests.unit.runner.torch.model_rig import TensorCheckpoint, ids, model
from tests.unit.worker.rig import Ear, fake_host, ready, replicas_of


class StuckLane(HostLane):
    """Once `is_stuck`, the device comes to no mark before it is `freed`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stuck = False
        self.freed = threading.Event()
        self.waiting: list[str] = []

    def mark(self) -> Mark:
        return _StuckMark(self, super().mark())


class _StuckMark:
    def __init__(self, lane: StuckLane, mark: Mark) -> None:
        self._lane = lane
        self._mark = mark

    def put(self) -> None:
        self._mark.put()

    def wait(self) -> None:
        if self._lane.is_stuck:
            self._lane.waiting.append(threading.current_thread().name)
            self._lane.freed.wait()

    def seconds_since(self, earlier: "_StuckMark") -> float:
        return self._mark.seconds_since(earlier._mark)


def test_a_kernel_that_never_ends_ends_the_worker_with_seventy() -> None:
    lane, checkpoint = StuckLane(), model("llama3")[1]
    codes: list[tuple[int, str]] = []

    def die(code: int) -> None:
        """As the process would: whoever waits for the card goes too."""
        codes.append((code, threading.current_thread().name))
        lane.is_stuck = False
        lane.freed.set()

    async def story() -> None:
        network, ear = MemoryNetwork(), Ear()
        host = fake_host(network, mount=lambda _: _mounted(checkpoint, lane), die=die)
        replicas = replicas_of(network, ear)
        await replicas.start()
        async with host.embedded():
            replica = await ready(replicas, ear)
            replica.submit(part(1, request("a", ids=ids(8), max_tokens=4)))
            await ear.all_over([1])
            assert not codes and len(ear.tokens[1]) == 4
            lane.is_stuck = True
            replica.submit(part(2, request("b", ids=ids(8), max_tokens=4)))
            await ear.all_over([2])
        await replicas.close()

    asyncio.run(story())
    ((code, thread),) = codes
    assert code == EXIT_HUNG and thread not in lane.waiting


def _mounted(checkpoint: TensorCheckpoint, lane: HostLane) -> MountedModel:
    config = EngineConfig(
        slots=4, blocks=32, context_len=128, vocab_size=checkpoint.shape.vocab_size, eos_ids=(0,), max_step_tokens=64
    )
    runner = cuda_runner(config, checkpoint, lane=lane, keep_logits=False)
    runner.load()
    return MountedModel(runner, config, version="v", fingerprint="f", is_measured=True)
