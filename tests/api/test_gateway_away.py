"""A gateway that is away for longer than streams are kept: whoever keeps asking for one finds it all the same."""

import http.client
import json
import os
import signal
import time
from pathlib import Path

from tests.api.live_server import PATIENCE_S, LiveServer, eventually, live_server, written

# Whoever is held up on the way to the kill, or back to the stream, has this long; the gateway is away for longer.
RESUME_S, AWAY_S = 6.0, 9.0
CONFIG = f"""
[gateway]
resume_s = {RESUME_S}
[[models]]
name = "fake"
runner = "fake"
[models.fake]
profile = {{ c0_s = 0.02, c_in_s = 1e-6, c_out_s = 1e-6, c_kv_s = 0.0, c_att_s = 0.0 }}
"""


def begin(server: LiveServer, id: str, max_tokens: int) -> list[bytes]:
    """Its first event, read; the connection is lost then."""
    body = {"model": "fake", "prompt": "x", "max_tokens": max_tokens, "ignore_eos": True, "seed": 1, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    headers = {"authorization": f"Bearer {server.key}", "content-type": "application/json", "x-request-id": id}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    lines = [response.readline() for _ in range(3)]
    connection.close()
    return lines


def read(server: LiveServer, id: str) -> tuple[int, bytes]:
    with server.connect() as connection:
        response = server.send(connection, "GET", f"/v1/streams/{id}", None)
        return response.status, response.read()


def test_time_in_which_no_gateway_answered_does_not_count(home: Path) -> None:
    with live_server(home, "--config", str(written(home, CONFIG))) as server:
        begun = {id: begin(server, id, max_tokens) for id, max_tokens in (("ended", 2), ("open", 600))}
        eventually(lambda: server.ask("GET", "/v1/requests/ended/explain")[0] == 200, "it does not end")
        # Nobody starts it again for a while.
        os.kill(server.pid, signal.SIGSTOP)
        os.kill(server.child("gateway"), signal.SIGKILL)
        time.sleep(AWAY_S)
        os.kill(server.pid, signal.SIGCONT)
        for id, first in begun.items():
            status, body = read(server, id)
            assert status == 200, (id, body)
            assert body.startswith(b"".join(first)) and body.endswith(b"data: [DONE]\n\n")
