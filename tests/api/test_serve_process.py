"""`headrace serve` as a process: it comes up, survives its children, reads its file again, and leaves nothing behind."""

import http.client
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headrace.accounts.keys import hash_key
from tests.api.live_server import (
    PATIENCE_S,
    START_S,
    LiveServer,
    descendants,
    eventually,
    free_port,
    is_alive,
    live_server,
    written,
)

SLOW = '[[models]]\nname = "fake"\nrunner = "fake"\n[models.fake.profile]\nc0_s = 0.05\n'
WHEN = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
CHAT = {"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}


class Listener(threading.Thread):
    """A client that reads one stream to its end."""

    def __init__(self, server: LiveServer, **fields: Any) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.finish: str | None = None
        self.failure: dict[str, Any] | None = None
        self.error: BaseException | None = None
        self._server, self._fields = server, fields

    def run(self) -> None:
        try:
            for chunk in self._server.stream(**self._fields):
                self.begun.set()
                self.failure = chunk.get("error", self.failure)
                for choice in chunk.get("choices", ()):
                    self.finish = choice["finish_reason"] or self.finish
        except (AssertionError, OSError) as error:
            self.error = error
        finally:
            self.begun.set()


def opened(server: LiveServer, **fields: Any) -> Listener:
    listener = Listener(server, **fields)
    listener.start()
    assert listener.begun.wait(PATIENCE_S)
    return listener


def works(server: LiveServer) -> bool:
    try:
        return server.ask("POST", "/v1/chat/completions", CHAT)[0] == 200
    except OSError:
        return False


def test_an_answer_streams_and_strangers_get_none(fake_server: LiveServer) -> None:
    chunks = list(fake_server.stream(max_tokens=5))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]][-1] == "length"
    assert fake_server.ask("POST", "/v1/chat/completions", CHAT, key="not-a-key-of-this-server")[0] == 401


def test_the_printed_curl_streams_an_answer(fake_server: LiveServer) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    line = fake_server.ready["curl"].replace('"temperature"', '"max_tokens": 5, "temperature"')
    said = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=START_S, check=True).stdout
    assert said.count("data: {") > 1 and said.endswith("data: [DONE]\n\n")


def test_the_chat_command_talks_to_it(fake_server: LiveServer) -> None:
    command = [
        sys.executable,
        "-m",
        "headrace.cli.main",
        "chat",
        "Hello",
        "--url",
        fake_server.url,
        "--max-tokens",
        "20",
    ]
    said = subprocess.run(
        [*command, "--key", fake_server.key], capture_output=True, text=True, timeout=START_S, check=True
    )
    assert len(said.stdout) > 5


def test_processes_are_named_and_their_folder_is_private(fake_server: LiveServer) -> None:
    assert fake_server.child("gateway") and fake_server.child("worker fake 0")
    (folder,) = (fake_server.home / "run").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 or path.is_socket() for path in folder.iterdir())
    for pid in descendants(fake_server.pid):
        assert fake_server.key.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        assert fake_server.key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_killed_worker_is_replaced(home: Path) -> None:
    with live_server(home, "--runner", "fake") as server:
        first = server.child("worker fake 0")
        subprocess.run(["kill", "-9", str(first)], check=True)
        eventually(lambda: "worker fake 0 is back" in server.said(), "the worker did not come back")
        assert eventually(lambda: works(server), "no answers")
        assert server.child("worker fake 0") != first


def test_the_log_tells_when_something_was_and_what_is_below_its_level_is_not_in_it(
    home: Path, fake_server: LiveServer
) -> None:
    assert works(fake_server)
    asked = rf"(?m)^{WHEN} INFO headrace\.gateway: POST /v1/chat/completions 200 .* worker=fake/0$"
    eventually(lambda: re.search(asked, fake_server.said()), "the request is not in the log")
    with live_server(home, "--runner", "fake", "--log-level", "warning") as server:
        assert works(server)
        subprocess.run(["kill", "-9", str(server.child("worker fake 0"))], check=True)
        died = rf"(?m)^{WHEN} WARNING headrace\.control: worker fake 0 died \(SIGKILL\); starting it again in "
        eventually(lambda: re.search(died, server.said()), "no word about the worker")
        back = rf"(?m)^{WHEN} WARNING headrace\.control: worker fake 0 is back$"
        eventually(lambda: re.search(back, server.said()), "no word of its return")
        assert eventually(lambda: works(server), "no answers")
    assert " INFO " not in server.said()
    # What a person waits for is told at any level.
    assert "\nworker fake 0: ready" in server.said() and "\nstopping: " in server.said()


