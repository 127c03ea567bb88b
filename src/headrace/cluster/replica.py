"""The gateway's end of one worker: what it is, how it does, and the sequences it was given.

Owns the keys that have no end yet, and the belief in one life of the worker: frames that come twice, late, or from an
earlier life are dropped. Dialling is for `Replicas`. Lives on the gateway's loop.
"""

import asyncio
import logging
from collections.abc import Callable

from headrace.core.errors import QueueFull, Unreachable
from headrace.core.event import EngineLoad
from headrace.core.messages import (
    PROTOCOL,
    Abort,
    Ack,
    Attach,
    AttachPart,
    Beat,
    DeviceHealth,
    Drain,
    Frame,
    FromGateway,
    FromWorker,
    Hello,
    Pause,
    Resume,
    Submit,
    SubmitPart,
    Tenants,
    Welcome,
    Withdraw,
    WorkerCard,
    WorkerState,
)
from headrace.core.ports import FrameSink, Link
from headrace.worker.vigil import Vigil

log = logging.getLogger("headrace.cluster")

LOOK_S = 0.25
# How long frames wait to be acknowledged together: a write for each would wake the worker as often.
ACK_S = 0.05
SILENCE_S = 2.0
_NO_LOAD = EngineLoad(0.0, 0.0, 0, 0, 0, 0, 0, 0)
# With so much on its way to a worker it gets nothing new. Far below what a link holds: what was taken in must not be
# lost to what comes after it.
_CROWDED_BYTES = 16 << 20
# What a sequence costs before the worker has told of any.
_FIRST_GUESS_S = 0.05


class NewcomerWork:
    """What one more sequence of a model is taken for until its worker has counted it. All its replicas share one: with
    one each, what the last sequence had left would decide where the next burst goes."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = _FIRST_GUESS_S

    def learn(self, load: EngineLoad) -> None:
        """From a load that has just counted a newcomer: others have less left of theirs."""
        sequences = load.waiting + load.running
        if sequences:
            # Half of what runs counts as done.
            self.seconds = (load.queue_s + 2.0 * load.running_s) / sequences


class Replica:
    """`progress` and `note` tell how far a worker that is not ready has come."""

    def __init__(
        self, name: str, model: str, address: str, sink: FrameSink, newcomer: NewcomerWork | None = None
    ) -> None:
        self.name = name
        self.model = model
        self.address = address
        self.card: WorkerCard | None = None
        self.state = WorkerState.LOADING
        self.load = _NO_LOAD
        self.step_age_s = 0.0
        self.progress = 0.0
        self.note = ""
        self.device: DeviceHealth | None = None
        self.epoch = 0
        self.on_change: Callable[[Replica], None] = lambda _: None
        self.on_service: Callable[[Replica, dict[str, float]], None] = lambda _, __: None
        self._sink = sink
        self._connection: ReplicaLink | None = None
        self._live: dict[int, None] = {}
        # Submitted and not in the worker's load yet.
        self._untold: set[int] = set()
        self._newcomer = newcomer or NewcomerWork()

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def is_ready(self) -> bool:
        connection = self._connection
        return connection is not None and connection.link.is_open and self.state is WorkerState.READY

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def queued_s(self) -> float:
        """Seconds of work there. What its last load does not count yet is taken for a newcomer like those before: the
        engine's own estimate, and it only has to last until the worker's next frame."""
        return self.load.queue_s + self.load.running_s + len(self._untold) * self._newcomer.seconds

    def submit(self, *parts: SubmitPart) -> None:
        """Raises Unreachable where the worker is not ready, QueueFull where too much is on its way there; nothing is
        sent or kept then."""
        self._untold.update(self._give(Submit(parts)))

    def attach(self, *parts: AttachPart) -> None:
        """Go on with what others left there. Raises as `submit` does. The worker's load counts these already."""
        self._give(Attach(parts))

    def abort(self, key: int, used_tokens: int | None = None) -> None:
        self._tell(key, Abort(key, used_tokens))

    def withdraw(self, key: int) -> None:
        self._tell(key, Withdraw(key))

    def pause(self, key: int) -> None:
        self._tell(key, Pause(key))

    def resume(self, key: int) -> None:
        self._tell(key, Resume(key))

    def drain(self, grace_s: float) -> None:
        """Have the worker finish and leave."""
        self.send(Drain(grace_s))

    def send(self, message: FromGateway) -> None:
        if self._connection is not None:
            self._connection.link.send(message)

    def _give(self, message: Submit | Attach) -> tuple[int, ...]:
        """Its keys."""
        connection = self._connection
        if connection is None or not self.is_ready:
            raise Unreachable(f"{self.name} is not ready")
        if connection.link.pending_bytes > _CROWDED_BYTES:
            raise QueueFull("the worker is behind with taking requests in", retry_after_s=1.0)
        connection.link.send(message)
        keys = message.keys
        self._live.update(dict.fromkeys(keys))
        return keys

    def _tell(self, key: int, message: FromGateway) -> None:
        """Keys that ended, or were lost, are nobody's business there."""
        if key in self._live:
            self.send(message)

    # What the connection hears

    def connected(self, connection: "ReplicaLink", welcome: Welcome) -> None:
        self._connection = connection
        self.epoch = welcome.card.epoch
        self._see(welcome.card, welcome.state)

    def heard(self, beat: Beat) -> None:
        self.step_age_s = beat.step_age_s
        self.progress, self.note = beat.progress, beat.note
        self.load = beat.load
        self.device = beat.device
        self._see(beat.card, beat.state)
        if beat.service:
            self.on_service(self, beat.service)

    def take(self, frame: Frame) -> None:
        for end in frame.ended:
            self._live.pop(end.key, None)
        for refusal in frame.refused:
            for key in refusal.keys:
                self._live.pop(key, None)
                self._untold.discard(key)
        self._untold.difference_update(frame.accepted)
        if frame.load is not None:
            self.load = frame.load
            if frame.accepted:
                self._newcomer.learn(frame.load)
        self._sink.take(self.name, frame)

    def disconnected(self, connection: "ReplicaLink", *, is_dead: bool = True) -> None:
        """Its sequences have no worker any more: one that is there still gives them up when we greet it again."""
        if self._connection is not connection:
            return
        self._connection = None
        self.load = _NO_LOAD
        self.device = None
        self._untold.clear()
        keys, self._live = list(self._live), {}
        if self.state is not WorkerState.FAILED:
            self.state = WorkerState.GONE
        self.on_change(self)
        if keys:
            self._sink.lost(self.name, keys, is_dead=is_dead)

    def _see(self, card: WorkerCard, state: WorkerState) -> None:
        changed = (self.card, self.state) != (card, state)
        self.card, self.state = card, state
        if changed or self._connection is None:
            self.on_change(self)


