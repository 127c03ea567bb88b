"""One story of a worker, in this process over links in memory and as a process of its own over a unix socket."""

import asyncio
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from headrace.cluster.replica import Replica
from headrace.cluster.replicas import Replicas
from headrace.core.clock import SystemClock
from headrace.core.config import CostProfile, FakeConfig, ModelConfig
from headrace.core.errors import QueueFull
from headrace.core.event import Outcome
from headrace.core.messages import GrammarText, WorkerCard, WorkerState
from headrace.core.ports import Network
from headrace.core.request import Request, SamplingParams
from headrace.runner.truth import truth
from headrace.transport.memory import MemoryNetwork
from headrace.transport.unix import UnixNetwork
from headrace.worker.host import WorkerHost
from headrace.worker.mounting import mount_fake
from tests.builders import part, prompt, request
from tests.unit.worker.rig import Ear, ready

QUICK = ModelConfig("m", runner="fake", fake=FakeConfig(sleep=False, slots=16, blocks=256, context_len=1024))
SLOW = ModelConfig("m", runner="fake", fake=FakeConfig(slots=4, profile=CostProfile(c0_s=0.01)))
PATIENCE_S = 60.0


class Place:
    """Where a worker runs, and how to reach it."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address

    @asynccontextmanager
    async def gateway(self) -> AsyncIterator[tuple[Replicas, Ear]]:
        ear = Ear()
        replicas = Replicas(self._network, {"m": [self._address]}, ear, SystemClock(), on_change=ear.notice)
        await replicas.start()
        try:
            yield replicas, ear
        finally:
            await replicas.close()


@asynccontextmanager
async def in_memory(model: ModelConfig) -> AsyncIterator[Place]:
    network = MemoryNetwork()
    card = WorkerCard("m 0", "m", 0, os.getpid(), 1)
    async with WorkerHost(card, lambda report: mount_fake(model, (), report), network, "worker").embedded():
        yield Place(network, "worker")


def command(address: Path, model: ModelConfig, *more: str) -> list[str]:
    text = msgspec.json.encode(model).decode()
    words = ("worker", "--address", str(address), "--model-json", text, *more)
    return [sys.executable, "-m", "headrace.cli.main", *words]


@asynccontextmanager
async def process(model: ModelConfig, *more: str) -> AsyncIterator[tuple[Place, "subprocess.Popen[bytes]"]]:
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder) / "worker"
        child = subprocess.Popen(command(address, model, *more), stderr=subprocess.PIPE)
        try:
            yield Place(UnixNetwork(), str(address)), child
        finally:
            child.kill()
            await asyncio.to_thread(child.communicate)


@asynccontextmanager
async def as_process(model: ModelConfig) -> AsyncIterator[Place]:
    async with process(model) as (place, child):
        yield place
        child.terminate()
        assert await asyncio.to_thread(child.wait, PATIENCE_S) == 0


Home = Callable[[ModelConfig], AbstractAsyncContextManager[Place]]


@pytest.fixture(params=[in_memory, as_process], ids=["memory", "process"])
def home(request: pytest.FixtureRequest) -> Home:
    made: Home = request.param
    return made


def play(story: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await story()

    asyncio.run(run())


def ask(key: int, length: int, max_tokens: int) -> Request:
    return request(f"r{key}", max_tokens=max_tokens, ids=prompt(length, key, 256), sampling=SamplingParams(seed=key))


def right(made: Request, choice: int = 0) -> list[int]:
    return truth(
        made.prompt_ids, made.max_tokens or 0, vocab_size=512, eos_ids=(258,), seed=made.sampling.seed, choice=choice
    )


def test_the_straggler_holds_up_nobody_and_every_token_is_true(home: Home) -> None:
    async def story() -> None:
        async with home(QUICK) as place, place.gateway() as (replicas, ear):
            replica = await ready(replicas, ear)
            made = {key: ask(key, 8, 10 if key else 400) for key in range(16)}
            # In one message: they begin in one step, whatever holds up whom.
            replica.submit(*(part(key, one) for key, one in made.items()))
            await ear.all_over(list(made))
            assert sorted(ear.accepted) == sorted(made) and ear.order[-1] == 0
            assert max(frame.step for frame in ear.frames if any(end.key for end in frame.ended)) < 30
            assert all(ear.tokens[key] == right(one) for key, one in made.items())
            assert replica.card is not None and replica.card.eos_ids == (258,)

    play(story)


def test_a_grammar_is_followed(home: Home) -> None:
    async def story() -> None:
        async with home(QUICK) as place, place.gateway() as (replicas, ear):
            replica = await ready(replicas, ear)
            replica.submit(part(1, ask(1, 8, 20), GrammarText("choice", '["yes","no"]')))
            await ear.all_over([1])
            assert bytes(ear.tokens[1][:-1]).decode() in ("yes", "no")

    play(story)


async def some_frame(ear: Ear, replica: Replica) -> None:
    seen = len(ear.frames)
    await ear.until(lambda: len(ear.frames) > seen or not replica.num_live)


def test_a_thousand_random_lives_end_once_each_and_leave_nothing(home: Home) -> None:
    async def live(place: Place, luck: random.Random) -> int:
        """One gateway: a hundred submissions, aborts among them; some leave in the middle. How many that cost."""
        async with place.gateway() as (replicas, ear):
            replica = await ready(replicas, ear)
            made = {key: ask(key, luck.randint(1, 60), luck.randint(1, 60)) for key in range(100)}
            for key, one in made.items():
                replica.submit(part(key, one))
                if luck.random() < 0.4:
                    replica.abort(luck.randint(0, key), luck.choice([None, 0, 3]))
                if luck.random() < 0.2:
                    replica.withdraw(luck.randint(0, key))
                if luck.random() < 0.3:
                    await some_frame(ear, replica)
            is_patient = luck.random() < 0.6
            if is_patient:
                await ear.all_over(list(made))
        for key, one in made.items():
            said = ear.tokens.get(key, [])
            assert said == right(one)[: len(said)]
            if key in ear.ended and ear.ended[key].outcome is Outcome.FINISHED:
                assert said == right(one)
        assert sorted([*ear.ended, *ear.refused, *ear.lost_keys]) == list(made)
        return 0 if is_patient else len(ear.lost_keys)

    async def story() -> None:
        luck = random.Random(1)
        async with home(QUICK) as place:
            done = await asyncio.gather(*(live(place, random.Random(luck.random())) for _ in range(10)))
            assert 0 in done and sum(done) > 0
            async with place.gateway() as (replicas, ear):
                replica = await ready(replicas, ear)
                replica.submit(part(1, ask(1, 8, 1)))
                await ear.all_over([1])
                load = ear.frames[-1].load
                assert load is not None and (load.used_blocks, load.running, load.waiting) == (0, 0, 0)

    play(story)


def test_a_drain_finishes_refuses_and_leaves_with_zero() -> None:
    async def story() -> None:
        async with process(SLOW) as (place, child), place.gateway() as (replicas, ear):
            replica = await ready(replicas, ear)
            made = ask(1, 8, 300)
            replica.submit(part(1, made))
            await ear.until(lambda: len(ear.tokens.get(1, [])) > 2)
            child.send_signal(signal.SIGINT)
            child.terminate()
            replica.submit(part(2, ask(2, 8, 5)))
            await ear.all_over([1, 2])
            assert ear.tokens[1] == right(made)
            assert 2 in ear.ended or ear.refused[2].code == "draining"
            assert await asyncio.to_thread(child.wait, PATIENCE_S) == 0
            await ear.until(lambda: replica.state is WorkerState.GONE)

    play(story)


def test_what_is_left_after_the_grace_is_aborted() -> None:
    async def story() -> None:
        async with process(SLOW, "--grace-s", "0.1") as (place, child), place.gateway() as (replicas, ear):
            replica = await ready(replicas, ear)
            replica.submit(part(1, ask(1, 8, 5000)))
            await ear.until(lambda: 1 in ear.tokens)
            child.terminate()
            await ear.all_over([1])
            assert ear.ended[1].outcome is Outcome.ABORTED
            assert await asyncio.to_thread(child.wait, PATIENCE_S) == 0

    play(story)


def test_a_hung_step_ends_the_worker_with_seventy() -> None:
    async def story() -> None:
        hang = ("--inject-json", '{"prefill": 60.0}')
        async with process(QUICK, *hang) as (place, child), place.gateway() as (replicas, ear):
            replica = await ready(replicas, ear)
            replica.submit(part(1, ask(1, 8, 5)))
            await ear.all_over([1])
            assert ear.lost_keys == [1] and 1 not in ear.tokens
            assert await asyncio.to_thread(child.wait, PATIENCE_S) == 70

    play(story)


def test_a_killed_worker_loses_its_sequences_at_once() -> None:
    async def story() -> None:
        async with process(SLOW) as (place, child), place.gateway() as (replicas, ear):
            replica = await ready(replicas, ear)
            replica.submit(part(1, ask(1, 8, 1000)))
            await ear.until(lambda: 1 in ear.tokens)
            child.kill()
            await ear.all_over([1])
            assert ear.lost_keys == [1] and not replica.is_ready

    play(story)


def test_a_stopped_worker_is_given_up_and_found_again_without_late_tokens() -> None:
    async def story() -> None:
        async with process(SLOW) as (place, child), place.gateway() as (replicas, ear):
            replica = await ready(replicas, ear)
            replica.submit(part(1, ask(1, 8, 1000)))
            await ear.until(lambda: 1 in ear.tokens)
            child.send_signal(signal.SIGSTOP)
            await ear.all_over([1])
            said = len(ear.tokens[1])
            child.send_signal(signal.SIGCONT)
            await ready(replicas, ear)
            replica.submit(part(2, ask(2, 8, 5)))
            await ear.all_over([2])
            assert ear.tokens[2] == right(ask(2, 8, 5)) and len(ear.tokens[1]) == said
            assert child.poll() is None

    play(story)


PARENT = """
import subprocess, sys, time
child = subprocess.Popen(sys.argv[1:])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_it_dies_with_its_parent() -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", PARENT, *command(Path(folder) / "worker", QUICK)]
        parent = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        handle = os.pidfd_open(pid)
        try:

            async def story() -> None:
                async with Place(UnixNetwork(), str(Path(folder) / "worker")).gateway() as (replicas, ear):
                    await ready(replicas, ear)
                    parent.kill()
                    await ear.until(lambda: not replicas.of("m")[0].is_connected)
                    assert select.select([handle], [], [], PATIENCE_S)[0] == [handle], "it lives on"

            play(story)
        finally:
            parent.kill()
            parent.communicate()
            os.close(handle)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--tenants-json", "[{}]"), 2),
        (("--log-level", "loud"), 2),
        (("--model-json", '{"name": "m", "runner": "abacus"}'), 2),
        (("--model-json", '{"name": "m", "source": "no/such/model"}'), 1),
        (("--parent", "1"), 1),
    ],
)
def test_what_cannot_be_run_is_one_line_and_a_code(words: tuple[str, ...], code: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command(Path(folder) / "worker", QUICK, *words), capture_output=True, text=True, timeout=180, check=False
        )
    assert done.returncode == code and "Traceback" not in done.stderr


