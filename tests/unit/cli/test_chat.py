"""`headrace chat`: replies stream, the conversation is kept, and Ctrl-C ends a reply alone."""

import io
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli import chat as chat_module
from headrace.cli import main as cli
from headrace.cli.chat_client import ChatClient, Message, ServerError
from headrace.cli.keys import CLIENT_VARIABLE, VARIABLE
from headrace.core.errors import InvalidInput
from tests.unit.cli.chat_server import DONE, ChatServer, chat_server, delta


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


def client(server: ChatServer) -> ChatClient:
    return ChatClient(server.url, "the-key", {"model": "m", "seed": None})


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(monkeypatch: pytest.MonkeyPatch, server: ChatServer, typed: str | _Terminal, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed) if isinstance(typed, str) else typed)
    with pytest.raises(SystemExit) as ended:
        cli.main(["chat", *words, "--url", server.url, "--key", "the-key"])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_text_comes_in_parts_and_comments_are_skipped(server: ChatServer) -> None:
    server.stream(b": ping\n\n", b"id: 1\n" + delta("Blue"), delta(" sky"), b'data: {"choices":[]}\n\n', DONE)
    assert list(client(server).reply([Message("user", "why?")])) == ["Blue", " sky"]
    path, headers, body = server.asked[0]
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", "Bearer the-key")
    assert body == {"model": "m", "stream": True, "messages": [{"role": "user", "content": "why?"}]}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([delta("a")], "broke off"),
        ([delta("a"), b'data: {"error":{"message":"the worker died"}}\n\n', DONE], "the worker died"),
        ([b"data: nonsense\n\n"], "no chunk"),
    ],
)
def test_a_reply_that_fails_says_so(server: ChatServer, parts: list[bytes], words: str) -> None:
    server.stream(*parts)
    with pytest.raises(ServerError, match=words):
        list(client(server).reply([]))


def test_a_refusal_has_its_reason_and_when_to_try_again(server: ChatServer) -> None:
    server.answers.append((503, {"Retry-After": "3"}, [b'{"error":{"message":"no worker is ready"}}']))
    with pytest.raises(ServerError, match="503: no worker is ready; try again in 3 s"):
        list(client(server).reply([]))
    server.answers.append((404, {}, [b'{"error":{"message":"no such model","code":404}}']))
    with pytest.raises(ServerError, match="404: no such model"):
        list(client(server).reply([]))
    server.answers.append((502, {}, [b"<html>"]))
    with pytest.raises(ServerError, match="502: Bad Gateway"):
        list(client(server).reply([]))


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ServerError, match="is a server running"):
        list(ChatClient(f"http://127.0.0.1:{port}", "k", {}).reply([]))


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://h", "http://", "http://h:port", "http://h/?key=x"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(InvalidInput):
        ChatClient(url, "k", {})


def test_one_question(monkeypatch: pytest.MonkeyPatch, server: ChatServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.stream(delta("Blue"), delta(" sky"), DONE)
    assert run(monkeypatch, server, "", "why?", "--system", "be short", "--max-tokens", "9") == 0
    assert capsys.readouterr().out == "Blue sky\n"
    assert server.asked[0][2]["max_tokens"] == 9
    assert server.asked[0][2]["messages"][0] == {"role": "system", "content": "be short"}


def test_a_reply_that_was_cut_off_says_so(
    monkeypatch: pytest.MonkeyPatch, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = b'data: {"choices":[{"delta":{},"finish_reason":"%b"}]}\n\n'
    server.stream(delta("A"), cut % b"length", DONE)
    server.stream(delta("B"), cut % b"stop", DONE)
    assert run(monkeypatch, server, "one\ntwo\n") == 0
    shown = capsys.readouterr()
    assert shown.out.split() == ["A", "B"] and shown.err.count("--max-tokens") == 1
    # A small model may go on for as long as its context lasts.
    assert all(body["max_tokens"] == 512 for path, _, body in server.asked if path.endswith("completions"))


NOT_READY = (503, {"Retry-After": "1"}, [b'{"error":{"message":"no worker of m is ready","code":"unreachable"}}'])


def test_a_model_that_is_being_loaded_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat_module, "_AGAIN_S", 0.01)
    server.answers += [NOT_READY] * 3
    server.stream(delta("Blue"), DONE)
    assert run(monkeypatch, server, "", "why?") == 0
    shown = capsys.readouterr()
    assert shown.out == "Blue\n" and shown.err.count("503: no worker of m is ready; waiting for it") == 1
    assert len(server.asked) == 4


def test_a_model_that_never_comes_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat_module, "_AGAIN_S", 0.01)
    monkeypatch.setattr(chat_module, "_PATIENCE_S", 0.05)
    server.answers += [NOT_READY] * 50
    assert run(monkeypatch, server, "", "why?") == 1
    assert "no worker of m is ready; try again in 1 s" in capsys.readouterr().err


def test_what_is_no_matter_of_loading_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers += [(503, {}, [b'{"error":{"message":"full","code":"queue_full"}}'])] * 2
    assert run(monkeypatch, server, "", "why?") == 1
    told = capsys.readouterr()
    assert "503: full" in told.err and told.out == "" and len(server.asked) == 1


