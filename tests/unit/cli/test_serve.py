"""`headrace serve` before it starts anything, and what it says: sockets, certificates, words."""

import json
import shlex
import socket
from contextlib import closing
from pathlib import Path

import pytest

from headrace.cli import main as cli
from headrace.cli import serve
from headrace.cli.announcement import (
    LoadingLines,
    chat_line,
    curl_line,
    exposure,
    reachable_at,
    ready_lines,
    served_models,
)
from headrace.cli.keys import LocalKey
from headrace.cli.serve import Server, bind, check_tls
from headrace.control.run_folder import RunFolder
from headrace.core.config import Config, GatewayConfig, ModelConfig, TelemetryConfig
from headrace.core.errors import HeadraceError, InvalidInput
from headrace.core.event import EngineLoad
from headrace.core.messages import Beat, WorkerCard, WorkerState
from headrace.telemetry.log import LineWriter
from tests.unit.weights.files import tiny_shape, write_gguf

LOAD = EngineLoad(0.0, 0.0, 0, 0, 4, 16, 0, 16)
KEY = LocalKey("hr-secret-secret-secret", "$(cat /home/me/key)", Path("/home/me/key"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    return tmp_path


def exit_code(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", *argv])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_any_free_port_is_taken_when_asked() -> None:
    with closing(bind(GatewayConfig(port=0))) as listener:
        assert listener.getsockname()[1] > 0
        socket.create_connection(listener.getsockname()).close()


def test_a_port_that_is_taken_is_said_and_is_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(bind(GatewayConfig(port=0))) as listener:
        port = listener.getsockname()[1]
        assert exit_code("--runner", "fake", "--port", str(port)) == 1
    error = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in error and error.count("\n") == 1


def test_an_address_of_another_machine_and_one_that_is_none() -> None:
    with pytest.raises(HeadraceError, match=r"cannot listen on 192\.0\.2\.1:0"):
        bind(GatewayConfig(host="192.0.2.1", port=0))
    with pytest.raises(InvalidInput):
        bind(GatewayConfig(host="a..b", port=0))


def test_a_certificate_that_is_none_is_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "c.pem").write_text("nothing")
    made, none, odd = str(tmp_path / "c.pem"), str(tmp_path / "none"), "a\0b"
    for cert, key, told, flag in (
        (made, made, "are no certificate with its key", "--tls-cert"),
        (none, made, "none: No such file or directory", "--tls-cert"),
        (made, none, "none: No such file or directory", "--tls-key"),
        (made, str(tmp_path), "Is a directory", "--tls-key"),
        (odd, made, "embedded null byte", "--tls-cert"),
    ):
        with pytest.raises(InvalidInput, match=told) as refused:
            check_tls(GatewayConfig(tls_cert=cert, tls_key=key))
        assert refused.value.param == flag
    assert exit_code("--runner", "fake", "--tls-cert", str(tmp_path / "c.pem")) == 2
    check_tls(GatewayConfig())


def test_files_that_are_no_model_start_no_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = write_gguf(tmp_path / "broken.gguf", tiny_shape())
    broken.write_bytes(broken.read_bytes()[:100])
    assert exit_code("--model", str(broken), "--port", "0") == 1
    assert exit_code("--model", str(tmp_path / "none.gguf"), "--port", "0") == 1
    error = capsys.readouterr().err
    assert error.count("error: ") == 2 and error.count("headrace models list") == 1
    assert not (tmp_path / "home" / "run").exists()


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--port", "65536"], 2),
        (["--workers", "0"], 2),
        (["--runner", "tpu"], 2),
        (["--log-level", "loud"], 2),
        (["--model", "a", "--model", "a", "--runner", "fake"], 2),
        (["--model", "no such name!", "--runner", "fake"], 2),
        (["--host", ""], 2),
    ],
)
def test_flags_that_no_server_could_run(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*argv) == code
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("gateway", "url"),
    [
        (GatewayConfig(), "http://127.0.0.1:1"),
        (GatewayConfig(host="0.0.0.0"), "http://127.0.0.1:1"),
        (GatewayConfig(host="::"), "http://[::1]:1"),
        (GatewayConfig(host="box", tls_cert="c", tls_key="k"), "https://box:1"),
    ],
)
def test_the_url_can_be_opened_from_here(gateway: GatewayConfig, url: str) -> None:
    assert reachable_at(gateway, 1).url == url


