"""One long reply beside fifteen short ones over HTTP with the default model: does the long one's length show in theirs?

Lengths take turns, so that the machine's moods fall on all of them alike.
Run from the repository's root: .venv/bin/python benchmarks/serve_straggler.py [--rounds 3]
"""

import argparse
import json
import sys
import threading
import time
import urllib.request
from statistics import median

from serve_rig import Server, say, server, verdict

LONG_TOKENS = (100, 400, 1000)
SHORT_TOKENS, NUM_SHORT = 10, 15
CONFIG = '[[models]]\nname = "default"\nsource = "default"\n'
# The share by which the short ones' worst may move with the long one's length: what a machine's mood moves alone.
MOST_MOVE = 0.15


def ask(one: Server, max_tokens: int, ends_s: list[float]) -> None:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "ignore_eos": True,
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    request = urllib.request.Request(
        one.url + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {one.key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        assert json.load(reply)["usage"]["completion_tokens"] == max_tokens
    ends_s.append(time.monotonic())


def round_of(one: Server, long_tokens: int) -> tuple[float, float]:
    """Seconds to the end of the worst short reply, and of the long one. The long one is first, and has begun."""
    short_s: list[float] = []
    long_s: list[float] = []
    longer = threading.Thread(target=ask, args=(one, long_tokens, long_s))
    began_s = time.monotonic()
    longer.start()
    shorts = [threading.Thread(target=ask, args=(one, SHORT_TOKENS, short_s)) for _ in range(NUM_SHORT)]
    for thread in shorts:
        thread.start()
    for thread in (*shorts, longer):
        thread.join()
    assert len(short_s) == NUM_SHORT, "a short request was not answered"
    return max(short_s) - began_s, long_s[0] - began_s


def main(rounds: int) -> int:
    worst_s: dict[int, list[float]] = {length: [] for length in LONG_TOKENS}
    lasted_s: dict[int, list[float]] = {length: [] for length in LONG_TOKENS}
    with server(CONFIG) as one:
        round_of(one, LONG_TOKENS[0])
        for number in range(rounds):
            for length in LONG_TOKENS if number % 2 == 0 else LONG_TOKENS[::-1]:
                short, long = round_of(one, length)
                worst_s[length].append(short)
                lasted_s[length].append(long)
    for length in LONG_TOKENS:
        say(
            f"long reply of {length} tokens: {median(lasted_s[length]):.2f} s, worst short one",
            f"{median(worst_s[length]):.2f} s",
        )
    worst = [median(worst_s[length]) for length in LONG_TOKENS]
    moved = max(worst) / min(worst) - 1.0
    early = median(lasted_s[400]) / median(worst_s[400])
    met = [
        verdict(moved <= MOST_MOVE, f"the short ones' worst moves by {moved:.1%} over the lengths", f"{MOST_MOVE:.0%}"),
        verdict(early >= 2.0, f"the 400-token reply lasts {early:.1f} times as long as the worst short one", "2"),
    ]
    return 0 if all(met) else 1


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--rounds", type=int, default=3)
    sys.exit(main(flags.parse_args().rounds))
