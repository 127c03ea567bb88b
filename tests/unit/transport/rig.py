"""Networks to test, a receiver that remembers, certificates, and a client that speaks raw bytes."""

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from msgspec import Struct

from headrace.core.ports import Link, Listener, Network
from headrace.transport.memory import MemoryNetwork
from headrace.transport.tls import TlsNetwork
from headrace.transport.unix import UnixNetwork
from headrace.transport.wire import Limits

PATIENCE_S = 60.0
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


class Note(Struct, frozen=True, tag="note"):
    number: int
    data: bytes = b""


class Order(Struct, frozen=True, tag="order"):
    ids: tuple[int, ...]


class Foreign(Struct, frozen=True, tag="foreign"):
    number: int


Known = Note | Order


def run(loop: str, story: Awaitable[None]) -> None:
    """A story that hangs fails; so does one that leaves an error on its loop, or a task that does not end by itself."""
    problems: list[str] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(str(context)))
        async with asyncio.timeout(PATIENCE_S):
            await story
            while asyncio.all_tasks() != {asyncio.current_task()}:
                await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(watched())
    assert not problems


class Ear:
    """Remembers what it heard. `answer` is done to each message, with the link it came by."""

    def __init__(self, link: Link, answer: Callable[[Link, Any], None] | None = None) -> None:
        self.link = link
        self.messages: list[Any] = []
        self.reasons: list[str] = []
        self._answer = answer
        self._changed = asyncio.Event()

    def received(self, message: Any) -> None:
        assert not self.reasons
        self.messages.append(message)
        self._changed.set()
        if self._answer is not None:
            self._answer(self.link, message)

    def closed(self, why: str) -> None:
        self.reasons.append(why)
        self._changed.set()

    async def heard(self, count: int) -> list[Any]:
        await self._until(lambda: len(self.messages) >= count or bool(self.reasons))
        return self.messages

    async def end(self) -> str:
        await self._until(lambda: bool(self.reasons))
        return self.reasons[0]

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()


def echo(link: Link, message: Any) -> None:
    link.send(message)


class Party:
    """A listener and those who dialled it; `guests` are the listener's ends, in order of arrival."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.listener: Listener | None = None
        self.guests: list[Ear] = []
        self._arrived = asyncio.Event()

    async def open(self, address: str, answer: Callable[[Link, Any], None] | None = None) -> str:
        def arrive(link: Link) -> Ear:
            self.guests.append(Ear(link, answer))
            self._arrived.set()
            return self.guests[-1]

        self.listener = await self.network.listen(address, arrive, Known)
        return self.listener.address

    async def dial(self, answer: Callable[[Link, Any], None] | None = None) -> Ear:
        assert self.listener is not None
        ears: list[Ear] = []

        def make(link: Link) -> Ear:
            ears.append(Ear(link, answer))
            return ears[-1]

        link = await self.network.dial(self.listener.address, make, Known)
        assert [ear.link for ear in ears] == [link]
        return ears[0]

    async def guest(self, index: int = 0) -> Ear:
        while len(self.guests) <= index:
            self._arrived.clear()
            await self._arrived.wait()
        return self.guests[index]

    async def pair(self) -> tuple[Ear, Ear]:
        """The dialler's end and the listener's, of a new link."""
        count = len(self.guests)
        here = await self.dial()
        return here, await self.guest(count)

    async def close(self) -> None:
        assert self.listener is not None
        await self.listener.close()


async def is_sound(ear: Ear, number: int = -1) -> bool:
    """Whether a link to an echoing listener still works."""
    count = len(ear.messages)
    ear.link.send(Note(number))
    await ear.heard(count + 1)
    return ear.messages[count:] == [Note(number)]


@dataclass(frozen=True, slots=True)
class Papers:
    cert: Path
    key: Path
    ca: Path

    def network(self, limits: Limits | None = None) -> TlsNetwork:
        return TlsNetwork(self.cert, self.key, self.ca, limits)

    def bare(self) -> ssl.SSLContext:
        """A client that believes the authority and shows nothing of its own."""
        return ssl.create_default_context(cafile=str(self.ca))


class Authority:
    """Signs certificates into a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.path = folder / f"{name}.ca.pem"
        self.path.write_bytes(_pem(self._sign(self._key, self._name, (), is_authority=True, days=(-1, 1))))

    def issue(
        self,
        name: str,
        *,
        hosts: tuple[str, ...] = ("127.0.0.1",),
        days: tuple[int, int] = (-1, 1),
        ca: Path | None = None,
    ) -> Papers:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        papers = Papers(self._folder / f"{name}.pem", self._folder / f"{name}.key", ca or self.path)
        papers.cert.write_bytes(_pem(self._sign(key, subject, hosts, is_authority=False, days=days)))
        papers.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return papers

    def _sign(
        self,
        key: ec.EllipticCurvePrivateKey,
        subject: x509.Name,
        hosts: tuple[str, ...],
        *,
        is_authority: bool,
        days: tuple[int, int],
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + datetime.timedelta(days=days[0]))
            .not_valid_after(now + datetime.timedelta(days=days[1]))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        if hosts:
            names: list[x509.GeneralName] = [_host(host) for host in hosts]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def make_network(kind: str, folder: Path, limits: Limits | None = None) -> tuple[Network, str]:
    """A network and an address to listen at. `folder` is 0700."""
    if kind == "unix":
        return UnixNetwork(limits), str(folder / "s")
    if kind == "memory":
        return MemoryNetwork(limits), "somewhere"
    return Authority(folder, "authority").issue("host").network(limits), "127.0.0.1:0"
