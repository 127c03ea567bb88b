"""A client that asks for a streamed reply and reads on whenever its connection breaks. Standard library only.

HEADRACE_API_KEY=$(cat "${HEADRACE_HOME:-$HOME/.local/share/headrace}/key") python examples/read_on.py [--at HOST:PORT] "Tell me a story"
Meanwhile kill a worker or the gateway of the server: the text goes on.
"""

import argparse
import http.client
import json
import os
import sys
import time
import uuid


def main(at: str, question: str) -> None:
    key = os.environ.get("HEADRACE_API_KEY")  # noqa: TID251
    if not key:
        sys.exit("set HEADRACE_API_KEY to a key of the server")
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {key}",
        "X-Request-Id": f"story-{uuid.uuid4().hex}",
    }
    messages = [{"role": "user", "content": question}]
    # A small model may repeat itself for as long as its context lasts.
    body = {"model": "default", "stream": True, "temperature": 0.2, "max_tokens": 1000, "messages": messages}
    is_over, path = False, None
    while not is_over:
        connection = http.client.HTTPConnection(at, timeout=30)
        try:
            if path is None:
                connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            else:
                connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            if response.status != 200:
                sys.exit(f"{response.status}: {response.read().decode()}")
            # The server may have given the request another id than the one that was wished for.
            path = path or f"/v1/streams/{response.headers['X-Request-Id']}"
            for line in response:
                if line.startswith(b"id: "):
                    headers["Last-Event-ID"] = line[4:].decode().strip()
                elif line == b"data: [DONE]\n":
                    is_over = True
                elif line.startswith(b"data: "):
                    show(json.loads(line[6:]))
        except (OSError, http.client.HTTPException) as error:
            if path is None and isinstance(error, ConnectionRefusedError):
                sys.exit(f"nobody listens at {at}")
            time.sleep(0.2)
        finally:
            connection.close()
    sys.stdout.write("\n")


def show(chunk: dict) -> None:
    if "error" in chunk:
        sys.exit(f"\n{chunk['error']}")
    for choice in chunk["choices"]:
        sys.stdout.write(choice["delta"].get("content") or "")
        sys.stdout.flush()


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    flags.add_argument("--at", default="127.0.0.1:8080", metavar="HOST:PORT")
    flags.add_argument("question", nargs="*", default=["Tell me a story"])
    given = flags.parse_args()
    main(given.at, " ".join(given.question))
