"""Streams on every face whose connection is cut after every frame, while gateways die: the pieces are the whole, once."""

import asyncio
import http.client
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.gateway.grpc import headrace_pb2 as pb
from headrace.gateway.grpc.call import SERVICE
from tests.api.live_server import LiveServer, eventually, free_port, live_server, written
from tests.services import redis_server
from tests.socket_client import Closed, opened

NUM_TOKENS = 200
CONFIG = """
[gateway]
processes = {gateways}
journal = "{journal}"
resume_s = 60.0
disconnect_grace_s = 60.0
[[models]]
name = "fake"
runner = "fake"
workers = 2
[models.fake]
profile = {{ c0_s = 0.02, c_in_s = 1e-6, c_out_s = 1e-6, c_kv_s = 0.0, c_att_s = 0.0 }}
"""
BODY = {
    "model": "fake",
    "prompt": "Once upon a time",
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "seed": 7,
    "return_token_ids": True,
    "stream": True,
}
PATIENCE_S = 180.0
# When every reader has so many frames, a gateway is killed.
KILLS = (30, 80, 130)
AGAIN_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

Piece = tuple[int, str, list[int]]


class CutReader(threading.Thread):
    """One stream, a connection for each of its frames."""

    def __init__(self, server: LiveServer, stream: str) -> None:
        super().__init__()
        self.stream = stream
        self.pieces: list[Piece] = []
        self.is_over = False
        self.broken: BaseException | None = None
        self._server = server
        self.start()

    @property
    def after(self) -> int:
        return self.pieces[-1][0] if self.pieces else 0

    def run(self) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        try:
            while not self.is_over:
                assert time.monotonic() < give_up_s, f"it did not go on behind {self.after}"
                try:
                    self._take_one()
                except (OSError, EOFError, http.client.HTTPException, Closed, grpc.RpcError):
                    time.sleep(0.02)
        except BaseException as broken:  # noqa: BLE001 - told to who waits for this thread
            self.broken = broken

    def _take_one(self) -> None:
        raise NotImplementedError


class Events(CutReader):
    def _take_one(self) -> None:
        with self._server.connect() as connection:
            headers = {"authorization": f"Bearer {self._server.key}", "x-request-id": self.stream}
            if self.pieces:
                connection.request("GET", f"/v1/streams/{self.stream}?after={self.after}", headers=headers)
            else:
                named = {**headers, "content-type": "application/json"}
                connection.request("POST", "/v1/completions", json.dumps(BODY), named)
            response = connection.getresponse()
            come_again(response.status, response)
            for number, line in numbered(response):
                self.is_over = line == b"data: [DONE]\n"
                if not self.is_over:
                    self.pieces.append((number, *said(json.loads(line[6:])["choices"])))
                return
        raise EOFError


class Sockets(CutReader):
    def _take_one(self) -> None:
        asyncio.run(self._take())

    async def _take(self) -> None:
        async with opened(self._server.port, self._server.key) as client:
            if self.pieces:
                await client.say(type="resume", stream=self.stream, after=self.after)
            else:
                headers = {"x-request-id": self.stream}
                await client.say(type="start", id="a", api="completions", body=BODY, headers=headers)
                assert (await client.hear())["stream"] == self.stream
            heard = await client.hear()
            come_again(heard.get("status", 200), heard)
            self.is_over = heard["type"] == "end"
            if not self.is_over:
                self.pieces.append((heard["seq"], *said(heard["chunk"]["choices"])))


