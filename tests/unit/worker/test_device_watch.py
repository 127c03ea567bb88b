"""A device is judged by what it says; a worker on a faulty one tells everybody and leaves."""

import asyncio
import logging
import threading

import pytest
from msgspec.structs import replace

from headrace.core.messages import Beat, DeviceHealth, WorkerState
from headrace.transport.memory import MemoryNetwork
from headrace.worker.device_watch import DeviceWatch
from headrace.worker.mounting import MountedModel, Report
from headrace.worker.nvml import find_device
from tests.builders import part, request
from tests.unit.worker.fake_nvml import GPU_IS_LOST, FakeNvml, NVMLError
from tests.unit.worker.rig import Ear, fake_host, fake_model, ready, replicas_of


def test_memory_errors_count_from_the_first_look_on() -> None:
    library, heard = FakeNvml(), list[DeviceHealth]()
    watch = DeviceWatch(find_device("GPU-1", library), heard.append)
    assert not watch.look().fault and not watch.look().fault
    library.figures["errors"] = 5
    assert watch.look().fault == "NVIDIA X has had 3 uncorrected memory errors since the start"
    assert [health.ecc_uncorrected for health in heard] == [2, 2, 5] and heard[2].fault


def test_a_card_that_is_lost_stays_a_fault() -> None:
    library = FakeNvml()
    watch = DeviceWatch(find_device("GPU-1", library), lambda _: None)
    watch.look()
    library.figures = dict.fromkeys(library.figures, NVMLError(GPU_IS_LOST))
    assert "fallen off the bus" in watch.look().fault


def test_it_looks_in_a_thread_of_its_own_until_it_is_stopped() -> None:
    looks, enough = list[str](), threading.Event()

    def hear(_: DeviceHealth) -> None:
        looks.append(threading.current_thread().name)
        if len(looks) == 3:
            watch.stop()
            enough.set()

    watch = DeviceWatch(find_device("GPU-1", FakeNvml()), hear, interval_s=0.0)
    watch.start()
    assert enough.wait(60.0)
    for thread in threading.enumerate():
        if thread.name == "device":
            thread.join(60.0)
    assert looks == ["device"] * 3


def test_a_library_that_stumbles_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def read(self) -> DeviceHealth:
            raise OSError("no such device")

    with caplog.at_level(logging.ERROR):
        DeviceWatch(Broken(), lambda _: None)._run()
    assert "not watched any more" in caplog.text


def on_card(report: Report) -> MountedModel:
    mounted = fake_model()(report)
    mounted.device_id = "GPU-1"
    return mounted


class Card:
    """Says what it is told to say, when it is let."""

    def __init__(self) -> None:
        self.health = DeviceHealth("X", 1, 2, 40.0, 300.0, 0)

    def read(self) -> DeviceHealth:
        return self.health


def test_gateways_hear_how_the_card_is_and_a_fault_drains_the_worker() -> None:
    async def story() -> None:
        network, ear, card = MemoryNetwork(), Ear(), Card()
        host = fake_host(network, mount=on_card, find=lambda _: card)
        replicas = replicas_of(network, ear)
        await replicas.start()
        async with host.embedded():
            replica = await ready(replicas, ear)
            while host.lifecycle.device is None:
                await asyncio.sleep(0)
            replica.heard(host.lifecycle.beat(0.0, {}))
            assert replica.device == card.health
            replica.submit(part(1, request("a", 8, 20)))
            await ear.until(lambda: 1 in ear.accepted)
            host._hear_device(replace(card.health, fault="X has fallen off the bus"))
            # It may be done with draining before anybody looks.
            await ear.until(lambda: replica.state in (WorkerState.DRAINING, WorkerState.FAILED))
            await ear.all_over([1])
            assert len(ear.tokens[1]) == 20 and not ear.lost_keys
            # Not as one that is done: whoever starts workers hears why.
            await ear.until(lambda: replica.state is WorkerState.FAILED)
            assert not replica.is_ready and "fallen off the bus" in replica.note
        await replicas.close()

    asyncio.run(story())


def test_a_card_that_cannot_be_asked_is_said_once_and_serves(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        network, ear = MemoryNetwork(), Ear()
        replicas = replicas_of(network, ear)
        host = fake_host(network, mount=on_card, find=lambda device: find_device(device, FakeNvml(fails=9)))
        await replicas.start()
        async with host.embedded():
            replica = await ready(replicas, ear)
            replica.submit(part(1, request("a", 8, 5)))
            await ear.all_over([1])
            assert len(ear.tokens[1]) == 5 and host.lifecycle.device is None
        await replicas.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(story())
    assert caplog.text.count("its device is not watched: NVML cannot be opened") == 1


def test_a_worker_without_a_card_asks_nobody() -> None:
    async def story() -> None:
        network, ear, asked = MemoryNetwork(), Ear(), list[str]()
        replicas = replicas_of(network, ear)
        await replicas.start()
        async with fake_host(network, find=asked.append).embedded():
            await ready(replicas, ear)
        await replicas.close()
        assert not asked

    asyncio.run(story())


def test_beats_without_a_device_are_understood() -> None:
    """An older worker's."""
    import msgspec

    health = DeviceHealth("X", 1, 2, 40.0, 300.0, 0)
    beat = fake_host(MemoryNetwork()).lifecycle.beat(0.0, {})
    coded = msgspec.msgpack.decode(msgspec.msgpack.encode(beat))
    del coded["device"]
    assert msgspec.convert(coded, Beat) == beat
    full = replace(beat, device=health)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(full), type=Beat) == full
