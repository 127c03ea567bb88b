"""Calls over a real port: what comes, what a window holds back, what is refused and how."""

import asyncio
import json

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from headrace.core.errors import QueueFull
from headrace.gateway.grpc import headrace_pb2 as pb
from headrace.gateway.grpc.call import SERVICE
from headrace.streams.record import Failure
from tests.unit.gateway.grpc_rig import CHAT, OTHER_KEY, Client, Rig, ends, eventually, resume, start, tells
from tests.unit.gateway.live import play


def test_a_call_hears_what_its_stream_says_and_one_last_chunk() -> None:
    async def story() -> None:
        rig = Rig()
        async with rig.running() as channel:
            client = await Client(channel, start(), x_request_id="mine").says()
            stream = await rig.stream()
            tells(stream, 3)
            ends(stream)
            chunks = await client.hears()
            assert dict(await client.call.initial_metadata())["x-request-id"] == "mine"
            assert [chunk.request_id for chunk in chunks] == ["mine"] * 5
            assert [chunk.chunk_seq for chunk in chunks] == [1, 2, 3, 4, 5]
            assert [chunk.global_seq for chunk in chunks] == [0, 1, 2, 3, 3]
            assert [list(choice.token_ids) for chunk in chunks for choice in chunk.choices] == [[0], [1], [2], []]
            assert chunks[3].choices[0].finish_reason == "stop"
            assert [chunk.is_final for chunk in chunks] == [False] * 4 + [True]
            assert chunks[-1].usage == pb.Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=3)
            assert await client.code() is grpc.StatusCode.OK

    play(story())


def test_at_most_a_window_of_chunks_is_ahead_of_what_was_acknowledged() -> None:
    async def story() -> None:
        rig = Rig()
        async with rig.running() as channel:
            client = await Client(channel, start(window=8)).says()
            stream = await rig.stream()
            tells(stream, 20)
            assert [chunk.chunk_seq for chunk in await client.hears(8)] == list(range(1, 9))
            assert await client.silent()
            await client.says(pb.PredictRequest(ack=pb.Ack(seq=1)))
            assert (await client.next()).chunk_seq == 9
            assert await client.silent()
            await client.says(pb.PredictRequest(window=pb.Window()))
            assert (await client.next()).chunk_seq == 10
            ends(stream)
            assert len(await client.hears()) == 12

    play(story())


def test_a_stream_is_gone_on_with_behind_any_chunk_whatever_call_began_it() -> None:
    async def story() -> None:
        rig = Rig()
        async with rig.running() as channel:
            first = await Client(channel, start(), x_request_id="mine").says()
            stream = await rig.stream()
            tells(stream, 6)
            whole = await first.hears(6)
            first.call.cancel()
            ends(stream)
            for after in range(7):
                rest = await Client(channel, resume("mine", after)).hears()
                assert rest[: 6 - after] == whole[after:]
                assert rest[-1].is_final
            over = await Client(channel, resume("mine", 8)).hears()
            assert [chunk.is_final for chunk in over] == [True]

    play(story())


def test_a_client_that_cancels_its_call_has_left_and_one_that_says_cancel_stops_the_stream() -> None:
    async def story() -> None:
        rig = Rig(disconnect_grace_s=30.0)
        async with rig.running() as channel:
            leaving = await Client(channel, start(), x_request_id="left").says()
            stream = await rig.stream()
            tells(stream, 1)
            await leaving.hears(1)
            leaving.call.cancel()
            audience = rig.app.context.shelf.find("first", "left")
            await eventually(lambda: not len(audience))
            assert not stream.is_ended
            stopping = await Client(channel, resume("left", 1)).says(pb.ResumeRequest(cancel=pb.Cancel()))
            (last,) = await stopping.hears()
            assert last.is_final and last.error.code == "cancelled" and last.error.status == 499
            assert await stopping.code() is grpc.StatusCode.CANCELLED
            assert stream.is_ended

    play(story())


def test_who_reads_on_may_say_what_happens_without_it() -> None:
    async def story() -> None:
        rig = Rig(disconnect_grace_s=0.0)
        async with rig.running() as channel:
            first = await Client(channel, start(), x_request_id="mine", x_headrace_on_disconnect="finish").says()
            stream = await rig.stream()
            tells(stream, 1)
            await first.hears(1)
            first.call.cancel()
            audience = rig.app.context.shelf.find("first", "mine")
            await eventually(lambda: not len(audience))
            assert not stream.is_ended
            second = await Client(channel, resume("mine"), x_headrace_on_disconnect="cancel").says()
            await second.hears(1)
            second.call.cancel()
            await eventually(lambda: stream.is_ended)

    play(story())


