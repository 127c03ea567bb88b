"""A real `headrace serve` in a process of its own, on a free port, with a home of its own."""

import http.client
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

START_S = 120.0
# For what is done in a moment where nothing else is: a machine may have to do much else.
PATIENCE_S = 60.0


class LiveServer:
    """Up when it is made. `log` is all it said, for whoever reads a failure."""

    def __init__(self, home: Path, *argv: str) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home = home
        self.log = home / "serve.log"
        environment = {name: value for name, value in os.environ.items() if name != "HEADRACE_LOCAL_KEY"}  # noqa: TID251
        command = [sys.executable, "-m", "headrace.cli.main", "serve", "--port", "0", "--json", *argv]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, env={**environment, "HEADRACE_HOME": str(home)}
            )
        try:
            self.ready: dict[str, Any] = json.loads(self._first_line())
        except BaseException:
            self.close()
            raise
        self.url: str = self.ready["url"]
        self.port = int(self.url.rpartition(":")[2])
        self.key = (home / "key").read_text().strip()
        self.pid = self._process.pid

    def _first_line(self) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        deadline_s = time.monotonic() + START_S
        while not select.select([stdout], [], [], 1.0)[0]:
            assert time.monotonic() < deadline_s, f"the server did not come up:\n{self.log.read_text()}"
        line = stdout.readline()
        assert line, f"the server ended with {self._process.wait()}:\n{self.log.read_text()}"
        return line

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def children(self) -> dict[str, int]:
        """Process ids by title, of those that are alive."""
        return {_title(pid): pid for pid in descendants(self.pid)}

    def child(self, role: str) -> int:
        """`role` as in the title: gateway, or worker NAME INDEX."""
        return eventually(lambda: self.children().get(f"headrace: {role}"), f"no {role}")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        return self._process.wait(timeout_s)

    def ask(self, method: str, path: str, body: Any = None, *, key: str | None = None) -> tuple[int, Any]:
        """Status and JSON of one request."""
        with self.connect() as connection:
            response = self.send(connection, method, path, body, key=key)
            return response.status, json.loads(response.read() or b"null")

    def stream(self, **fields: Any) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed chat; ends after [DONE], fails without it."""
        body = {"model": "default", "stream": True, "messages": [{"role": "user", "content": "Hello"}], **fields}
        with self.connect() as connection:
            response = self.send(connection, "POST", "/v1/chat/completions", body)
            assert response.status == 200, response.read()
            for line in response:
                if line == b"data: [DONE]\n":
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
        raise AssertionError("the stream broke off")

    def text(self, **fields: Any) -> str:
        """A streamed chat's whole answer."""
        choices = [choice for chunk in self.stream(**fields) for choice in chunk["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    def figure(self, name: str, **labels: str) -> float:
        """A metric, summed over the series that have these labels."""
        with self.connect() as connection:
            lines = self.send(connection, "GET", "/metrics", None).read().decode().splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [line.rpartition(" ") for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(value) for series, _, value in found if all(each in series for each in wanted))

    @contextmanager
    def connect(self) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            yield connection
        finally:
            connection.close()

    def send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any, *, key: str | None = None
    ) -> http.client.HTTPResponse:
        headers = {"Authorization": f"Bearer {key or self.key}", "Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return connection.getresponse()

    def close(self) -> None:
        """Ends it, gently if it is still there."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def live_server(home: Path, *argv: str) -> Iterator[LiveServer]:
    server = LiveServer(home, *argv)
    try:
        yield server
    finally:
        server.close()


def written(home: Path, text: str) -> Path:
    """A configuration file with this text, all at once: a server may be watching it."""
    home.mkdir(parents=True, exist_ok=True)
    path = home / "headrace.toml"
    draft = home / "headrace.toml.new"
    draft.write_text(text)
    draft.replace(path)
    return path


def free_port() -> int:
    """Drawn, and below those that the system gives to whoever wants any: free for the seconds until a server has it."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def eventually(look: Callable[[], T | None], otherwise: str, within_s: float = PATIENCE_S) -> T:
    """What `look` finds, as soon as it finds anything."""
    deadline_s = time.monotonic() + within_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline_s, otherwise
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """All processes below this one that are not zombies."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found, front = [], [pid]
    while front:
        front = [child for child, parent in parents.items() if parent in front]
        found += front
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _title(pid: int) -> str:
    """One that is only starting may not have its title yet."""
    try:
        said = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
    return "headrace: limited" if "headrace.text.limited_child" in said else said
