"""A load over TLS: a server that its authority vouches for is asked, another is not."""

import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from msgspec import structs

from headrace.cli.load.outcome import State
from headrace.sim.arrivals import Together
from tests.unit.cli.load.stub import drive, plan, serving

pytestmark = pytest.mark.unit


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that vouches for itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "load")])
    now = datetime.now(UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    certificate = builder.add_extension(address, critical=False).sign(key, hashes.SHA256())
    paths = tmp_path / "cert.pem", tmp_path / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return paths


@pytest.mark.parametrize(("trusted", "state"), [(True, State.FINISHED), (False, State.BROKEN)])
def test_only_a_server_that_is_vouched_for_is_asked(pair: tuple[Path, Path], trusted: bool, state: State) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*pair)

    async def load() -> None:
        async with serving(tls=tls) as server:
            if trusted:
                server.endpoint = structs.replace(server.endpoint, ca=str(pair[0]))
            record, _ = await drive(server, plan(Together(3)))
            assert len(server.asks) == (3 if trusted else 0)
        assert [one.state for one in record.outcomes] == [state] * 3
        assert trusted or "certificate" in record.outcomes[0].message

    uvloop.run(load())
