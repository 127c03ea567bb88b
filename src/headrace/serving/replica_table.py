"""What serving needs to know of replicas and to say to them. `cluster.replicas` is the real thing."""

from collections.abc import Sequence
from typing import Protocol

from headrace.core.event import EngineLoad
from headrace.core.messages import AttachPart, SubmitPart, WorkerCard, WorkerState


class ReplicaEnd(Protocol):
    """The gateway's end of one worker."""

    @property
    def name(self) -> str: ...

    @property
    def card(self) -> WorkerCard | None: ...

    @property
    def state(self) -> WorkerState: ...

    @property
    def load(self) -> EngineLoad: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def queued_s(self) -> float: ...

    def submit(self, *parts: SubmitPart) -> None:
        """All of a client's request, as one. Raises Refused, nothing kept: Unreachable when it is not ready."""

    def attach(self, *parts: AttachPart) -> None:
        """Go on with what another gateway left there. Raises as `submit` does."""

    def abort(self, key: int, used_tokens: int | None = None) -> None: ...

    def pause(self, key: int) -> None: ...

    def resume(self, key: int) -> None: ...


class ReplicaTable(Protocol):
    """All replicas, by the name of their model."""

    def of(self, model: str) -> Sequence[ReplicaEnd]: ...