def test_an_order_of_many_choices_is_one_and_each_is_true(home: Home) -> None:
    async def story() -> None:
        async with home(QUICK) as place, place.gateway() as (replicas, ear):
            replica = await ready(replicas, ear)
            made = ask(1, 100, 5)
            replica.submit(part(0, made, n=40), part(40, ask(2, 8, 5)))
            await ear.all_over(range(41))
            assert ear.accepted == list(range(41)) and ear.tokens[40] == right(ask(2, 8, 5))
            for choice in range(40):
                assert ear.tokens[choice] == right(made, choice)

    play(story)


def test_a_flood_of_orders_is_refused_and_closes_no_link(home: Home) -> None:
    async def story() -> None:
        async with home(QUICK) as place, place.gateway() as (replicas, ear):
            replica = await ready(replicas, ear)
            replica.submit(part(0, ask(0, 8, 400)))
            await ear.until(lambda: bool(ear.tokens))
            huge = request("huge", ids=(2**31 - 1,) * 2_000_000)
            sent = []
            for key in range(1, 12):
                try:
                    replica.submit(part(key, huge))
                    sent.append(key)
                except QueueFull:
                    break
            assert 1 < len(sent) < 8
            await ear.all_over([0, *sent])
            assert ear.tokens[0] == right(ask(0, 8, 400)) and not ear.lost_keys
            assert {ear.refused[key].code for key in sent} <= {"context_length_exceeded", "queue_full"}
            replica.submit(part(99, ask(99, 8, 5)))
            await ear.all_over([99])
            assert ear.tokens[99] == right(ask(99, 8, 5))

    play(story)
