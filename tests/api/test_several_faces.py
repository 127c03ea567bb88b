"""WebSocket and gRPC over two gateways with a Redis between them: one of them dies, or stands still, in mid-stream. What
its clients read on elsewhere is what they would have read."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.gateway.grpc import headrace_pb2 as pb
from headrace.gateway.grpc.call import SERVICE
from tests.api.kinds import KINDS
from tests.api.live_server import LiveServer, eventually, free_port
from tests.api.test_several_gateways import connected, folder, two_gateways
from tests.socket_client import Closed, SocketClient

__all__ = ["folder"]
# Steps of 20 ms: they last until a gateway was found and killed.
NUM_TOKENS = 300
PATIENCE_S = 120.0
AGAIN_S = 0.2
Said = dict[str, list[tuple[int, Any]]]


def body_of(number: int) -> dict[str, Any]:
    asked = {"model": "fake", "messages": [{"role": "user", "content": f"question {number}"}]}
    return {**asked, "seed": number, "max_tokens": NUM_TOKENS, **KINDS[number]}


@asynccontextmanager
async def socket_at(server: LiveServer, index: int | None = None) -> AsyncIterator[SocketClient]:
    """Over a connection that this gateway has taken, or any."""
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        text = await reader.readexactly(size)
        if index is None or b'headrace_gateway{index="%d"}' % index in text:
            break
        writer.close()
    client = SocketClient(reader, writer)
    await client.open(server.key)
    try:
        yield client
    finally:
        await client.leave()


class Socket:
    """All kinds of streams on one socket, as a client keeps them: what it heard of each, by number."""

    def __init__(self, run: str) -> None:
        self.said: Said = {f"{run}-{number}": [] for number in range(len(KINDS))}
        self.ends: dict[str, dict[str, Any]] = {}

    async def start(self, client: SocketClient) -> None:
        for number, id in enumerate(self.said):
            headers = {"x-request-id": id}
            await client.say(type="start", id=id, api="chat", body=body_of(number), headers=headers)

    async def resume(self, client: SocketClient) -> None:
        for id in self.said:
            if id not in self.ends:
                await self._resume(client, id)

    async def _resume(self, client: SocketClient, id: str) -> None:
        said = self.said[id]
        await client.say(type="resume", stream=id, after=said[-1][0] if said else 0)

    async def hear(self, client: SocketClient, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Until every stream has ended here, or it is enough."""
        while len(self.ends) < len(self.said) and not is_enough():
            message = await client.hear()
            if message["type"] == "error" and message["status"] == 503:
                # Nobody can know yet.
                await asyncio.sleep(AGAIN_S)
                await self._resume(client, message["stream"])
                continue
            assert message["type"] in ("started", "frame", "end"), message
            if message["type"] == "frame":
                said = self.said[message["stream"]]
                assert not said or message["seq"] > said[-1][0], "a frame was repeated"
                said.append((message["seq"], message["chunk"]["choices"]))
            elif message["type"] == "end":
                self.ends[message["stream"]] = message

    @property
    def is_begun(self) -> bool:
        return all(len(said) > 2 for said in self.said.values())

    @property
    def told(self) -> list[Any]:
        """What each choice of each stream said, in whatever pieces."""
        assert all(end["error"] is None for end in self.ends.values()), self.ends
        return [told([choice for _, choices in said for choice in choices]) for said in self.said.values()]


