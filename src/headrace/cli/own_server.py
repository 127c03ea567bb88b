"""A whole server in a process of its own, for a command that needs one to show something. Owns its start and its end.

It listens on a free port, has a key and a configuration of its own, and is gone when the command is, however that ends.
"""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from headrace.cli.keys import VARIABLE, fresh_key
from headrace.cli.load.process import server_pids, usage_of
from headrace.core.errors import HeadraceError, InvalidInput
from headrace.core.parent import die_with_parent

_PATIENCE_S = 60.0
# Open streams have been read, or will not be.
_STOP_S = 15.0
_CALLERS_FAULT = 2
_RUNNING = re.compile(rb'^headrace_replica_running\{.*replica="([^"]+)".*\} ([0-9.e+]+)$', re.MULTILINE)


class _Ready(Struct):
    """Without an address where it says why there is none."""

    url: str = ""


class OwnServer:
    """Up when entered. Raises HeadraceError, with its last words, when it does not come up."""

    def __init__(self, config: str) -> None:
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-demo-")
        self._process: subprocess.Popen[bytes] | None = None
        self.key = fresh_key()
        self.host = ""
        self.port = 0

    def __enter__(self) -> OwnServer:
        folder = Path(self._folder.name)
        path = folder / "headrace.toml"
        path.write_text(self._config)
        argv = [sys.executable, "-m", "headrace.cli.main", "serve", "--config", str(path), "--port", "0", "--json"]
        try:
            with (folder / "log").open("wb") as log:
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=os.environ | {VARIABLE: self.key},
                    # A terminal's Ctrl-C is for this process, which then ends the server.
                    process_group=0,
                    preexec_fn=partial(die_with_parent, os.getpid()),
                )
            self._await_ready(self._process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = msgspec.json.decode(line, type=_Ready).url if line else ""
        if not url:
            said = Path(self._folder.name, "log").read_text(errors="replace").strip().splitlines()
            why = said[-1].removeprefix("error: ") if said else "it gave no reason"
            kind = InvalidInput if process.wait() == _CALLERS_FAULT else HeadraceError
            raise kind(f"the server did not start: {why}")
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self.host, self.port = parts.hostname, parts.port

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is not None:
            self._stop(process)
            if process.stdout is not None:
                process.stdout.close()
        self._folder.cleanup()

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def connect(self, timeout_s: float = _PATIENCE_S) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)

    def processes(self) -> dict[str, int]:
        """Process ids by what they are: gateway, worker NAME INDEX."""
        usages = [usage for pid in server_pids(self.port) if (usage := usage_of(pid)) is not None]
        return {usage.title.removeprefix("headrace: "): usage.pid for usage in usages}

    def speaking(self) -> str | None:
        """The worker that computes something, as it is named in `processes`; None when nobody does."""
        connection = self.connect()
        try:
            connection.request("GET", "/metrics", headers={"authorization": f"Bearer {self.key}"})
            found = _RUNNING.findall(connection.getresponse().read())
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        # MODEL/INDEX there, worker MODEL INDEX here.
        names = (name.decode().rpartition("/") for name, running in found if float(running) > 0)
        return next((f"worker {model} {index}" for model, _, index in names), None)