def test_while_no_worker_is_there_the_answer_is_503_at_once(home: Path) -> None:
    with live_server(home, "--runner", "fake") as server:
        # Nobody starts it again for a while.
        os.kill(server.pid, signal.SIGSTOP)
        try:
            os.kill(server.child("worker fake 0"), signal.SIGKILL)
            eventually(lambda: server.figure("headrace_replica_ready") == 0, "nobody noticed")
            with server.connect() as connection:
                response = server.send(connection, "POST", "/v1/chat/completions", CHAT)
                assert response.status == 503 and int(response.getheader("Retry-After") or 0) >= 1
                response.read()
        finally:
            os.kill(server.pid, signal.SIGCONT)


def test_a_killed_gateway_is_replaced_on_the_same_port(home: Path) -> None:
    with live_server(home, "--runner", "fake") as server:
        first = server.child("gateway")
        subprocess.run(["kill", "-9", str(first)], check=True)
        # Nobody accepts for a moment, and still the connection waits instead of failing.
        assert server.ask("POST", "/v1/chat/completions", CHAT)[0] in (200, 503)
        assert eventually(lambda: works(server), "no answers")
        assert server.child("gateway") != first


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_finishes_streams_refuses_others_and_leaves_nothing(home: Path, number: int) -> None:
    with live_server(home, "--config", str(written(home, SLOW))) as server:
        below = descendants(server.pid)
        listeners = [opened(server, max_tokens=160) for _ in range(5)]
        server.signal(number)
        eventually(lambda: _is_refused(server), "still takes new work")
        assert all(listener.is_alive() for listener in listeners)
        assert server.wait() == 0
        for listener in listeners:
            listener.join(PATIENCE_S)
        assert [(listener.finish, listener.error) for listener in listeners] == [("length", None)] * 5
        assert len(below) >= 2
        eventually(lambda: not any(map(is_alive, below)), "children were left")
        assert list((home / "run").iterdir()) == []


def _is_refused(server: LiveServer) -> bool:
    try:
        return server.ask("POST", "/v1/chat/completions", CHAT)[0] == 503
    except OSError:
        return True


def test_streams_that_outlast_the_grace_end_with_an_error(home: Path) -> None:
    path = written(home, f"[gateway]\ndrain_s = 1.0\n{SLOW}")
    with live_server(home, "--config", str(path)) as server:
        listener = opened(server, max_tokens=2000)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        listener.join(PATIENCE_S)
        assert (listener.finish, listener.error) == (None, None)
        assert listener.failure is not None and listener.failure["message"]


def test_a_client_that_does_not_read_holds_up_no_stop(home: Path) -> None:
    path = written(home, f"[gateway]\ndrain_s = 1.0\n{SLOW.replace('0.05', '1e-5')}")
    with live_server(home, "--config", str(path)) as server, server.connect() as connection:
        server.send(connection, "POST", "/v1/chat/completions", {**CHAT, "stream": True, "n": 8, "max_tokens": 8000})
        eventually(lambda: server.figure("headrace_replica_running") == 0, "still computes")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "is killed" not in server.said()


def test_who_does_not_read_its_remarks_stops_nothing(home: Path) -> None:
    reading, stderr = os.pipe()
    home.mkdir(parents=True)
    os.set_blocking(stderr, False)
    with suppress(BlockingIOError):
        while True:
            os.write(stderr, b"x" * 4096)
    os.set_blocking(stderr, True)
    command = [sys.executable, "-m", "headrace.cli.main", "serve", "--runner", "fake", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=_home(home))
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], START_S)[0], "it did not come up"
        port = int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        for _ in range(3000):
            connection.request("GET", "/v1/models", headers={"Authorization": "Bearer none"})
            assert connection.getresponse().read()
        connection.close()
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()
        os.close(reading)
        os.close(stderr)


def test_a_second_interrupt_ends_it_at_once_and_every_stream_is_told(home: Path) -> None:
    with live_server(home, "--config", str(written(home, SLOW))) as server:
        below = descendants(server.pid)
        listeners = [opened(server, max_tokens=2000) for _ in range(3)]
        server.signal(signal.SIGINT)
        eventually(lambda: "stopping" in server.said(), "did not stop")
        server.signal(signal.SIGINT)
        assert server.wait() == 130
        for listener in listeners:
            listener.join(PATIENCE_S)
            assert (listener.finish, listener.error) == (None, None)
            assert listener.failure is not None and listener.failure["code"] == "overloaded"
        eventually(lambda: not any(map(is_alive, below)), "children were left")
        assert list((home / "run").iterdir()) == []


def test_without_a_file_to_read_again_a_hangup_is_a_closed_terminal(home: Path) -> None:
    with live_server(home, "--runner", "fake") as server:
        server.signal(signal.SIGHUP)
        assert server.wait() == 0


def test_children_die_with_a_killed_supervisor_and_the_next_start_sweeps(home: Path) -> None:
    with live_server(home, "--runner", "fake") as server:
        below = descendants(server.pid)
        server.signal(signal.SIGKILL)
        server.wait()
        eventually(lambda: not any(map(is_alive, below)), "children were left")
        (left,) = (home / "run").iterdir()
    with live_server(home, "--runner", "fake") as server:
        assert not left.exists() and works(server)