class ReplicaLink:
    """One connection to a worker, from greeting to end. Meets the contract of `core.ports.Receiver`."""

    def __init__(self, replica: Replica, link: Link) -> None:
        self._replica = replica
        self.link = link
        self.over = asyncio.Event()
        self.is_welcome = False
        self._tenants: Tenants | None = None
        self._vigil = Vigil(LOOK_S)
        self._last_frame = 0
        self._is_ack_due = False

    def greet(self, gateway: str, tenants: Tenants) -> None:
        self._tenants = tenants
        self.link.send(Hello(PROTOCOL, gateway))

    def received(self, message: FromWorker) -> None:
        self._vigil.restart()
        if self.over.is_set():
            return
        if isinstance(message, Welcome):
            self._welcome(message)
        elif not self.is_welcome:
            self._refuse("speaks before its welcome")
        elif isinstance(message, Frame):
            self._take(message)
        elif message.card.epoch == self._replica.epoch:
            self._replica.heard(message)

    def closed(self, why: str) -> None:
        self.over.set()
        self._replica.disconnected(self)

    def look(self, now_s: float) -> None:
        """Close a connection that has been silent too long while we listened."""
        if self._vigil.look(now_s) > SILENCE_S and not self.over.is_set():
            self._refuse(f"has been silent for {SILENCE_S:g} s")

    def _welcome(self, welcome: Welcome) -> None:
        if self.is_welcome or welcome.protocol != PROTOCOL:
            self._refuse(f"answers with protocol {welcome.protocol}, or twice")
        elif welcome.card.epoch < self._replica.epoch:
            self._refuse("is an earlier life of this worker")
        else:
            self.is_welcome = True
            if self._tenants is not None and self._tenants.tenants:
                self.link.send(self._tenants)
            self._replica.connected(self, welcome)

    def _take(self, frame: Frame) -> None:
        """Numbers only grow: what was seen, or comes after a later one, is dropped. A gap is a broken worker."""
        if frame.number <= self._last_frame:
            return
        if frame.number != self._last_frame + 1:
            self._refuse(f"lost frames between {self._last_frame} and {frame.number}", is_dead=False)
            return
        self._last_frame = frame.number
        self._replica.take(frame)
        if not self._is_ack_due:
            self._is_ack_due = True
            asyncio.get_running_loop().call_later(ACK_S, self._acknowledge)

    def _acknowledge(self) -> None:
        """Once for all frames that came since the last time."""
        self._is_ack_due = False
        self.link.send(Ack(self._last_frame))

    def _refuse(self, why: str, *, is_dead: bool = True) -> None:
        """At once, not when the link has heard of its own end: nothing is routed there meanwhile."""
        log.warning("%s %s: closed", self._replica.name, why)
        self.link.close()
        self.over.set()
        self._replica.disconnected(self, is_dead=is_dead)
