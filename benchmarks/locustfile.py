"""The chat load of `headrace bench serve --users`, for Locust: streamed chats, time to first token and between tokens.

Locust is not a dependency of the project: pip install locust
Run: HEADRACE_API_KEY=... locust -f benchmarks/locustfile.py --host http://127.0.0.1:8080 \
         --headless --users 32 --spawn-rate 8 --run-time 60s

HEADRACE_MODEL (default: `default`), HEADRACE_PROMPT_WORDS (80) and HEADRACE_OUTPUT_TOKENS (50) change the load.
Locust is closed-loop: a server that stalls is asked less, and its percentiles look better than its users' day was.
For figures of record use `headrace bench serve --rate`.
"""

import json
import os
import random
import time

from locust import HttpUser, between, task

KEY = os.environ.get("HEADRACE_API_KEY", "")  # noqa: TID251 (a script of its own)
MODEL = os.environ.get("HEADRACE_MODEL", "default")  # noqa: TID251
PROMPT_WORDS = int(os.environ.get("HEADRACE_PROMPT_WORDS", "80"))  # noqa: TID251
OUTPUT_TOKENS = int(os.environ.get("HEADRACE_OUTPUT_TOKENS", "50"))  # noqa: TID251
WORDS = "the of and to in is was for on that by this with you it not people water year work day way part place case"


class ChatUser(HttpUser):
    """Asks, reads the reply as it comes, thinks for a moment, asks again."""

    wait_time = between(0.5, 1.5)

    @task
    def chat(self) -> None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": " ".join(random.choices(WORDS.split(), k=PROMPT_WORDS))}],
            "max_tokens": OUTPUT_TOKENS,
            "seed": random.randrange(2**31),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"authorization": f"Bearer {KEY}"}
        started = time.perf_counter()
        with self.client.post(
            "/v1/chat/completions", json=body, headers=headers, stream=True, catch_response=True, name="chat"
        ) as reply:
            if reply.status_code != 200:
                reply.failure(f"status {reply.status_code}")
                return
            fault = self._read(reply.iter_lines(chunk_size=None), started)
            if fault:
                reply.failure(fault)
            else:
                reply.success()

    def _read(self, lines, started: float) -> str:
        """What is wrong with the reply, if anything. Every gap between pieces is an event of its own."""
        last, finishes, done = None, 0, False
        for line in lines:
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]":
                done = True
                continue
            frame = json.loads(line[6:])
            if "error" in frame:
                return str(frame["error"].get("code") or "error")
            for choice in frame["choices"]:
                finishes += choice.get("finish_reason") is not None
                if choice["delta"].get("content"):
                    now = time.perf_counter()
                    self._tell("first token" if last is None else "between pieces", now - (last or started))
                    last = now
        return "" if done and finishes == 1 else f"{finishes} finish reasons, {'no ' * (not done)}[DONE]"

    def _tell(self, name: str, seconds: float) -> None:
        self.environment.events.request.fire(
            request_type="SSE", name=name, response_time=1e3 * seconds, response_length=0, exception=None, context={}
        )
