"""A server of scripted answers on a free port, for clients of the chat API."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DONE = b"data: [DONE]\n\n"


def delta(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n\n"


class ChatServer(ThreadingHTTPServer):
    """Each reply takes the next of `answers`: (status, headers, parts of a body); who asks for models gets `models`."""

    models: tuple[int, bytes] = (200, b'{"data":[]}')
    knocks: list[tuple[str, str]]
    answers: list[tuple[int, dict[str, str], list[bytes]]]
    asked: list[tuple[str, dict[str, str], Any]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def stream(self, *parts: bytes) -> None:
        self.answers.append((200, {"Content-Type": "text/event-stream"}, list(parts)))


class _Answer(BaseHTTPRequestHandler):
    server: ChatServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, dict(self.headers), body))
        status, headers, parts = self.server.answers.pop(0)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        for part in parts:
            self.wfile.write(part)
            self.wfile.flush()

    def do_GET(self) -> None:
        self.server.knocks.append((self.path, self.headers["Authorization"]))
        status, body = self.server.models
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def chat_server() -> Iterator[ChatServer]:
    with ChatServer(("127.0.0.1", 0), _Answer) as server:
        server.answers, server.asked, server.knocks = [], [], []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
