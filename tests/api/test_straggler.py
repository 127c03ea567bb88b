"""One long request and fifteen short ones at once, over HTTP with the default model: the short ones do not wait."""

import http.client
import json
import threading
import time
from typing import Any

from tests.api.live_server import LiveServer

LONG_TOKENS, SHORT_TOKENS, NUM_SHORT = 400, 10, 15
# A machine that is busy with something else may take a second for a token.
MOST_S = 600.0
QUESTION: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "ignore_eos": True,
    "temperature": 0,
}


def answered(server: LiveServer, max_tokens: int) -> Any:
    """How many tokens the answer has, or why there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=MOST_S)
    headers = {
        "Authorization": f"Bearer {server.key}",
        "Content-Type": "application/json",
        # Nobody is sent away because fifteen prompts are more than a slow machine reads in its tier's time.
        "x-headrace-ttft-target-ms": str(int(1e3 * MOST_S)),
    }
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps({**QUESTION, "max_tokens": max_tokens}), headers)
        response = connection.getresponse()
        reply = json.loads(response.read())
        return reply["usage"]["completion_tokens"] if response.status == 200 else reply
    finally:
        connection.close()


def test_short_requests_end_long_before_a_long_one(model_server: LiveServer) -> None:
    ended_s: dict[int, float] = {}
    told: dict[int, Any] = {}
    limits = [LONG_TOKENS] + [SHORT_TOKENS] * NUM_SHORT

    def ask(number: int) -> None:
        told[number] = answered(model_server, limits[number])
        ended_s[number] = time.monotonic()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(limits))]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [told[number] for number in range(len(limits))] == limits
    long_s = ended_s.pop(0) - began_s
    worst_s = max(ended_s.values()) - began_s
    # A fortieth of its tokens, with time for sixteen prompts: far less than half of its time.
    assert worst_s < 0.5 * long_s, f"the worst short request took {worst_s:.1f} s of the long one's {long_s:.1f} s"
