"""Crowds of bad clients beside one good stream: slow senders, clients that never read, disconnects by the thousand.

The stream's tokens must be those of its solo run, and its inter-token p99 at most double; afterwards nothing is left.
Run from the repository's root: .venv/bin/python benchmarks/serve_attacks.py
"""

import argparse
import asyncio
import json
import socket
import sys
import time
import urllib.parse

from serve_rig import Server, fake_config, ms, say, server, verdict

PROFILE = {"c0_s": 2e-2, "c_in_s": 1e-6, "c_out_s": 1e-6, "c_kv_s": 0.0, "c_att_s": 0.0}
TOKENS = 1500
# Of the fake's tokens 256 are bytes: with few others, one in ten is half a character and waits for the next.
WORDS = 60_000
# Until then a client that never reads looks at nothing; by then it must have been given up. What it is then told, or
# finds in its kernel's buffer, it reads within a moment.
UNREAD_S = 25.0
MOMENT_S = 5.0
# Short times, so that the crowd is dealt with while the stream runs.
GATEWAY = "[gateway]\nreceive_s = 4.0\nmax_unread_s = 4.0\nmax_unread_bytes = 4096\ndisconnect_grace_s = 0.0\n"


def head(one: Server, length: int) -> bytes:
    host = urllib.parse.urlsplit(one.url).netloc
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {one.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def body(**fields: object) -> bytes:
    asked = {"model": "fake", "prompt": "Go on", "stream": True, "ignore_eos": True, "seed": 7, **fields}
    return json.dumps(asked).encode()


async def connect(one: Server, received_bytes: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """`received_bytes`: as small a buffer as the system gives, so that what is not read comes to lie at the server."""
    url = urllib.parse.urlsplit(one.url)
    if not received_bytes:
        return await asyncio.open_connection(url.hostname, url.port)
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received_bytes)
    line.setblocking(False)
    await asyncio.get_running_loop().sock_connect(line, (url.hostname, url.port))
    return await asyncio.open_connection(sock=line, limit=256)


async def stream(one: Server) -> tuple[str, list[float]]:
    """The text of a long stream and the gaps between its pieces."""
    reader, writer = await connect(one)
    asked = body(max_tokens=TOKENS)
    writer.write(head(one, len(asked)) + asked)
    texts: list[str] = []
    gaps_s: list[float] = []
    before_s: float | None = None
    while b"[DONE]" not in (line := await reader.readline()):
        assert line, "the stream broke off"
        if line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            now_s = time.perf_counter()
            if chunk["choices"]:
                texts.append(chunk["choices"][0]["text"])
                if before_s is not None:
                    gaps_s.append(now_s - before_s)
                before_s = now_s
    writer.close()
    return "".join(texts), gaps_s


async def slow_sender(one: Server) -> int:
    """A byte a second, until the server has had enough: the status it answers."""
    reader, writer = await connect(one)
    data = head(one, 1000)
    answer = asyncio.create_task(reader.readline())
    for at in range(len(data)):
        writer.write(data[at : at + 1])
        if (await asyncio.wait((answer,), timeout=1.0))[0]:
            break
    line = await answer
    writer.close()
    return int(line.split()[1]) if line else 0


async def never_reader(one: Server) -> str:
    """Asks for a long stream and reads nothing of it; how it was ended, once looked at."""
    reader, writer = await connect(one, received_bytes=4096)
    asked = body(max_tokens=8_000, prompt="Never", return_token_ids=True)
    writer.write(head(one, len(asked)) + asked)
    await writer.drain()
    await asyncio.sleep(UNREAD_S)
    try:
        last = b""
        async with asyncio.timeout(MOMENT_S):
            while found := await reader.read(1 << 16):
                last = last[-200:] + found
        return "told" if b"client_too_slow" in last else "cut"
    except ConnectionError:
        return "cut"
    except TimeoutError:
        return "still open"
    finally:
        writer.close()


async def leaver(one: Server, delay_s: float) -> str:
    _, writer = await connect(one)
    asked = body(max_tokens=1000)
    writer.write(head(one, len(asked)) + asked)
    await asyncio.sleep(delay_s)
    writer.transport.abort()
    return "left"


async def beside(one: Server, crowd: list[object]) -> tuple[str, list[float], list[object]]:
    """The good stream, with a crowd that begins when it has."""
    running = asyncio.create_task(stream(one))
    await asyncio.sleep(0.5)
    ends = await asyncio.gather(*crowd, return_exceptions=True)  # type: ignore[call-overload]
    texts, gaps_s = await running
    return texts, gaps_s, ends


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def count(ends: list[object]) -> dict[str, int]:
    names = [str(end) if not isinstance(end, BaseException) else type(end).__name__ for end in ends]
    return {name: names.count(name) for name in sorted(set(names))}


async def run(one: Server, senders: int, readers: int, leavers: int) -> list[bool]:
    await stream(one)
    alone_texts, alone_s = await stream(one)
    say("alone: inter-token p99", ms(p99(alone_s)))
    crowds = {
        f"{senders} slow senders": lambda: [slow_sender(one) for _ in range(senders)],
        f"{readers} clients that never read": lambda: [never_reader(one) for _ in range(readers)],
        f"{leavers} that leave at once": lambda: [leaver(one, 0.002 * number) for number in range(leavers)],
    }
    met = []
    for name, crowd in crowds.items():
        texts, gaps_s, ends = await beside(one, crowd())
        told = count(ends)
        say(f"{name}: {told}; inter-token p99", ms(p99(gaps_s)))
        met += [
            verdict(texts == alone_texts, f"{name}: the stream's text is that of its solo run", "equal"),
            verdict(p99(gaps_s) <= 2.0 * p99(alone_s), f"{name}: p99 {p99(gaps_s) / p99(alone_s):.2f}x", "2x"),
        ]
        if "slow" in name:
            met.append(verdict(told == {"408": senders}, f"{name}: each was told 408", "all"))
        elif "never" in name:
            met.append(verdict(told.keys() <= {"cut", "told"}, f"{name}: each was given up", "all"))
    return met


def main(senders: int, readers: int, leavers: int) -> int:
    config = fake_config(PROFILE, slots=1024, blocks=65_536, more=GATEWAY, vocab_size=WORDS)
    with server(config) as one:
        met = asyncio.run(run(one, senders, readers, leavers))
        time.sleep(3.0)
        left = {name: one.gauge(f"headrace_{name}") for name in ("open_streams", "replica_running", "replica_waiting")}
        left["blocks"] = one.gauge("headrace_replica_total_blocks") - one.gauge("headrace_replica_free_blocks")
        met.append(verdict(not any(left.values()), f"left over: {left}", "nothing"))
    return 0 if all(met) else 1


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--senders", type=int, default=2000)
    flags.add_argument("--readers", type=int, default=500)
    flags.add_argument("--leavers", type=int, default=1000)
    given = flags.parse_args()
    sys.exit(main(given.senders, given.readers, given.leavers))