def test_a_changed_file_changes_tenants_and_a_broken_one_changes_nothing(home: Path) -> None:
    tenant = '[[tenants]]\nname = "{}"\nkeys = ["{}"]\n'
    first, second = "the-first-tenants-key", "the-second-tenants-key"
    path = written(home, SLOW + tenant.format("one", hash_key(first)))
    with live_server(home, "--config", str(path)) as server:

        def status(key: str) -> int:
            return server.ask("GET", "/v1/models", key=key)[0]

        assert (status(first), status(second)) == (200, 401)
        gateway = server.child("gateway")
        written(home, SLOW + tenant.format("two", hash_key(second)))
        eventually(lambda: (status(first), status(second)) == (401, 200), "not reloaded")
        assert server.ask("POST", "/v1/chat/completions", CHAT, key=second)[0] == 200
        written(home, "[gateway]\nport = 'x'\n")
        server.signal(signal.SIGHUP)
        eventually(lambda: "stays as it was" in server.said(), "no word about the broken file")
        assert (status(second), status(server.key)) == (200, 200)
        written(home, SLOW.replace("0.05", "0.01") + tenant.format("two", hash_key(second)))
        eventually(lambda: "take effect at the next start: models" in server.said(), "no word about the restart")
        assert server.child("gateway") == gateway


def test_several_models_are_served_and_another_is_404_with_the_list(home: Path) -> None:
    with live_server(home, "--runner", "fake", "--model", "a", "--model", "b", "--workers", "2") as server:
        names = {model["id"] for model in server.ask("GET", "/v1/models")[1]["data"]}
        assert {"a", "b"} <= names
        for model in ("a", "b", "default"):
            assert server.ask("POST", "/v1/chat/completions", {**CHAT, "model": model})[0] == 200
        status, body = server.ask("POST", "/v1/chat/completions", {**CHAT, "model": "c"})
        assert status == 404 and all(name in body["error"]["message"] for name in ("a", "b", "default"))
        roles = {f"headrace: worker {model} {index}" for model in "ab" for index in range(2)}
        assert roles <= set(server.children())


def test_it_is_served_over_tls(home: Path) -> None:
    cert, key = _certificate(home)
    with live_server(home, "--runner", "fake", "--tls-cert", str(cert), "--tls-key", str(key)) as server:
        assert server.url.startswith("https://")
        command = [sys.executable, "-m", "headrace.cli.main", "chat", "Hello", "--url", server.url, "--max-tokens", "5"]
        asked = [*command, "--key", server.key, "--cacert", str(cert)]
        assert subprocess.run(asked, capture_output=True, timeout=START_S, check=True).stdout
        untrusted = subprocess.run([*command, "--key", server.key], capture_output=True, timeout=START_S, check=False)
        assert untrusted.returncode == 1


def test_a_port_that_is_taken_ends_it_with_a_word_and_code_1(fake_server: LiveServer, home: Path) -> None:
    command = [sys.executable, "-m", "headrace.cli.main", "serve", "--runner", "fake", "--port", str(fake_server.port)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False, env=_home(home))
    assert ended.returncode == 1 and "Address already in use" in ended.stderr and ended.stderr.count("\n") == 1


def test_a_worker_that_cannot_start_ends_the_start_with_its_reason(
    home: Path, write_tiny: Callable[[Path], Path]
) -> None:
    path = write_tiny(home)
    config = written(home, f'[[models]]\nname = "a"\nsource = "{path}"\ncontext_len = 1000000\n')
    command = [sys.executable, "-m", "headrace.cli.main", "serve", "--config", str(config), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False, env=_home(home))
    assert ended.returncode == 1 and "worker a 0 cannot start: " in ended.stderr
    assert list((home / "run").iterdir()) == []


@pytest.fixture
def write_tiny() -> Callable[[Path], Path]:
    from tests.unit.weights.files import tiny_shape, write_gguf

    def write(home: Path) -> Path:
        home.mkdir(parents=True, exist_ok=True)
        return write_gguf(home / "tiny.gguf", tiny_shape())

    return write


def _home(home: Path) -> dict[str, str]:
    return {"HEADRACE_HOME": str(home), "PATH": "/usr/bin:/bin"}


def _certificate(home: Path) -> tuple[Path, Path]:
    home.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "headrace test")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = home / "cert.pem", home / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    no_password = serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, no_password))
    return paths


def test_a_redis_that_does_not_answer_is_named_without_its_password(home: Path) -> None:
    port = free_port()
    journal = f'[gateway]\njournal = "redis://:secret@127.0.0.1:{port}"\n'
    with live_server(home, "--config", str(written(home, journal + SLOW))) as server:
        assert works(server)
        said = server.said()
    assert f"127.0.0.1:{port}: the journal's server does not answer: until it does, streams of an earlier life" in said
    assert "secret" not in said