def test_a_stream_that_breaks_says_why_in_its_last_chunk_and_in_the_status() -> None:
    async def story() -> None:
        rig = Rig()
        async with rig.running() as channel:
            client = await Client(channel, start()).says()
            stream = await rig.stream()
            tells(stream, 1)
            ends(stream, Failure("queue_full", "Too much to do.", 503, retry_after_s=1.5))
            last = (await client.hears())[-1]
            assert (last.is_final, last.error.code, last.error.retry_after_s) == (True, "queue_full", 1.5)
            assert await client.code() is grpc.StatusCode.UNAVAILABLE
            assert (await client.trailer())["grpc-retry-pushback-ms"] == "1500"
            assert (await client.error())["code"] == "queue_full"

    play(story())


def test_an_api_that_there_is_not_is_told_those_that_there_are() -> None:
    async def story() -> None:
        rig = Rig()
        async with rig.running() as channel:
            client = Client(channel, start(api="embeddings"))
            assert await client.hears() == []
            assert (await client.error())["message"] == "api: must be one of chat, completions"

    play(story())


@pytest.mark.parametrize(
    ("said", "key", "code", "param"),
    [
        (start(), None, grpc.StatusCode.UNAUTHENTICATED, None),
        (resume("mine"), None, grpc.StatusCode.UNAUTHENTICATED, None),
        (start(), "sk-unknown-0123456789", grpc.StatusCode.UNAUTHENTICATED, None),
        (start(body={**CHAT, "model": "none"}), "", grpc.StatusCode.NOT_FOUND, "model"),
        (start(body={**CHAT, "temperature": 9}), "", grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        (start(body=b"{"), "", grpc.StatusCode.INVALID_ARGUMENT, None),
        (start(api="embeddings"), "", grpc.StatusCode.INVALID_ARGUMENT, "api"),
        (start(headers={"authorization": "x"}), "", grpc.StatusCode.INVALID_ARGUMENT, "headers"),
        (start(window=-1), "", grpc.StatusCode.INVALID_ARGUMENT, "window"),
        (start(body=b" " * 2000), "", grpc.StatusCode.RESOURCE_EXHAUSTED, None),
        (pb.PredictRequest(ack=pb.Ack(seq=1)), "", grpc.StatusCode.INVALID_ARGUMENT, "start"),
        (b"\xff\xff\xff", "", grpc.StatusCode.INVALID_ARGUMENT, None),
        (resume("nothing"), "", grpc.StatusCode.NOT_FOUND, None),
        (resume("a/b"), "", grpc.StatusCode.INVALID_ARGUMENT, "stream"),
    ],
)
def test_what_is_refused_has_a_status_and_the_body_of_http_and_no_chunk(
    said: object, key: str | None, code: grpc.StatusCode, param: str | None
) -> None:
    async def story() -> None:
        rig = Rig(max_body_bytes=1000)
        async with rig.running() as channel:
            client = Client(channel, said) if key == "" else Client(channel, said, key=key)
            assert await client.hears() == []
            assert await client.code() is code
            assert (await client.error())["param"] == param
            assert rig.app.num_open == 0

    play(story())


def test_a_message_beyond_the_bound_is_never_taken_in() -> None:
    async def story() -> None:
        rig = Rig(max_body_bytes=1000)
        async with rig.running() as channel:
            client = Client(channel, start(body=b" " * (1 << 20)))
            assert await client.hears() == []
            assert await client.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    play(story())


def test_the_stream_of_another_tenant_is_not_there() -> None:
    async def story() -> None:
        rig = Rig()
        async with rig.running() as channel:
            await Client(channel, start(), x_request_id="mine").says()
            tells(await rig.stream(), 1)
            theirs = Client(channel, resume("mine"), key=OTHER_KEY)
            assert await theirs.hears() == []
            assert await theirs.code() is grpc.StatusCode.NOT_FOUND

    play(story())


def test_what_may_not_be_said_breaks_the_call_off_and_not_the_stream() -> None:
    async def story() -> None:
        rig = Rig()
        async with rig.running() as channel:
            client = await Client(channel, start(window=8)).says()
            stream = await rig.stream()
            tells(stream, 2)
            await client.hears(2)
            await client.says(pb.PredictRequest(ack=pb.Ack(seq=3)))
            await client.hears()
            assert await client.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (await client.error())["param"] == "seq"
            assert not stream.is_ended

    play(story())


def test_a_call_that_says_nothing_is_not_waited_for() -> None:
    async def story() -> None:
        rig = Rig(receive_s=0.05)
        async with rig.running() as channel:
            client = Client(channel)
            assert await client.hears() == []
            assert (await client.error())["code"] == "receive_timeout"

    play(story())


def test_a_client_that_takes_nothing_is_told_and_then_cut_off() -> None:
    async def story() -> None:
        rig = Rig(max_unread_s=1.5)
        async with rig.running() as channel:
            client = await Client(channel, start(window=1)).says()
            tells(await rig.stream(), 4)
            *_, last = await client.hears()
            assert (last.chunk_seq, last.error.code) == (1, "client_too_slow")
            assert await client.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    play(story())


def test_the_deadline_of_a_call_is_that_of_its_generation() -> None:
    async def story() -> None:
        rig = Rig()
        asked: list[float | None] = []
        opened = rig.service.open

        async def noting(order, caller, stages):  # type: ignore[no-untyped-def]
            asked.append(order.asks[0].deadline_s)
            return await opened(order, caller, stages)

        rig.service.open = noting  # type: ignore[method-assign]
        async with rig.running() as channel:
            await Client(channel, start(), timeout=30.0).says()
            await rig.stream(0)
            await Client(channel, start(headers={"x-headrace-deadline-ms": "100"}), timeout=30.0).says()
            await rig.stream(1)
            await Client(channel, start()).says()
            await rig.stream(2)
        assert asked[0] is not None and 20.0 < asked[0] < 31.0
        assert asked[1:] == [0.1, None]

    play(story())


def test_refusals_say_when_to_come_again() -> None:
    async def story() -> None:
        rig = Rig()

        async def full(order, caller, stages):  # type: ignore[no-untyped-def]
            raise QueueFull("Too much to do.", retry_after_s=2.5)

        rig.service.open = full  # type: ignore[method-assign]
        async with rig.running() as channel:
            client = Client(channel, start())
            assert await client.hears() == []
            assert await client.code() is grpc.StatusCode.UNAVAILABLE
            trailer = await client.trailer()
            assert (trailer["retry-after"], trailer["retry-after-ms"]) == ("3", "2500")

    play(story())


def test_health_says_what_it_does_not_know_and_tells_who_watches_of_changes() -> None:
    async def story() -> None:
        rig = Rig()
        statuses = health_pb2.HealthCheckResponse
        async with rig.running() as channel:
            health = HealthStub(channel)
            listed = (await health.List(health_pb2.HealthListRequest())).statuses
            assert {name: each.status for name, each in listed.items()} == dict.fromkeys(
                ("", SERVICE), statuses.SERVING
            )
            with pytest.raises(grpc.aio.AioRpcError) as told:
                await health.Check(health_pb2.HealthCheckRequest(service="elsewhere"))
            assert told.value.code() is grpc.StatusCode.NOT_FOUND
            unknown = health.Watch(health_pb2.HealthCheckRequest(service="elsewhere"))
            assert (await unknown.read()).status == statuses.SERVICE_UNKNOWN
            watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert (await watch.read()).status == statuses.SERVING
            rig.service.is_served = False
            assert (await watch.read()).status == statuses.NOT_SERVING

    play(story())


def test_health_follows_the_models_and_the_drain_and_open_calls_finish() -> None:
    async def story() -> None:
        rig = Rig()
        rig.service.is_served = False
        async with rig.running() as channel:
            health = HealthStub(channel)

            async def state(service: str) -> int:
                found: int = (await health.Check(health_pb2.HealthCheckRequest(service=service))).status
                return found

            statuses = health_pb2.HealthCheckResponse
            assert await state("") == await state(SERVICE) == statuses.NOT_SERVING
            rig.service.is_served = True
            while await state(SERVICE) != statuses.SERVING:
                await asyncio.sleep(0.05)
            client = await Client(channel, start()).says()
            stream = await rig.stream()
            rig.app.drain()
            finishing = asyncio.create_task(rig.face.finish())
            while await state("") != statuses.NOT_SERVING:
                await asyncio.sleep(0.01)
            late = Client(channel, start())
            assert await late.hears() == []
            assert await late.code() is grpc.StatusCode.UNAVAILABLE
            tells(stream, 1)
            ends(stream)
            assert (await client.hears())[-1].is_final
            await asyncio.wait_for(finishing, 30)

    play(story())


def test_metadata_beyond_its_bound_is_refused() -> None:
    async def story() -> None:
        rig = Rig()
        async with rig.running() as channel:
            client = Client(channel, start(), x_big="a" * (1 << 20))
            assert await client.hears() == []
            assert await client.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    play(story())


def test_a_request_is_in_the_books_as_one_of_grpc(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        rig = Rig()
        async with rig.running() as channel:
            client = await Client(channel, start(), x_request_id="mine").says()
            ends(await rig.stream())
            await client.hears()
            await eventually(lambda: rig.service.calls.count("finished"))

    caplog.set_level("INFO", "headrace.gateway")
    play(story())
    assert any(f"PREDICT /{SERVICE} 200" in line and "id=mine" in line for line in caplog.messages)
    assert json.dumps(caplog.messages).count("Bearer") == 0
