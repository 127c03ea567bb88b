"""The gateway's end of a worker: what it believes, what it drops, whom it gives up."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from headrace.cluster.replica import ACK_S, NewcomerWork, Replica, ReplicaLink
from headrace.core.config import TenantConfig
from headrace.core.errors import QueueFull, TooLarge, Unreachable
from headrace.core.event import Counters, EngineLoad, Outcome, Waits
from headrace.core.messages import (
    PROTOCOL,
    Abort,
    Ack,
    Attach,
    AttachPart,
    Beat,
    End,
    Frame,
    Hello,
    Refusal,
    Submit,
    Tenants,
    Welcome,
    WorkerState,
)
from tests.builders import part, request
from tests.unit.worker.rig import Ear, card

LOAD = EngineLoad(2.0, 0.5, 4, 2, 0, 10, 10, 20)


class Wire:
    """A link that only remembers."""

    peer = "somewhere"
    pending_bytes = 0
    is_open = True

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.is_closed = False

    def send(self, message: Any) -> None:
        self.sent.append(message)

    post = send

    def close(self) -> None:
        self.is_closed = True


class Scene:
    def __init__(self) -> None:
        self.ear = Ear()
        self.replica = Replica("m/0", "m", "worker", self.ear)
        self.replica.on_change = self.ear.notice

    def connect(self, *, epoch: int = 5, state: WorkerState = WorkerState.READY) -> tuple[Wire, ReplicaLink]:
        wire = Wire()
        link = ReplicaLink(self.replica, wire)
        link.greet("g", Tenants((TenantConfig("a"),)))
        link.received(Welcome(PROTOCOL, card(epoch=epoch), state))
        return wire, link


def play(story: Callable[[Scene], Any]) -> None:
    async def run() -> None:
        await story(Scene())

    asyncio.run(run())


def end(key: int) -> End:
    return End(key, Outcome.FINISHED, "stop", Counters(), Waits())


def test_it_greets_tells_the_tenants_and_is_ready_when_the_worker_is() -> None:
    async def story(scene: Scene) -> None:
        wire, link = scene.connect(state=WorkerState.WARMING)
        assert wire.sent == [Hello(PROTOCOL, "g"), Tenants((TenantConfig("a"),))]
        with pytest.raises(Unreachable):
            scene.replica.submit(part(1, request()))
        link.received(Beat(WorkerState.READY, card(epoch=5), LOAD, note="here"))
        scene.replica.submit(part(1, request()))
        assert scene.replica.note == "here"
        assert scene.ear.states == [WorkerState.WARMING, WorkerState.READY]

    play(story)


def test_frames_that_come_twice_or_late_are_dropped_and_all_are_acknowledged_together() -> None:
    async def story(scene: Scene) -> None:
        wire, link = scene.connect()
        for number in (1, 2, 2, 1, 3, 1):
            link.received(Frame(number, step=number))
        while len(wire.sent) == 2:
            await asyncio.sleep(ACK_S)
        assert [frame.number for frame in scene.ear.frames] == [1, 2, 3]
        assert wire.sent[2:] == [Ack(3)]

    play(story)


def test_a_gap_closes_the_connection_and_nothing_after_it_is_believed() -> None:
    async def story(scene: Scene) -> None:
        wire, link = scene.connect()
        scene.replica.submit(part(1, request()))
        link.received(Frame(2, step=1))
        link.received(Frame(1, step=1))
        assert wire.is_closed and scene.ear.frames == [] and scene.ear.lost_keys == [1]
        assert scene.ear.num_deaths == 0, "nothing that was there can have killed it"

    play(story)


def test_an_earlier_life_is_not_believed() -> None:
    async def story(scene: Scene) -> None:
        _, old = scene.connect(epoch=5)
        old.closed("gone")
        _, new = scene.connect(epoch=6)
        late, _ = scene.connect(epoch=5)
        assert late.is_closed and scene.replica.epoch == 6
        old.received(Frame(1, step=1))
        new.received(Beat(WorkerState.DRAINING, card(epoch=5), LOAD))
        assert scene.ear.frames == [] and scene.replica.is_ready

    play(story)


def test_sequences_without_an_end_are_lost_with_the_connection_once() -> None:
    async def story(scene: Scene) -> None:
        _, link = scene.connect()
        for key in range(4):
            scene.replica.submit(part(key, request()))
        refusal = Refusal((1,), "queue_full", "full")
        link.received(Frame(1, step=1, accepted=(0, 2, 3), ended=(end(0),), refused=(refusal,)))
        link.closed("gone")
        link.closed("gone")
        assert scene.ear.lost_keys == [2, 3] and scene.ear.num_deaths == 1
        assert scene.replica.state is WorkerState.GONE and scene.replica.num_live == 0
        with pytest.raises(Unreachable):
            scene.replica.submit(part(9, request()))

    play(story)


def test_only_keys_that_live_are_spoken_of() -> None:
    async def story(scene: Scene) -> None:
        wire, link = scene.connect()
        scene.replica.submit(part(1, request()))
        scene.replica.submit(part(2, request()))
        link.received(Frame(1, step=1, ended=(end(1),)))
        for key in (1, 2, 3):
            scene.replica.abort(key, 4)
        assert [sent for sent in wire.sent if isinstance(sent, Abort)] == [Abort(2, 4)]
        assert [key for sent in wire.sent if isinstance(sent, Submit) for key in sent.keys] == [1, 2]

    play(story)


def test_work_that_the_load_does_not_count_yet_is_guessed_at_the_mean_of_the_last_arrival() -> None:
    async def story(scene: Scene) -> None:
        _, link = scene.connect()
        link.received(Frame(1, step=-1, accepted=(9,), load=LOAD))
        assert scene.replica.queued_s == 2.5
        scene.replica.submit(part(1, request()))
        scene.replica.submit(part(2, request()))
        each_s = (2.0 + 2 * 0.5) / 6
        assert scene.replica.queued_s == pytest.approx(2.5 + 2 * each_s)
        link.received(Beat(WorkerState.READY, card(epoch=5), LOAD))
        assert scene.replica.queued_s == pytest.approx(2.5 + 2 * each_s)
        link.received(Frame(2, step=-1, accepted=(1,), refused=(Refusal((2,), "queue_full", ""),), load=LOAD))
        assert scene.replica.queued_s == 2.5

    play(story)


def test_sequences_that_are_nearly_done_do_not_make_newcomers_look_small() -> None:
    async def story(scene: Scene) -> None:
        _, link = scene.connect()
        link.received(Frame(1, step=-1, accepted=(9,), load=LOAD))
        nearly_done = EngineLoad(0.0, 0.001, 0, 1, 3, 10, 10, 20)
        link.received(Frame(2, step=1, load=nearly_done))
        link.received(Beat(WorkerState.READY, card(epoch=5), nearly_done))
        scene.replica.submit(part(1, request()))
        assert scene.replica.queued_s == pytest.approx(0.001 + (2.0 + 2 * 0.5) / 6)

    play(story)


def test_a_burst_is_shared_evenly_whatever_each_replica_did_before() -> None:
    async def story(scene: Scene) -> None:
        newcomer = NewcomerWork()
        pair = [Replica(f"m/{index}", "m", "worker", scene.ear, newcomer) for index in range(2)]
        works = (EngineLoad(0.0, 0.001, 0, 1, 3, 10, 10, 20), EngineLoad(3.0, 0.5, 3, 1, 3, 10, 10, 20))
        for replica, load in zip(pair, works, strict=True):
            link = ReplicaLink(replica, Wire())
            link.greet("g", Tenants(()))
            link.received(Welcome(PROTOCOL, card(epoch=5), WorkerState.READY))
            link.received(Frame(1, step=-1, accepted=(9,), load=load))
            link.received(Frame(2, step=1, load=EngineLoad(0.0, 0.0, 0, 0, 4, 10, 10, 20)))
        for key in range(8):
            min(pair, key=lambda replica: replica.queued_s).submit(part(key, request()))
        assert [replica.num_live for replica in pair] == [4, 4]

    play(story)


def test_two_seconds_of_silence_close_it_unless_nobody_listened() -> None:
    async def story(scene: Scene) -> None:
        wire, link = scene.connect()
        for look in range(9):
            link.look(0.25 * look)
        link.look(60.0)
        assert wire.is_closed and scene.replica.state is WorkerState.GONE
        wire, link = scene.connect()
        link.look(0.0)
        link.look(60.0)
        link.received(Beat(WorkerState.READY, card(epoch=5), LOAD))
        for look in range(8):
            link.look(60.0 + 0.25 * look)
        assert not wire.is_closed

    play(story)


def test_a_foreign_protocol_or_a_frame_before_the_welcome_is_refused() -> None:
    async def story(scene: Scene) -> None:
        for message in (Welcome(PROTOCOL + 1, card(), WorkerState.READY), Frame(1, step=1)):
            wire = Wire()
            ReplicaLink(scene.replica, wire).received(message)
            assert wire.is_closed and not scene.replica.is_connected

    play(story)


def test_an_order_goes_in_one_message_and_its_prompt_once() -> None:
    async def story(scene: Scene) -> None:
        wire, _ = scene.connect()
        long = request("long", 8000)
        scene.replica.submit(part(1, long, n=128), part(129, request("short")))
        (sent,) = [sent for sent in wire.sent if isinstance(sent, Submit)]
        assert sent.keys == tuple(range(1, 130)) and scene.replica.num_live == 129
        assert len(msgspec.msgpack.encode(sent)) < 5 * 8000

    play(story)


def test_a_crowded_link_gets_nothing_new_and_keeps_what_it_has() -> None:
    async def story(scene: Scene) -> None:
        wire, _ = scene.connect()
        scene.replica.submit(part(1, request()))
        wire.pending_bytes = 17 << 20
        sent = len(wire.sent)
        with pytest.raises(QueueFull):
            scene.replica.submit(part(2, request()))
        assert len(wire.sent) == sent and not wire.is_closed
        scene.replica.abort(1)
        assert wire.sent[sent:] == [Abort(1)]
        wire.pending_bytes = 0
        scene.replica.submit(part(2, request()))

    play(story)


def test_a_link_that_failed_in_this_turn_is_not_ready() -> None:
    async def story(scene: Scene) -> None:
        wire, _ = scene.connect()
        wire.is_open = False
        assert not scene.replica.is_ready
        with pytest.raises(Unreachable):
            scene.replica.submit(part(1, request()))
        assert scene.replica.num_live == 0

    play(story)


def test_what_could_not_be_sent_leaves_no_key() -> None:
    async def story(scene: Scene) -> None:
        wire, link = scene.connect()
        guess_s = scene.replica.queued_s

        def refuse(message: Any) -> None:
            raise TooLarge("too long")

        wire.send = refuse  # type: ignore[method-assign]
        with pytest.raises(TooLarge):
            scene.replica.submit(part(1, request()))
        assert scene.replica.num_live == 0 and scene.replica.queued_s == guess_s
        link.closed("gone")
        assert scene.ear.lost_keys == []

    play(story)


def test_what_is_attached_lives_here_and_is_not_new_work() -> None:
    async def story(scene: Scene) -> None:
        parts = (AttachPart(1, "a", "r", 0, 5), AttachPart(2, "a", "r", 1, 7))
        with pytest.raises(Unreachable):
            scene.replica.attach(*parts)
        wire, link = scene.connect()
        guess_s = scene.replica.queued_s
        scene.replica.attach(*parts)
        assert wire.sent[-1] == Attach(parts)
        assert scene.replica.num_live == 2 and scene.replica.queued_s == guess_s
        link.received(Frame(1, step=-1, accepted=(1,), refused=(Refusal((2,), "not_attachable", "gone"),)))
        link.closed("gone")
        assert scene.ear.lost_keys == [1]

    play(story)
