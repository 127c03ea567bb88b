"""A worker over the fake in this process, and a gateway's ear: everything that reached it, by key."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from headrace.cluster.replica import Replica
from headrace.cluster.replicas import Replicas
from headrace.core.clock import SystemClock
from headrace.core.config import EngineConfig
from headrace.core.event import Outcome
from headrace.core.messages import End, Frame, Refusal, WorkerCard
from headrace.core.ports import Network
from headrace.core.request import Request
from headrace.runner.fake import FakeRunner
from headrace.text.matchers import Matchers
from headrace.worker.host import WorkerHost
from headrace.worker.mounting import MountedModel, Report
from tests.builders import engine_config

PATIENCE_S = 60.0


def card(name: str = "m 0", epoch: int = 1) -> WorkerCard:
    return WorkerCard(name=name, model="m", index=0, pid=1, epoch=epoch)


def fake_model(
    config: EngineConfig | None = None, *, runner: FakeRunner | None = None, matchers: Matchers | None = None
) -> Callable[[Report], MountedModel]:
    made = config or engine_config()

    def mount(report: Report) -> MountedModel:
        report(1.0, "made")
        return MountedModel(
            runner or FakeRunner(made), made, matchers=matchers, version="v", fingerprint="f", is_measured=True
        )

    return mount


def fake_host(network: Network, address: str = "worker", *, epoch: int = 1, **others: object) -> WorkerHost:
    mount = others.pop("mount", None) or fake_model()
    return WorkerHost(card(epoch=epoch), mount, network, address, **others)  # type: ignore[arg-type]


class Ear:
    """A `FrameSink` that remembers. `changed` wakes whoever waits for something to come."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        # Index of the first token of keys that do not begin at 0.
        self.begins: dict[int, int] = {}
        self.ended: dict[int, End] = {}
        self.refused: dict[int, Refusal] = {}
        self.accepted: list[int] = []
        self.lost_keys: list[int] = []
        self.num_deaths = 0
        self.frames: list[Frame] = []
        self.order: list[int] = []
        self.states: list[str] = []
        self.changed = asyncio.Event()

    def take(self, replica: str, frame: Frame) -> None:
        self.frames.append(frame)
        self.accepted.extend(frame.accepted)
        for key, index, token in frame.rows():
            said = self.tokens.setdefault(key, [])
            assert self.begins.get(key, 0) + len(said) == index, f"token {index} of {key} came out of turn"
            assert key not in self.ended, f"a token of {key} came after its end"
            said.append(token)
        for end in frame.ended:
            assert end.key not in self.ended and end.key not in self.refused, f"{end.key} ended twice"
            self.ended[end.key] = end
            self.order.append(end.key)
        for refusal in frame.refused:
            for key in refusal.keys:
                assert key not in self.ended and key not in self.refused, f"{key} ended twice"
                self.refused[key] = refusal
        self.changed.set()

    def lost(self, replica: str, keys: Sequence[int], *, is_dead: bool = True) -> None:
        self.lost_keys.extend(keys)
        self.num_deaths += is_dead
        self.changed.set()

    def notice(self, replica: Replica) -> None:
        self.states.append(replica.state)
        self.changed.set()

    def is_over(self, key: int) -> bool:
        return key in self.ended or key in self.refused or key in self.lost_keys

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not done():
                self.changed.clear()
                await self.changed.wait()

    async def all_over(self, keys: Sequence[int]) -> None:
        await self.until(lambda: all(self.is_over(key) for key in keys))

    def outcomes(self) -> Counter[Outcome]:
        return Counter(end.outcome for end in self.ended.values())


def replicas_of(network: Network, ear: Ear, *addresses: str) -> Replicas:
    return Replicas(network, {"m": addresses or ("worker",)}, ear, SystemClock(), on_change=ear.notice)


async def ready(replicas: Replicas, ear: Ear) -> Replica:
    """The first replica, once all are ready."""
    await ear.until(lambda: all(replica.is_ready for replica in replicas))
    return replicas.of("m")[0]


def truth_of(request: Request, config: EngineConfig | None = None) -> list[int]:
    return FakeRunner(config or engine_config()).truth(
        request.prompt_ids, request.max_tokens or 0, seed=request.sampling.seed, choice=request.choice
    )
