"""Keeps the machine's processors from halting while requests are open, for gateways that are told to (decision 25).

Owns the wish that Linux is told, by its quality of service for power management: it holds for all processors, and is forgotten
when the process that has it ends, however it ends.
"""

import logging
import os
import sys
from pathlib import Path

_DEVICE = Path("/dev/cpu_dma_latency")
_STATES = Path("/sys/devices/system/cpu/cpu0/cpuidle")
# The state in which a processor waits without halting.
_POLL = "POLL"
# Microseconds to come back from where it waits: at most none, and as many as it likes.
_AT_ONCE, _WHENEVER = 0, 2_000_000_000
_LOG = logging.getLogger("headrace.gateway")


class Wakeful:
    """To be told of every request that comes and is done, and every now and then to `rest`. Unless it is `configure`d, nothing
    happens."""

    __slots__ = ("_device", "_file", "_has_come", "_is_awake", "_is_wanted", "_num_open", "_states")

    def __init__(self, device: Path = _DEVICE, states: Path = _STATES) -> None:
        self._device = device
        self._states = states
        self._file: int | None = None
        self._is_wanted = False
        self._is_awake = False
        self._has_come = False
        self._num_open = 0

    def configure(self, is_wanted: bool) -> None:
        """Where it cannot be had, it is tried again when it was not wanted meanwhile."""
        if is_wanted and not self._is_wanted:
            self._open()
        elif not is_wanted:
            self.close()
        self._is_wanted = is_wanted

    def close(self) -> None:
        """Processors halt again."""
        if self._file is not None:
            os.close(self._file)
            self._file, self._is_awake = None, False

    def stir(self) -> None:
        """A request has come."""
        self._num_open += 1
        self._has_come = True
        if self._file is not None and not self._is_awake:
            self._ask(_AT_ONCE)

    def done(self) -> None:
        """A request that came is over."""
        self._num_open -= 1

    def rest(self) -> None:
        """Processors may halt, unless requests are open or one came since this was asked last: then they are kept awake, if they
        are not yet."""
        is_needed, self._has_come = self._has_come or self._num_open > 0, False
        if self._file is not None and self._is_awake != is_needed:
            self._ask(_AT_ONCE if is_needed else _WHENEVER)

    def _open(self) -> None:
        try:
            self._file = os.open(self._device, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            _LOG.warning("keep_awake: processors halt as before: %s: %s", self._device, error.strerror)
            return
        state = self._shallowest()
        if state == _POLL:
            _LOG.info("processors wait awake while requests are open")
        elif state:
            _LOG.warning(
                "keep_awake: processors halt as briefly as they can, in %s: they cannot wait awake here", state
            )
        else:
            self.close()
            _LOG.warning("keep_awake changes nothing here: this kernel has no driver for how processors wait")

    def _shallowest(self) -> str:
        """State of a processor without work; empty where the kernel has no say in it."""
        try:
            return (self._states / "state0" / "name").read_text().strip()
        except FileNotFoundError:
            return ""
        except OSError:
            return "an unknown state"

    def _ask(self, microseconds: int) -> None:
        assert self._file is not None
        try:
            os.write(self._file, microseconds.to_bytes(4, sys.byteorder))
        except OSError as error:
            _LOG.warning("keep_awake: processors halt as before: %s: %s", self._device, error.strerror)
            self.close()
            return
        self._is_awake = microseconds == _AT_ONCE
