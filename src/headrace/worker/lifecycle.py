"""A worker's life as others see it: its state, how far it is, what it is and how loaded.

Written by the engine's thread, by the one that reads weights for it, and by the one that asks the device how it is; read
by the one that sends heartbeats. Each field is replaced whole.
"""

from collections import deque
from collections.abc import Callable

from headrace.core.event import EngineLoad
from headrace.core.messages import Beat, DeviceHealth, WorkerCard, WorkerState

_ORDER = tuple(WorkerState)
NO_LOAD = EngineLoad(0.0, 0.0, 0, 0, 0, 0, 0, 0)


class Lifecycle:
    def __init__(self, card: WorkerCard) -> None:
        self.card = card
        self.state = WorkerState.LOADING
        self.progress = 0.0
        self.note = ""
        self.load = NO_LOAD
        self.device: DeviceHealth | None = None
        # Asked to stop: what can be broken off, is.
        self.is_leaving = False
        self._service: deque[dict[str, float]] = deque()
        self._listeners: list[Callable[[], None]] = []

    def listen(self, heard: Callable[[], None]) -> None:
        """`heard` is called at every change of state, in the thread that makes it."""
        self._listeners.append(heard)

    def enter(self, state: WorkerState, note: str = "") -> None:
        """Forward only; what has failed or is gone stays so."""
        if self.state in (WorkerState.FAILED, WorkerState.GONE) or _ORDER.index(state) <= _ORDER.index(self.state):
            assert state is self.state, f"a worker that is {self.state} cannot become {state}"
            return
        self.state, self.progress, self.note = state, 0.0, note
        for heard in self._listeners:
            heard()

    def report(self, progress: float, note: str = "") -> None:
        """How far the present state is, for the next heartbeat."""
        self.progress = min(max(progress, 0.0), 1.0)
        self.note = note or self.note

    def serve(self, given: dict[str, float]) -> None:
        """Device-seconds that tenants were given."""
        if given:
            self._service.append(given)

    def take_service(self) -> dict[str, float]:
        """Since last asked."""
        service: dict[str, float] = {}
        while self._service:
            for tenant, seconds in self._service.popleft().items():
                service[tenant] = service.get(tenant, 0.0) + seconds
        return service

    def beat(self, step_age_s: float, service: dict[str, float]) -> Beat:
        return Beat(self.state, self.card, self.load, step_age_s, service, self.progress, self.note, self.device)
