"""The server: serves, drains, stops; takes a new certificate while it runs."""

import asyncio
import contextlib
import os
import socket
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import NameOID

from headrace.gateway.certificate import Certificate
from headrace.gateway.server import DOORS, LINGER_S, _doors
from headrace.streams.record import Ending, Part, Usage
from tests.unit.gateway.live import PATIENCE_S, Live, Wire, play, running, trusting, write_pair
from tests.unit.gateway.stub import KEY, StubService, gateway

SAY = (
    b"POST /say HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %s\r\ncontent-type: application/json\r\n"
    b"content-length: 2\r\n\r\n{}" % KEY.encode()
)
GOOD = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def opened(live: Live, service: StubService) -> Wire:
    """A connection whose stream has said one word."""
    wire, num_before = await live.connect(), len(service.streams)
    await wire.send(SAY)
    while len(service.streams) == num_before:
        await asyncio.sleep(0.005)
    service.streams[-1].append([Part(0, text="a")])
    while await wire.line() != b'data: "a"\n':
        pass
    return wire


def test_a_server_that_stops_lets_streams_finish() -> None:
    async def story() -> None:
        service = StubService()
        app = gateway(service, drain_s=60.0)
        async with running(app) as live:
            idle = await live.connect()
            await idle.send(GOOD)
            await idle.answer()
            wire = await opened(live, service)
            live.stop.set()
            assert await idle.rest() == b""
            with pytest.raises(ConnectionRefusedError):
                await live.connect()
            service.streams[-1].append([Part(0, text="b")])
            service.streams[-1].end(Ending(Usage()))
            assert (await wire.rest()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            await asyncio.wait_for(live.done, PATIENCE_S)
            assert app.num_open == 0

    play(story())


def test_a_stream_that_does_not_finish_in_time_is_told_so() -> None:
    async def story() -> None:
        service = StubService()
        async with running(gateway(service, drain_s=0.2)) as live:
            wire = await opened(live, service)
            live.stop.set()
            rest = await wire.rest()
            assert b"shutting down" in rest
            assert rest.count(b"[DONE]") == 1
            await asyncio.wait_for(live.done, PATIENCE_S)
            assert service.calls == ["cancel overloaded", "finished"]

    play(story())


def test_a_server_in_a_hurry_tells_its_streams_so_and_does_not_wait_for_them() -> None:
    async def story() -> None:
        service = StubService()
        async with running(gateway(service, drain_s=10 * PATIENCE_S)) as live:
            wire, whole = await opened(live, service), await live.connect()
            await whole.send(SAY.replace(b"/say", b"/whole"))
            while len(service.streams) < 2:
                await asyncio.sleep(0.005)
            live.stop.set()
            await asyncio.sleep(0.05)
            assert not live.done.done()
            live.hurry.set()
            rest = await wire.rest()
            assert b"shutting down" in rest and rest.count(b"[DONE]") == 1 and rest.endswith(b"0\r\n\r\n")
            assert (await whole.answer())[0] == 503
            await asyncio.wait_for(live.done, PATIENCE_S)
            assert service.calls.count("cancel overloaded") == service.calls.count("finished") == 2

    play(story())


def test_a_stream_that_opens_when_the_others_were_told_is_told_as_well() -> None:
    async def story() -> None:
        service = StubService()
        async with running(gateway(service, drain_s=10 * PATIENCE_S)) as live:
            early, late = await opened(live, service), await live.connect()
            await late.send(SAY[:-1])  # it is admitted, and not whole
            async with asyncio.timeout(PATIENCE_S):
                while live.app.num_open < 2:
                    await asyncio.sleep(0.005)
            live.stop.set()
            live.hurry.set()
            assert b"shutting down" in await early.rest()
            await late.send(SAY[-1:])
            assert b"shutting down" in await late.rest()
            await asyncio.wait_for(live.done, PATIENCE_S)

    play(story())


def test_one_that_is_replaced_and_then_stopped_leaves_nothing_to_others() -> None:
    async def story() -> None:
        service = StubService()
        async with running(gateway(service, drain_s=10 * PATIENCE_S)) as live:
            wire = await opened(live, service)
            service.streams[-1].keeper = lambda stream, record: stream.publish()
            live.retire.set()
            await asyncio.sleep(LINGER_S + 0.2)
            live.stop.set()
            live.hurry.set()
            assert b"shutting down" in await wire.rest()
            await asyncio.wait_for(live.done, PATIENCE_S)
            assert service.calls == ["cancel overloaded", "finished"]

    play(story())


def test_one_that_is_replaced_still_answers_whom_it_has_accepted() -> None:
    async def story() -> None:
        service = StubService()
        async with running(gateway(service, drain_s=60.0)) as live:
            silent, wire = await live.connect(), await opened(live, service)
            await (idle := await live.connect()).send(GOOD)
            await idle.answer()
            live.retire.set()
            await asyncio.sleep(0.05)
            for connection in (silent, idle):
                await connection.send(GOOD)
                answer = await connection.rest()
                assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer
            service.streams[-1].end(Ending(Usage()))
            assert (await wire.rest()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            await asyncio.wait_for(live.done, PATIENCE_S)
            assert service.calls == ["finished"]

    play(story())


def test_one_that_is_replaced_leaves_what_is_kept_and_ends_what_is_not() -> None:
    async def story() -> None:
        service = StubService()
        async with running(gateway(service, drain_s=0.1)) as live:
            await opened(live, service)
            service.streams[-1].keeper = lambda stream, record: stream.publish()
            told = await opened(live, service)
            live.retire.set()
            assert b"shutting down" in await told.rest()
            await asyncio.wait_for(live.done, PATIENCE_S)
            assert service.calls == ["cancel overloaded", "finished"]
            assert [stream.is_ended for stream in service.streams] == [False, True]
            service.streams[0].end(Ending(Usage()))  # as if another had gone on with it: the rest of this scene may end

    play(story())


def test_a_server_that_starts_makes_no_other_wait_on_their_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        theirs.setblocking(False)
        # As a process has it that was given its number.
        ours = socket.socket(fileno=os.dup(theirs.fileno()))
        doors = _doors([ours])
        assert not os.get_blocking(theirs.fileno())
        assert len({door.fileno() for door in doors}) == len(doors) == DOORS
        with pytest.raises(BlockingIOError):
            theirs.accept()
        for door in doors:
            door.close()


def test_a_client_that_hangs_up_is_noticed_while_nothing_is_sent() -> None:
    async def story() -> None:
        service = StubService()
        async with running(gateway(service, disconnect_grace_s=0.0)) as live:
            wire = await opened(live, service)
            await wire.close()
            async with asyncio.timeout(PATIENCE_S):
                while service.calls != ["cancel disconnected", "finished"]:
                    await asyncio.sleep(0.005)

    play(story())


def test_a_client_that_never_reads_is_bounded_and_cut() -> None:
    async def story() -> None:
        service = StubService()
        app = gateway(service, max_unread_bytes=100_000, max_unread_s=0.3)
        async with running(app) as live:
            await opened(live, service)
            stream = service.streams[-1]
            async with asyncio.timeout(PATIENCE_S):
                while "pause" not in service.calls:
                    stream.append([Part(0, text="x" * 50_000)])
                    await asyncio.sleep(0.002)
                said_bytes = stream.text_bytes
                while "finished" not in service.calls:
                    await asyncio.sleep(0.01)
            assert said_bytes < 50_000_000
            assert service.calls == ["pause", "cancel client_too_slow", "finished"]
            other = await live.connect()
            await other.send(GOOD)
            assert (await other.answer())[0] == 200

    play(story())


def test_what_was_sent_is_not_taken_for_read_because_the_system_holds_it() -> None:
    async def story() -> None:
        service = StubService()
        app = gateway(service, max_unread_bytes=100_000, max_unread_s=0.3)
        async with running(app) as live:
            await opened(live, service)
            for _ in range(100):
                service.streams[-1].append([Part(0, text="x" * 10_000)])
            async with asyncio.timeout(PATIENCE_S):
                while "finished" not in service.calls:
                    await asyncio.sleep(0.01)
            assert "cancel client_too_slow" in service.calls

    play(story())


async def name_of(port: int) -> str:
    """The name in the certificate that a new connection is shown."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting())
    writer.write(GOOD)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()
    found = x509.load_der_x509_certificate(shown).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value)


def test_a_new_certificate_is_taken_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.gateway.certificate.POLL_S", 0.02)
    cert, key = write_pair(tmp_path, "old.example")

    async def story() -> None:
        async with running(gateway(tls_cert=cert, tls_key=key)) as live:
            assert await name_of(live.port) == "old.example"
            write_pair(tmp_path, "new.example")
            async with asyncio.timeout(PATIENCE_S):
                while await name_of(live.port) != "new.example":
                    await asyncio.sleep(0.02)

    play(story())


def test_files_that_do_not_fit_leave_the_old_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    certificate = Certificate(*write_pair(tmp_path, "old.example"))
    assert not certificate.reload_if_changed()
    (tmp_path / "cert.pem").write_text("half a file")
    assert not certificate.reload_if_changed()
    assert "old ones stay" in caplog.text
    (tmp_path / "cert.pem").unlink()
    assert not certificate.reload_if_changed()
    write_pair(tmp_path, "new.example")
    assert certificate.reload_if_changed()


def test_an_encrypted_key_is_refused_and_nobody_is_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cert, key = write_pair(tmp_path, "old.example")
    certificate = Certificate(cert, key)
    found = serialization.load_pem_private_key(Path(key).read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"secret")
    Path(key).write_bytes(found.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret))
    assert not certificate.reload_if_changed()
    assert "encrypted" in caplog.text
    with pytest.raises(ssl.SSLError, match="encrypted"):
        Certificate(cert, key)
