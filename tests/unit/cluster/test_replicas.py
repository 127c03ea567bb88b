"""All replicas: dialled again and again, found by model, told of tenants."""

import asyncio

import pytest

from headrace.cluster.replica import Replica
from headrace.cluster.replicas import Backoff, Replicas
from headrace.core.clock import SystemClock
from headrace.core.config import TenantConfig
from headrace.core.messages import AttachPart, Beat, FromGateway, Service, WorkerState
from headrace.core.request import Admission
from headrace.runner.fake import FakeRunner
from headrace.transport.memory import MemoryNetwork
from headrace.worker.lifecycle import NO_LOAD
from tests.builders import engine_config, part, request
from tests.unit.worker.rig import Ear, card, fake_host, fake_model, ready, replicas_of, truth_of


def test_each_wait_is_twice_the_last_up_to_a_bound() -> None:
    backoff = Backoff()
    assert [backoff.fail() for _ in range(8)] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])
    backoff.succeed()
    assert backoff.fail() == 0.05


def test_replicas_are_found_by_model_and_name() -> None:
    replicas = Replicas(MemoryNetwork(), {"a": ["x", "y"], "b": ["z"]}, Ear(), SystemClock())
    assert [replica.name for replica in replicas.of("a")] == ["a/0", "a/1"]
    assert replicas.of("c") == [] and replicas.find("b/0") is replicas.of("b")[0] and replicas.find("c/0") is None


def test_a_worker_that_comes_back_in_a_new_life_is_found_again() -> None:
    async def story() -> None:
        network, ear = MemoryNetwork(), Ear()
        replicas = replicas_of(network, ear)
        await replicas.start()
        for epoch in (1, 2):
            async with fake_host(network, epoch=epoch).embedded():
                replica = await ready(replicas, ear)
                assert replica.epoch == epoch
                replica.submit(part(epoch, request("a", 8, 5)))
                await ear.all_over([epoch])
            await ear.until(lambda: replicas.of("m")[0].state is WorkerState.GONE)
        assert ear.tokens == {1: truth_of(request("a", 8, 5)), 2: truth_of(request("a", 8, 5))}
        await replicas.close()

    asyncio.run(story())


def test_two_gateways_share_a_worker() -> None:
    async def story() -> None:
        network, ears = MemoryNetwork(), [Ear(), Ear()]
        gateways = [replicas_of(network, ear) for ear in ears]
        async with fake_host(network).embedded():
            for gateway in gateways:
                await gateway.start()
            for gateway, ear in zip(gateways, ears, strict=True):
                replica = await ready(gateway, ear)
                replica.submit(part(1, request(f"of {id(ear)}", 8, 6)))
            for ear in ears:
                await ear.all_over([1])
                assert ear.tokens == {1: truth_of(request(f"of {id(ear)}", 8, 6))}
            for gateway in gateways:
                await gateway.close()

    asyncio.run(story())


def test_tenants_reach_workers_that_are_there_and_those_that_come() -> None:
    async def story() -> None:
        network, ear = MemoryNetwork(), Ear()
        replicas = replicas_of(network, ear, "worker", "later")
        await replicas.start()
        async with fake_host(network).embedded():
            await ear.until(lambda: replicas.of("m")[0].is_ready)
            replicas.set_tenants((TenantConfig("a", max_blocks=0, max_slots=0),))
            async with fake_host(network, "later").embedded():
                await ready(replicas, ear)
                for key, replica in enumerate(replicas):
                    replica.submit(part(key, request("a", 8, 5, admission=Admission.GUARANTEED)))
                await ear.all_over([0, 1])
                assert {refusal.param for refusal in ear.refused.values()} == {"admission"}
                await replicas.close()

    asyncio.run(story())


def test_what_one_replica_gives_a_tenant_counts_at_the_others_of_its_model() -> None:
    class Deaf(Replica):
        def send(self, message: FromGateway) -> None:
            told.append((self.name, message))

    told: list[tuple[str, FromGateway]] = []
    replicas = Replicas(MemoryNetwork(), {"m": ("a", "b", "c"), "other": ("d",)}, Ear(), SystemClock())
    for replica in replicas:
        replica.__class__ = Deaf
    replicas.of("m")[1].heard(Beat(WorkerState.READY, card(), NO_LOAD, service={"acme": 2.0}))
    replicas.of("m")[1].heard(Beat(WorkerState.READY, card(), NO_LOAD))
    replicas.of("other")[0].heard(Beat(WorkerState.READY, card(), NO_LOAD, service={"acme": 1.0}))
    assert told == [("m/0", Service({"acme": 2.0})), ("m/2", Service({"acme": 2.0}))]


@pytest.mark.parametrize("goodbye", [False, True])
def test_another_gateway_goes_on_with_what_one_left_unless_it_said_goodbye(goodbye: bool) -> None:
    async def story() -> None:
        network, ears = MemoryNetwork(), [Ear(), Ear()]
        first, second = (replicas_of(network, ear) for ear in ears)
        made = request("a", 8, 40)
        slow = FakeRunner(engine_config(), sleep=True)
        async with fake_host(network, mount=fake_model(runner=slow)).embedded():
            for gateway in (first, second):
                await gateway.start()
            (await ready(first, ears[0])).submit(part(1, made))
            await ears[0].until(lambda: len(ears[0].tokens.get(1, ())) >= 3)
            await first.close(goodbye=goodbye)
            said = ears[0].tokens[1]
            replica = await ready(second, ears[1])
            ears[1].begins[5] = len(said)
            replica.attach(AttachPart(5, "a", "a", 0, len(said)))
            await ears[1].all_over([5])
            assert (5 in ears[1].refused) is goodbye
            assert goodbye or [*said, *ears[1].tokens[5]] == truth_of(made)
            await second.close()

    asyncio.run(story())


def test_a_gateway_that_comes_again_finds_nothing_of_its_last_connection() -> None:
    async def story() -> None:
        network, ear = MemoryNetwork(), Ear()
        replicas = replicas_of(network, ear)
        slow = FakeRunner(engine_config(), sleep=True)
        async with fake_host(network, mount=fake_model(runner=slow)).embedded():
            await replicas.start()
            replica = await ready(replicas, ear)
            replica.submit(part(1, request("a", 8, 200)))
            await ear.until(lambda: len(ear.tokens.get(1, ())) >= 3)
            replicas._links[replica.name].link.close()
            await ear.until(lambda: ear.lost_keys == [1])
            await ready(replicas, ear)
            await ear.until(lambda: replica.is_ready)
            replica.attach(AttachPart(5, "a", "a", 0, 0))
            await ear.all_over([5])
            assert ear.refused[5].code == "not_attachable"
            await replicas.close()

    asyncio.run(story())