def told(choices: list[dict[str, Any]]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for choice in choices:
        said = found.setdefault(choice["index"], ["", "", None])
        said[0] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls") or ():
            said[1] += call["function"].get("name", "") + (call["function"].get("arguments") or "")
        said[2] = choice["finish_reason"] or said[2]
    return found


async def undisturbed(server: LiveServer) -> list[Any]:
    calm = Socket("calm")
    async with socket_at(server) as client:
        await calm.start(client)
        await calm.hear(client)
    return calm.told


def test_a_socket_whose_gateway_is_killed_is_gone_on_with_at_the_other(home: Path, folder: Path) -> None:
    async def story(server: LiveServer) -> None:
        truth = await undisturbed(server)
        wild = Socket("wild")
        async with socket_at(server, 0) as client:
            await wild.start(client)
            await wild.hear(client, lambda: wild.is_begun)
            os.kill(server.child("gateway 0"), signal.SIGKILL)
            with pytest.raises(Closed):
                await wild.hear(client)
        async with socket_at(server, 1) as client:
            await wild.resume(client)
            await wild.hear(client)
        assert wild.told == truth

    with two_gateways(home, folder) as server:
        asyncio.run(story(server))


def test_a_gateway_that_stood_still_says_nothing_that_another_says_for_it(home: Path, folder: Path) -> None:
    """Longer than its lease: its streams are another's when it wakes up, with all that is still on its way to it."""

    async def story(server: LiveServer) -> None:
        truth = await undisturbed(server)
        wild, zombie = Socket("wild"), Socket("wild")
        stopped = server.child("gateway 0")
        async with socket_at(server, 0) as client:
            await zombie.start(client)
            await zombie.hear(client, lambda: zombie.is_begun)
            os.kill(stopped, signal.SIGSTOP)
            try:
                wild.said = {id: list(said) for id, said in zombie.said.items()}
                async with socket_at(server, 1) as elsewhere:
                    await wild.resume(elsewhere)
                    # It takes a lease that is over, and then the rest.
                    await asyncio.wait_for(wild.hear(elsewhere), PATIENCE_S)
            finally:
                os.kill(stopped, signal.SIGCONT)
            assert wild.told == truth
            await asyncio.wait_for(zombie.hear(client), PATIENCE_S)
        for id, said in zombie.said.items():
            assert said == wild.said[id][: len(said)], "it said something else"
            end = zombie.ends[id]
            if end["error"] is None:  # it was over before
                assert said == wild.said[id]
            else:
                assert end["error"]["code"] == "stream_moved"
                # Whoever goes on behind it misses nothing.
                assert not [number for number, _ in wild.said[id][len(said) :] if number <= end["seq"]]

    with two_gateways(home, folder) as server:
        asyncio.run(story(server))


def calls(port: int, first: Any, key: str, **metadata: str) -> Any:
    """Over a connection of its own: which gateway has it is the kernel's choice."""
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])
    method = "ResumePredict" if isinstance(first, pb.ResumeRequest) else "Predict"
    call = channel.stream_stream(
        f"/{SERVICE}/{method}",
        request_serializer=lambda each: each.SerializeToString(),
        response_deserializer=pb.PredictChunk.FromString,
    )
    sent = [("authorization", f"Bearer {key}"), *((name.replace("_", "-"), value) for name, value in metadata.items())]
    return call(iter([first]), metadata=sent, timeout=PATIENCE_S, wait_for_ready=True)


def chunks_told(chunks: list[pb.PredictChunk]) -> list[tuple[str, list[int], str]]:
    found: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            said = found.setdefault(choice.index, ["", [], ""])
            said[0] += choice.text
            said[1] += choice.token_ids
            said[2] += choice.finish_reason
    return [(text, ids, finish) for _, (text, ids, finish) in sorted(found.items())]


def owner_of(server: LiveServer) -> int:
    """The gateway that is speaking."""

    def look() -> list[int]:
        found = []
        for index in (0, 1):
            with connected(server, index) as connection:
                text = connection.send("GET", "/metrics").read().decode()
            if "\nheadrace_open_streams 1.0" in text:
                found.append(index)
        return [index + 1 for index in found]

    return eventually(look, "nobody has the stream")[0] - 1


def test_a_call_whose_gateway_is_killed_is_gone_on_with_at_the_other(home: Path, folder: Path) -> None:
    port = free_port()
    with two_gateways(home, folder, "--grpc-port", str(port)) as server:
        body = json.dumps(body_of(7)).encode()
        start = pb.PredictRequest(start=pb.Start(api="chat", body=body))
        truth = list(calls(port, start, server.key))
        call = calls(port, start, server.key, x_request_id="wild")
        heard = [next(call) for _ in range(10)]
        os.kill(server.child(f"gateway {owner_of(server)}"), signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as lost:
            heard.extend(call)
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        give_up_s = time.monotonic() + PATIENCE_S
        while not heard[-1].is_final:
            assert time.monotonic() < give_up_s, "it did not go on"
            again = pb.ResumeRequest(resume=pb.Resume(stream="wild", after=heard[-1].chunk_seq))
            try:
                heard.extend(calls(port, again, server.key))
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                time.sleep(AGAIN_S)
        assert chunks_told(heard) == chunks_told(truth) and len(chunks_told(truth)) == 4
        numbers = [chunk.chunk_seq for chunk in heard]
        assert numbers == sorted(set(numbers))
        assert (
            heard[-1].is_final
            and heard[-1].usage.completion_tokens == truth[-1].usage.completion_tokens == 4 * NUM_TOKENS
        )
