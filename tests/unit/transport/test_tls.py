import asyncio
import socket
import ssl
from pathlib import Path

import pytest

from headrace.core.errors import InvalidInput, Unreachable
from headrace.core.ports import Network
from headrace.transport.tls import TlsNetwork
from headrace.transport.wire import PREAMBLE, Limits
from tests.unit.transport.rig import LOOPS, Authority, Ear, Known, Note, Papers, Party, echo, is_sound, run

ANYWHERE = "127.0.0.1:0"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def host(authority: Authority) -> Papers:
    return authority.issue("host")


async def siege(host: Papers, network: Network) -> None:
    """`network` may not dial `host`, meets no receiver, and a good link does not notice."""
    party = Party(host.network())
    address = await party.open(ANYWHERE, echo)
    good = await party.dial()
    with pytest.raises(Unreachable):
        await network.dial(address, Ear, Known)
    assert len(party.guests) == 1 and await is_sound(good)
    await party.close()


async def siege_by(host: Papers, context: ssl.SSLContext) -> None:
    """The same, by a client that is not ours."""
    party = Party(host.network())
    _, port = (await party.open(ANYWHERE, echo)).split(":")
    good = await party.dial()
    heard = b""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port), ssl=context)
        try:
            writer.write(PREAMBLE)
            heard = await reader.read()
        finally:
            writer.transport.abort()
    except (ssl.SSLError, ConnectionError):
        pass
    assert heard == b"" and len(party.guests) == 1 and await is_sound(good)
    await party.close()


@pytest.mark.parametrize("loop", LOOPS)
class TestWhoMayNotEnter:
    def test_nobody_without_a_certificate(self, host: Papers, loop: str) -> None:
        run(loop, siege_by(host, host.bare()))

    def test_nobody_of_a_foreign_authority(self, host: Papers, tmp_path: Path, loop: str) -> None:
        run(loop, siege(host, Authority(tmp_path, "theirs").issue("guest", ca=host.ca).network()))

    def test_nobody_whose_certificate_has_expired(self, host: Papers, authority: Authority, loop: str) -> None:
        run(loop, siege(host, authority.issue("old", days=(-9, -1)).network()))

    def test_nobody_whose_certificate_is_not_valid_yet(self, host: Papers, authority: Authority, loop: str) -> None:
        run(loop, siege(host, authority.issue("young", days=(1, 9)).network()))

    def test_nobody_with_an_older_protocol(self, host: Papers, loop: str) -> None:
        context = host.bare()
        context.load_cert_chain(host.cert, host.key)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        run(loop, siege_by(host, context))

    def test_nobody_without_tls(self, host: Papers, loop: str) -> None:
        async def story() -> None:
            party = Party(host.network(Limits(greeting_s=0.5)))
            _, port = (await party.open(ANYWHERE, echo)).split(":")
            good = await party.dial()
            for data in (PREAMBLE, b"GET / HTTP/1.1\r\n\r\n", b""):
                reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
                writer.write(data)
                assert PREAMBLE not in await reader.read()
                writer.transport.abort()
            assert len(party.guests) == 1 and await is_sound(good)
            await party.close()

        run(loop, story())


@pytest.mark.parametrize("loop", LOOPS)
class TestWhomNotToTrust:
    """The dialler's side: it says nothing to a host that is not the one it meant."""

    def play(self, server: Papers, client: Papers, loop: str, match: str) -> None:
        async def story() -> None:
            party = Party(server.network())
            address = await party.open(ANYWHERE, echo)
            with pytest.raises(Unreachable, match=match):
                await client.network().dial(address, Ear, Known)
            assert not party.guests
            await party.close()

        run(loop, story())

    def test_a_foreign_authority(self, host: Papers, tmp_path: Path, loop: str) -> None:
        self.play(Authority(tmp_path, "theirs").issue("liar", ca=host.ca), host, loop, "verify failed")

    def test_an_expired_certificate(self, host: Papers, authority: Authority, loop: str) -> None:
        self.play(authority.issue("old", days=(-9, -1)), host, loop, "expired")

    def test_another_hosts_certificate(self, host: Papers, authority: Authority, loop: str) -> None:
        self.play(authority.issue("other", hosts=("other.example", "10.0.0.1")), host, loop, "mismatch")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_listener_closes_while_somebody_shakes_no_hands(host: Papers, loop: str) -> None:
    async def story() -> None:
        party = Party(host.network(Limits(greeting_s=0.3)))
        _, port = (await party.open(ANYWHERE)).split(":")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        assert await carries(party)
        await party.close()
        assert await reader.read() == b"" and not party.guests[1:]
        writer.transport.abort()

    run(loop, story())


