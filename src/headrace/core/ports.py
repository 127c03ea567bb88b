"""What a package needs from above or beside it, as Protocols."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from headrace.core.messages import Frame
from headrace.core.plan import Masks, Plan, StepResult


class Clock(Protocol):
    def now_s(self) -> float: ...


class Runner(Protocol):
    """Computes plans in the order they were launched.

    `launch(plan)` starts the forward pass and returns at once. `sample(step, masks)` starts the
    sampling of that plan and is called exactly once per launched plan, in order, before the next
    `launch`'s rows may use its tokens; `masks` is None when the plan has no masked rows.
    `collect()` waits for the oldest launched plan and returns its result. At most `depth` plans are
    in flight. A row that fails is reported in `statuses`; only a failure of the whole device raises
    (RunnerFailed), after which the runner is unusable.

    `launch` may also raise OutOfRoom: there is no memory for a step of that size. What the plan freed, started and grew
    is done then, none of its rows is, and it is not in flight; plans before it are, and the runner goes on. `sample`
    never does: it takes fewer rows at a time, and a row that finds no room alone fails alone.
    """

    @property
    def depth(self) -> int: ...

    def load(self) -> None: ...

    def warm_up(self) -> None: ...

    def launch(self, plan: Plan) -> None: ...

    def sample(self, step: int, masks: Masks | None) -> None: ...

    def collect(self) -> StepResult: ...

    def export_blocks(self, blocks: Sequence[int]) -> bytes: ...

    def import_blocks(self, blocks: Sequence[int], payload: bytes) -> None: ...

    def close(self) -> None: ...


class MaskSource(Protocol):
    """Masks of the rows that need one. The engine never knows what a mask means.

    `masks(plan_rows, numbers)` is asked when every earlier token of those sequences was passed to
    `advance`. A row it leaves out of `Masks.rows` has no mask to give and fails alone.
    """

    def masks(self, rows: Sequence[int], numbers: Sequence[int]) -> Masks: ...

    def advance(self, number: int, token: int) -> None: ...


class Receiver(Protocol):
    """Who listens at one end of a link. Called on the loop, one message at a time, never after `closed`."""

    def received(self, message: Any) -> None: ...

    def closed(self, why: str) -> None:
        """Once: the other end left, broke the protocol, or this end closed. `why` is for a log."""


class Link(Protocol):
    """One end of a connection that carries typed messages, in order, whole or not at all."""

    @property
    def peer(self) -> str: ...

    @property
    def is_open(self) -> bool:
        """False from the moment it fails or is closed here; `closed` is told a turn later."""

    @property
    def pending_bytes(self) -> int:
        """Sent and not yet taken by the system or the other end."""

    def send(self, message: Any) -> None:
        """Queue a message; returns at once. Raises TooLarge, nothing sent. A link that holds more than its bound closes
        itself; a closed one drops what it is given, since whoever sent it hears `closed`."""

    def post(self, message: Any) -> None:
        """`send`, from any thread; does not block. Among posts the order is kept, between a `send` and a `post` it is not."""

    def close(self) -> None: ...


class Listener(Protocol):
    @property
    def address(self) -> str: ...

    async def close(self) -> None:
        """Take no more connections, and close those there are."""


class Network(Protocol):
    """Where links come from. `incoming` is the union of messages that this end understands: anything else
    closes the connection, and harms nothing."""

    async def dial(self, address: str, receiver: Callable[[Link], Receiver], incoming: Any) -> Link:
        """Raises Unreachable when nobody answers there."""

    async def listen(self, address: str, receiver: Callable[[Link], Receiver], incoming: Any) -> Listener: ...


class FrameSink(Protocol):
    """Where the frames of all replicas go: each once, in the order of its worker, and none of a worker's earlier life."""

    def take(self, replica: str, frame: Frame) -> None:
        """The frame is acknowledged when this returns."""

    def lost(self, replica: str, keys: Sequence[int], *, is_dead: bool = True) -> None:
        """These sequences have no worker any more. `is_dead` where one of them may have killed it; else this end broke
        off with a worker that lives."""