def test_who_stops_waiting_for_a_model_has_said_nothing(
    monkeypatch: pytest.MonkeyPatch, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.cli.chat.time.sleep", interrupt)
    server.answers.append(NOT_READY)
    server.stream(delta("A"), DONE)
    assert run(monkeypatch, server, "one\ntwo\n") == 0
    assert "(stopped)" in capsys.readouterr().err
    assert [message["content"] for message in server.asked[-1][2]["messages"]] == ["two"]


def test_a_conversation_is_kept_cleared_and_survives_an_error(
    monkeypatch: pytest.MonkeyPatch, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.stream(delta("A"), DONE)
    server.answers.append((500, {}, [b""]))
    server.stream(delta("C"), DONE)
    server.stream(delta("D"), DONE)
    lines = _Terminal("one\ntwo\n/help\nthree\n/clear\n\nfour\n/exit\nfive\n")
    assert run(monkeypatch, server, lines, "--system", "s") == 0
    said = [[message["content"] for message in body["messages"]] for _, _, body in server.asked]
    assert said == [["s", "one"], ["s", "one", "A", "two"], ["s", "one", "A", "three"], ["s", "four"]]
    shown = capsys.readouterr()
    assert shown.out.replace("> ", "") == "A\nC\nD\n" and "error: 500" in shown.err and "/clear" in shown.err


def test_nobody_is_greeted_where_nobody_is_there_or_the_key_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.models = (401, b'{"error":{"message":"this key is unknown"}}')
    assert run(monkeypatch, server, "one\n") == 1
    told = capsys.readouterr().err
    assert "401: this key is unknown" in told and "/clear" not in told and not server.asked
    assert server.knocks == [("/v1/models", "Bearer the-key")]
    # A server that names no models can still talk.
    server.models = (404, b"")
    server.stream(delta("A"), DONE)
    assert run(monkeypatch, server, "one\n") == 0
    printed = capsys.readouterr()
    assert printed.out == "A\n" and "/clear" in printed.err


def test_a_script_ends_with_the_error_that_it_gets(
    monkeypatch: pytest.MonkeyPatch, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers.append((500, {}, [b""]))
    assert run(monkeypatch, server, "one\ntwo\n") == 1
    assert len(server.asked) == 1 and "error: 500" in capsys.readouterr().err


def test_ctrl_c_ends_the_reply_and_keeps_what_came(
    monkeypatch: pytest.MonkeyPatch, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(ChatClient):
        def reply(self, messages: object) -> Iterator[str]:
            for text in super().reply(messages):  # type: ignore[arg-type]
                yield text
                if text == "half":
                    raise KeyboardInterrupt

    monkeypatch.setattr(chat_module, "ChatClient", Interrupted)
    server.stream(delta("half"), delta(" never shown"), DONE)
    server.stream(delta("B"), DONE)
    assert run(monkeypatch, server, "one\ntwo\n") == 0
    assert capsys.readouterr().out == "half\nB\n"
    assert [message["content"] for message in server.asked[1][2]["messages"]] == ["one", "half", "two"]


def test_a_model_cannot_write_to_the_terminal(
    monkeypatch: pytest.MonkeyPatch, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.stream(delta("\x1b[2Ja\tb\n\u202ec"), DONE)
    run(monkeypatch, server, "", "q")
    assert capsys.readouterr().out == "\ufffd[2Ja\tb\n\ufffdc\n"


def test_the_key_is_found_where_serve_keeps_it(
    monkeypatch: pytest.MonkeyPatch, server: ChatServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(CLIENT_VARIABLE, raising=False)
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        cli.main(["chat", "q", "--url", server.url])
    assert ended.value.code == 2 and "no key" in capsys.readouterr().err
    (tmp_path / "key").write_text("from-the-file\n")
    server.stream(DONE)
    with pytest.raises(SystemExit) as ended:
        cli.main(["chat", "q", "--url", server.url])
    assert server.asked[0][1]["Authorization"] == "Bearer from-the-file"
    for variable in (VARIABLE, CLIENT_VARIABLE):
        monkeypatch.setenv(variable, f"from-{variable}")
        server.stream(DONE)
        with pytest.raises(SystemExit):
            cli.main(["chat", "q", "--url", server.url])
        assert server.asked[-1][1]["Authorization"] == f"Bearer from-{variable}"


def test_this_installs_key_is_not_sent_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(CLIENT_VARIABLE, raising=False)
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "from-the-variable")
    (tmp_path / "key").write_text("from-the-file\n")
    keys: list[str] = []

    class Noting(ChatClient):
        is_cut = False

        def __init__(self, url: str, key: str, *rest: object, **named: object) -> None:
            keys.append(key)

        def reply(self, messages: object) -> Iterator[str]:
            yield "A"

    monkeypatch.setattr(chat_module, "ChatClient", Noting)
    with pytest.raises(SystemExit) as ended:
        cli.main(["chat", "q", "--url", "http://model.example"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "this is model.example; give --key, or set HEADRACE_API_KEY" in said
    monkeypatch.setenv(CLIENT_VARIABLE, "from-the-client")
    for words in ([], ["--key", "given"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["chat", "q", "--url", "http://model.example", *words])
        assert ended.value.code == 0
    assert keys == ["from-the-client", "given"]