async def carries(party: Party) -> bool:
    here, there = await party.pair()
    here.link.send(Note(1))
    return await there.heard(1) == [Note(1)]


@pytest.mark.parametrize("loop", LOOPS)
def test_one_who_never_reads_is_left_with_little(host: Papers, loop: str) -> None:
    """Neither loop counts what TLS has handed to TCP, so the link must not hand over much."""

    async def story() -> None:
        party = Party(host.network(Limits(max_pending_bytes=4 << 20)))
        _, port = (await party.open(ANYWHERE)).split(":")
        context = host.bare()
        context.load_cert_chain(host.cert, host.key)
        _, writer = await asyncio.open_connection("127.0.0.1", int(port), ssl=context, limit=1)
        writer.write(PREAMBLE)
        victim = await party.guest(0)
        sent_bytes = 0
        while not victim.reasons:
            victim.link.send(Note(1, bytes(100_000)))
            sent_bytes += 100_000
            await asyncio.sleep(0)
        assert "4194304 bytes wait" in victim.reasons[0]
        assert sent_bytes < 64 << 20  # the bound, and what the kernel's buffers take
        writer.transport.abort()
        await party.close()

    run(loop, story())


def test_a_name_is_checked_as_well_as_an_address(authority: Authority) -> None:
    async def story() -> None:
        party = Party(authority.issue("named", hosts=("localhost",)).network())
        address = await party.open("localhost:0", echo)
        assert address.startswith("localhost:")
        assert await is_sound(await party.dial())
        with pytest.raises(Unreachable):
            await party.network.dial(address.replace("localhost", "127.0.0.1"), Ear, Known)
        await party.close()

    run("asyncio", story())


def test_it_listens_where_it_was_told_and_nowhere_else(host: Papers) -> None:
    async def story() -> None:
        party = Party(host.network())
        _, port = (await party.open(ANYWHERE)).split(":")
        with socket.socket() as elsewhere:
            elsewhere.bind(("127.0.0.2", int(port)))  # taken, were it listening on every address
            elsewhere.listen()
        await party.close()

    run("asyncio", story())


@pytest.mark.parametrize("address", ["", ":80", "host", "host:", "host:x", "host:65536", "host:-1", "host:٣"])
def test_an_address_has_a_host_and_a_port(host: Papers, address: str) -> None:
    async def story() -> None:
        with pytest.raises(InvalidInput, match="host:port"):
            await host.network().listen(address, Ear, Known)
        with pytest.raises(InvalidInput, match="host:port"):
            await host.network().dial(address, Ear, Known)

    run("asyncio", story())


def test_files_that_are_not_what_they_should_be(host: Papers, authority: Authority, tmp_path: Path) -> None:
    other = authority.issue("other")
    empty = tmp_path / "empty"
    empty.touch()
    for cert, key, ca, param in (
        (host.cert, host.key, tmp_path / "missing", "ca"),
        (host.cert, host.key, empty, "ca"),
        (tmp_path / "missing", host.key, host.ca, "cert"),
        (host.cert, empty, host.ca, "cert"),
        (host.cert, other.key, host.ca, "cert"),
    ):
        with pytest.raises(InvalidInput) as caught:
            TlsNetwork(cert, key, ca)
        assert caught.value.param == param
