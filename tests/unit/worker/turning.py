"""The engine's side of a worker, turned by hand under a virtual clock; every link has an ear."""

from collections import defaultdict

from headrace.core.config import EngineConfig
from headrace.core.messages import Attach, AttachPart, Frame, GrammarText, Submit, WorkerState
from headrace.core.plan import StepResult
from headrace.core.request import Request
from headrace.engine.loop import Engine
from headrace.runner.fake import FakeRunner
from headrace.text.matchers import Matchers
from headrace.worker.inbox import Command, Crowded, Greeted, Inbox, Left, Order
from headrace.worker.lifecycle import Lifecycle
from headrace.worker.orphans import ORPHAN_S
from headrace.worker.turns import TurnLoop
from tests.builders import TestClock, engine_config, part
from tests.unit.worker.rig import Ear, card


class PacedRunner(FakeRunner):
    """Sets the clock to the end of each step."""

    def __init__(self, config: EngineConfig, clock: TestClock, **others: object) -> None:
        super().__init__(config, clock=clock, **others)  # type: ignore[arg-type]
        self._pace = clock

    def collect(self) -> StepResult:
        self._pace.time_s = max(self._pace.time_s, self.next_ready_s)
        return super().collect()


class TurnRig:
    def __init__(
        self,
        config: EngineConfig | None = None,
        matchers: Matchers | None = None,
        depth: int = 1,
        orphan_s: float = ORPHAN_S,
        **faults: object,
    ) -> None:
        self.config = config or engine_config()
        self.clock = TestClock()
        self.runner = PacedRunner(self.config, self.clock, depth=depth, **faults)
        self.engine = Engine(self.config, self.runner, matchers)
        self.inbox = Inbox()
        self.lifecycle = Lifecycle(card())
        for state in (WorkerState.VERIFYING, WorkerState.WARMING, WorkerState.READY):
            self.lifecycle.enter(state)
        self.ears: dict[int, Ear] = defaultdict(Ear)
        self.frames: list[tuple[int, Frame]] = []
        self.loop = TurnLoop(self.engine, matchers, self.inbox, self.lifecycle, self.clock, self._hear, orphan_s)

    def _hear(self, frames: list[tuple[int, Frame]]) -> None:
        assert len({link for link, _ in frames}) == len(frames), "one frame per gateway"
        self.frames.extend(frames)
        for link, frame in frames:
            self.ears[link].take("m/0", frame)

    def tell(self, command: Command, link: int = 1) -> None:
        self.inbox.put(Order(link, self.clock.now_s(), command))

    def submit(self, key: int, request: Request, link: int = 1, grammar: GrammarText | None = None) -> None:
        self.tell(Submit((part(key, request, grammar),)), link)

    def crowd(self, is_full: bool, link: int = 1) -> None:
        self.inbox.put(Crowded(link, is_full))

    def attach(self, key: int, name: str, index: int, link: int = 2, *, tenant: str = "a", number: int = 0) -> None:
        self.ears[link].begins[key] = index
        self.tell(Attach((AttachPart(key, tenant, name, number, index),)), link)

    def greet(self, link: int, *, attaches: bool = False) -> None:
        """A new connection of the gateway that had `link`."""
        self.inbox.put(Greeted(f"g{link}", attaches))

    def leave(self, link: int = 1, *, for_good: bool = False) -> None:
        self.inbox.put(Left(link, f"g{link}", for_good))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop.turn()
            self.engine.check()

    def run(self, most: int = 10_000) -> None:
        for _ in range(most):
            if not self.loop.turn() and self.engine.idle:
                return
        raise AssertionError("never idle")