class Calls(CutReader):
    def _take_one(self) -> None:
        name, request = "ResumePredict", pb.ResumeRequest(resume=pb.Resume(stream=self.stream, after=self.after))
        if not self.pieces:
            start = pb.Start(api="completions", body=json.dumps(BODY).encode())
            name, request = "Predict", pb.PredictRequest(start=start)
        metadata = [("authorization", f"Bearer {self._server.key}"), ("x-request-id", self.stream)]
        with closing(grpc.insecure_channel(self._server.ready["grpc"])) as channel:
            ask = channel.stream_stream(
                f"/{SERVICE}/{name}", lambda each: each.SerializeToString(), pb.PredictChunk.FromString
            )
            call = ask(iter([request]), metadata=metadata, timeout=PATIENCE_S)
            try:
                chunk = next(call)
            except grpc.RpcError as error:
                if error.code() in AGAIN_CODES:
                    raise
                raise AssertionError(error) from error
            call.cancel()
        self.is_over = chunk.is_final
        text = "".join(choice.text for choice in chunk.choices)
        if not self.is_over:
            self.pieces.append((chunk.chunk_seq, text, [id for choice in chunk.choices for id in choice.token_ids]))


def come_again(status: int, answer: object) -> None:
    """A gateway that cannot know yet says so; that a stream is not known is no answer to who keeps asking."""
    if status == 503:
        raise OSError
    assert status == 200, (status, answer)


def numbered(lines: Any) -> Iterator[tuple[int, bytes]]:
    """Every line of data with the number of its frame."""
    number = 0
    for line in lines:
        if line.startswith(b"id: "):
            number = int(line[4:])
        elif line.startswith(b"data: "):
            yield number, line


def said(choices: list[dict[str, Any]]) -> tuple[str, list[int]]:
    return "".join(choice["text"] for choice in choices), [id for choice in choices for id in choice["token_ids"]]


def read_whole(server: LiveServer, method: str, path: str, body: Any = None) -> list[Piece]:
    """Uncut."""
    with server.connect() as connection:
        response = server.send(connection, method, path, body)
        assert response.status == 200, response.read()
        found = [(number, line) for number, line in numbered(response) if line != b"data: [DONE]\n"]
    return [(number, *said(json.loads(line[6:])["choices"])) for number, line in found]


def joined(pieces: list[Piece]) -> tuple[str, list[int]]:
    return "".join(text for _, text, _ in pieces), [id for *_, ids in pieces for id in ids]


@contextmanager
def served(home: Path, gateways: int) -> Iterator[LiveServer]:
    with (
        tempfile.TemporaryDirectory() as folder,
        redis_server(Path(folder)) if gateways > 1 else nullcontext("file") as journal,
    ):
        config = written(home, CONFIG.format(gateways=gateways, journal=journal))
        with live_server(home, "--config", str(config), "--grpc-port", str(free_port())) as server:
            yield server


@pytest.mark.parametrize("gateways", [1, 2])
def test_cut_after_every_frame_while_gateways_die_the_pieces_are_the_whole(home: Path, gateways: int) -> None:
    with served(home, gateways) as server:
        truth = joined(read_whole(server, "POST", "/v1/completions", BODY))
        assert len(truth[1]) == NUM_TOKENS
        names = ["gateway"] if gateways == 1 else [f"gateway {index}" for index in range(gateways)]
        readers = [kind(server, kind.__name__) for kind in (Events, Sockets, Calls)]
        for number, least in enumerate(KILLS):
            eventually(lambda least=least: is_far(readers, least), "a stream does not go on", PATIENCE_S)  # type: ignore[misc]
            os.kill(server.child(names[number % gateways]), signal.SIGKILL)
        for reader in readers:
            reader.join(PATIENCE_S)
            assert reader.is_over, f"{reader.stream} broke: {reader.broken!r}"
            numbers = [number for number, *_ in reader.pieces]
            assert numbers == sorted(set(numbers)), f"{reader.stream}: a frame came twice"
            assert joined(reader.pieces) == truth, reader.stream
            again = read_whole(server, "GET", f"/v1/streams/{reader.stream}?after=0")
            assert joined(again) == truth, f"{reader.stream} is another when it is read again"
        total = server.figure("headrace_replica_total_blocks")
        eventually(lambda: server.figure("headrace_replica_free_blocks") == total, "blocks are left behind")


def is_far(readers: Sequence[CutReader], least: int) -> bool:
    for reader in readers:
        if reader.broken is not None:
            raise AssertionError(f"{reader.stream} broke") from reader.broken
    return all(reader.is_over or len(reader.pieces) >= least for reader in readers)