def test_the_curl_line_is_one_that_a_shell_understands_and_hides_the_key() -> None:
    line = curl_line(reachable_at(GatewayConfig(tls_cert="a b.pem", tls_key="k"), 1), KEY, "it's")
    words = shlex.split(line)
    assert words[:5] == ["curl", "-N", "--cacert", "a b.pem", "https://127.0.0.1:1/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's" and json.loads(words[-1])["stream"] is True
    assert KEY.key not in line and "Authorization: Bearer $(cat /home/me/key)" in words


@pytest.mark.parametrize(
    ("gateway", "port", "line"),
    [
        (GatewayConfig(), 8080, "headrace chat"),
        (GatewayConfig(), 8081, "headrace chat --url http://127.0.0.1:8081"),
        (GatewayConfig(tls_cert="a b.pem"), 1, "headrace chat --url https://127.0.0.1:1 --cacert 'a b.pem'"),
        (GatewayConfig(host="::"), 8080, "headrace chat --url http://[::1]:8080"),
        (
            GatewayConfig(host="box"),
            8080,
            'HEADRACE_API_KEY="$(cat /home/me/key)" headrace chat --url http://box:8080',
        ),
    ],
)
def test_the_chat_line_says_where_and_what_is_not_found_by_itself(gateway: GatewayConfig, port: int, line: str) -> None:
    assert chat_line(reachable_at(gateway, port), KEY) == line


def test_a_worker_is_told_what_to_log(tmp_path: Path) -> None:
    config = Config(telemetry=TelemetryConfig(log_level="error"), models=(ModelConfig("a", runner="fake"),))
    with RunFolder(tmp_path) as folder, LineWriter() as lines, closing(bind(GatewayConfig(port=0))) as listener:
        server = Server(config, {}, folder, listener, KEY, lambda: config, None, None, 0.0, False, lines, lines)
        words = server._worker(0, config.models[0], 0).command().argv
    assert words[words.index("--log-level") + 1] == "error"


@pytest.mark.parametrize(("workers", "cores", "threads"), [(1, 4, 0), (2, 4, 2), (3, 8, 2), (2, 1, 1)])
def test_workers_that_compute_share_the_cores_that_may_be_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, cores: int, threads: int
) -> None:
    monkeypatch.setattr(serve, "usable_cores", lambda: cores)
    config = Config(models=(ModelConfig("a", workers=workers), ModelConfig("b", runner="fake")))
    with RunFolder(tmp_path) as folder, LineWriter() as lines, closing(bind(GatewayConfig(port=0))) as listener:
        server = Server(config, {}, folder, listener, KEY, lambda: config, None, None, 0.0, False, lines, lines)
        words = server._worker(0, config.models[0], 0).command().argv
    assert json.loads(words[words.index("--model-json") + 1]).get("threads", 0) == threads


def test_plain_http_on_all_interfaces_is_remarked_on() -> None:
    assert exposure(GatewayConfig()) is None and exposure(GatewayConfig(host="::", tls_cert="c", tls_key="k")) is None
    told = exposure(GatewayConfig(host="0.0.0.0"))
    assert told is not None and "all interfaces in plain HTTP" in told


def test_what_is_said_when_it_is_up_shows_the_key_to_a_person_only() -> None:
    cards = [
        WorkerCard("a 0", "a", 0, 1, 1, dtype="int8", context_len=8192),
        WorkerCard("a 1", "a", 1, 2, 1, context_len=8192),
    ]
    models = served_models([ModelConfig("a", aliases=("default",), workers=2)], cards)
    address = reachable_at(GatewayConfig(), 1)
    quiet = "\n".join(ready_lines(address, KEY, models, 1.0, show_key=False))
    assert "a (also default): int8, 8,192 tokens of context, 2 workers" in quiet
    assert KEY.key not in quiet and str(KEY.path) in quiet
    told = "\n".join(ready_lines(address, KEY, models, 1.0, show_key=True, command="./a run"))
    assert f"{address.url}/#key={KEY.key}" in told
    assert f"or: './a run' chat --url {address.url}\n" in told


class Hands:
    """A clock that is set."""

    at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


def test_loading_is_told_at_every_change_and_now_and_then() -> None:
    told: list[str] = []
    clock = Hands()
    lines = LoadingLines(told.append, clock)
    card = WorkerCard("a 0", "a", 0, 1, 1)
    states = WorkerState
    for at_s, state, progress in (
        (0.0, states.LOADING, 0.0),
        (0.5, states.LOADING, 0.3),
        (2.5, states.LOADING, 0.5),
        (9.0, states.LOADING, 0.5),
        (9.1, states.WARMING, 0.0),
        (9.2, states.READY, 1.0),
        (19.9, states.READY, 0.9),
    ):
        clock.at_s = at_s
        lines.heard("worker a 0", Beat(state, card, LOAD, progress=progress))
    assert told == ["worker a 0: loading", "worker a 0: loading 50 %", "worker a 0: warming", "worker a 0: ready"]
