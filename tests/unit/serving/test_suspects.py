"""Requests that kill workers: they end alone, and whoever only shared their batch is served."""

import asyncio

import pytest
from msgspec.structs import replace

from headrace.core.errors import WorkerKilled
from headrace.serving.ask import Ask
from headrace.serving.quarantine import REMEMBERED_S
from headrace.text.limited import LimitedPool
from tests.unit.serving.asks import told, undisturbed
from tests.unit.serving.network_rig import CALLER, HandWorker, NetworkRig, finishes, network_rig
from tests.unit.serving.test_lives import failure_code

pytestmark = pytest.mark.unit


class Poison:
    """Whatever worker runs a step with this prompt dies of it."""

    def __init__(self, rig: NetworkRig, prompt: str) -> None:
        self.rig = rig
        self.prompt = prompt
        self.deaths = 0
        for worker in rig.workers:
            self._taint(worker)

    def _taint(self, worker: HandWorker) -> None:
        turn = worker.turn

        def run() -> None:
            worker.answer()
            if any(len(worker._request_of[key].prompt_ids) == len(self.prompt) for key in worker._number_of):
                self.deaths += 1
                worker.die()
            else:
                turn()

        worker.turn = run  # type: ignore[method-assign]


def test_who_kills_two_workers_ends_alone_and_is_known_for_a_while(pool: LimitedPool) -> None:
    async def story() -> None:
        asks = [Ask(raw="x" * size, max_tokens=40) for size in range(2, 7)]
        truths = [(await undisturbed(pool, ask))[0] for ask in asks]
        with network_rig(pool, num_workers=2) as rig:
            old = [await rig.open(ask) for ask in asks[:3]]
            for _ in range(5):
                for worker in rig.workers:
                    worker.turn()
            poison = Poison(rig, "y" * 50)
            killer = await rig.open(Ask(raw=poison.prompt))
            fresh = [await rig.open(ask) for ask in asks[3:]]
            for _ in range(200):
                for worker in rig.workers:
                    worker.turn() if worker.is_ready else rig.change(worker)
                rig.wait(0.01)
            assert poison.deaths == 2 and failure_code(killer) == "worker_killed"
            assert killer.ending is not None and killer.ending.failure is not None
            assert killer.ending.failure.status == 500
            assert [told(stream.records) for stream in [*old, *fresh]] == truths
            for stream in (killer, *old, *fresh):
                rig.finish(stream)
            rig.assert_nothing_left()
            with pytest.raises(WorkerKilled, match="refused for 10 minutes"):
                await rig.open(Ask(raw=poison.prompt))
            other = await rig.open(Ask(raw=poison.prompt), caller=replace(CALLER, tenant="globex"))
            rig.service.cancel(other, "disconnected")
            rig.finish(other)
            rig.clock.time_s += REMEMBERED_S
            assert not (await rig.open(Ask(raw=poison.prompt))).is_ended

    asyncio.run(story())


def test_suspects_are_tried_one_at_a_time_and_the_rest_moves_at_once(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            (worker,) = rig.workers
            old = [await rig.open(Ask(raw="x" * 9, max_tokens=40)) for _ in range(2)]
            for _ in range(5):
                worker.turn()
            fresh = [await rig.open(Ask(raw="y", max_tokens=40)) for _ in range(3)]
            worker.die()
            rig.change(worker)
            assert len(worker.keys) == 3
            assert [part.is_suspect for parts in worker._inbox for part in parts] == [False, False, True]
            for num_there in (3, 3, 3, 4, 4, 4, 5):
                assert len(worker.keys) == num_there
                worker.turn()
            rig.run()
            assert all(finishes(stream) == {0: "length"} for stream in [*old, *fresh])
            for stream in [*old, *fresh]:
                rig.finish(stream)
            rig.assert_nothing_left()

    asyncio.run(story())


def test_nobody_is_suspected_where_only_the_connection_was_given_up(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            (worker,) = rig.workers
            streams = [await rig.open(Ask(raw="y" * size, max_tokens=5)) for size in (1, 2)]
            for _ in range(5):
                worker.die(is_dead=False)
                rig.change(worker)
                assert len(worker.keys) == 2, "all go on at once"
                worker.answer()
            rig.run()
            assert all(finishes(stream) == {0: "length"} for stream in streams)
            for stream in streams:
                rig.finish(stream)
            rig.assert_nothing_left()

    asyncio.run(story())
