"""One long reply beside fifteen short ones over HTTP with the default model: does the long one's length show in theirs?

Lengths take turns, so that the machine's moods fall on all of them alike. A round ends with the short ones, and the long one is
let go; in one round more it is waited for, at the length that is judged.
Run from the repository's root: .venv/bin/python benchmarks/serve_straggler.py [--rounds 9]
"""

import argparse
import http.client
import json
import sys
import threading
import time
from statistics import median
from urllib.parse import urlsplit

from serve_rig import Server, say, server, verdict

LONG_TOKENS, JUDGED = (100, 400, 1000), 400
SHORT_TOKENS, NUM_SHORT = 10, 15
CONFIG = '[[models]]\nname = "default"\nsource = "default"\n'
# The share by which the short ones' worst may move with the long one's length: what a machine's mood moves alone.
MOST_MOVE = 0.15
# For the server to see that the long one's client has gone.
PAUSE_S = 0.5


def ask(one: Server, max_tokens: int) -> http.client.HTTPConnection:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "ignore_eos": True,
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    headers = {
        "authorization": f"Bearer {one.key}",
        "content-type": "application/json",
        "x-headrace-on-disconnect": "cancel",
    }
    connection = http.client.HTTPConnection(urlsplit(one.url).netloc, timeout=300)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return connection


def hear(connection: http.client.HTTPConnection, max_tokens: int) -> float:
    """When its answer was there."""
    with connection.getresponse() as reply:
        assert json.load(reply)["usage"]["completion_tokens"] == max_tokens
    connection.close()
    return time.monotonic()


def round_of(one: Server, long_tokens: int, *, waits: bool = False) -> tuple[float, float]:
    """Seconds to the end of the worst short reply, and of the long one, if it is waited for. The long one is first."""
    ends_s: list[float] = []
    began_s = time.monotonic()
    longer = ask(one, long_tokens)
    shorts = [
        threading.Thread(target=lambda: ends_s.append(hear(ask(one, SHORT_TOKENS), SHORT_TOKENS)))
        for _ in range(NUM_SHORT)
    ]
    for thread in shorts:
        thread.start()
    for thread in shorts:
        thread.join()
    assert len(ends_s) == NUM_SHORT, "a short request was not answered"
    lasted_s = hear(longer, long_tokens) - began_s if waits else 0.0
    longer.close()
    time.sleep(PAUSE_S)
    return max(ends_s) - began_s, lasted_s


def main(rounds: int) -> int:
    worst_s: dict[int, list[float]] = {length: [] for length in LONG_TOKENS}
    with server(CONFIG) as one:
        round_of(one, JUDGED)
        for number in range(rounds):
            for length in LONG_TOKENS if number % 2 == 0 else LONG_TOKENS[::-1]:
                worst_s[length].append(round_of(one, length)[0])
        worst_beside_s, lasted_s = round_of(one, JUDGED, waits=True)
    for length in LONG_TOKENS:
        found = " ".join(f"{short:.2f}" for short in worst_s[length])
        say(
            f"long reply of {length} tokens, worst short one of each round", f"{found}: {median(worst_s[length]):.2f} s"
        )
    worst = [median(worst_s[length]) for length in LONG_TOKENS]
    moved, early = max(worst) / min(worst) - 1.0, lasted_s / worst_beside_s
    met = [
        verdict(moved <= MOST_MOVE, f"the short ones' worst moves by {moved:.1%} over the lengths", f"{MOST_MOVE:.0%}"),
        verdict(early >= 2.0, f"the {JUDGED}-token reply lasts {early:.1f} times as long as the worst short one", "2"),
    ]
    return 0 if all(met) else 1


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--rounds", type=int, default=9)
    sys.exit(main(flags.parse_args().rounds))
