"""Looks after the accelerator a worker runs on: asks it every few seconds, in a thread of its own, and judges the answer.

A driver may take its time, and must hold up neither steps nor heartbeats. What is done about a faulty device is not
known here.
"""

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from headrace.core.messages import DeviceHealth

log = logging.getLogger("headrace.worker")

LOOK_S = 5.0


class Device(Protocol):
    def read(self) -> DeviceHealth:
        """How it is now. `fault` says so where it cannot be used any more."""


FindDevice = Callable[[str], Device]


class DeviceWatch:
    """`hear` is told every answer, in the watch's thread."""

    def __init__(self, device: Device, hear: Callable[[DeviceHealth], None], interval_s: float = LOOK_S) -> None:
        self._device = device
        self._hear = hear
        self._interval_s = interval_s
        self._first_errors: int | None = None
        self._stopped = threading.Event()

    def look(self) -> DeviceHealth:
        """Memory errors that came after the first look are a fault; those before it are some other process's past."""
        health = self._device.read()
        errors = health.ecc_uncorrected
        if errors is not None:
            if self._first_errors is None:
                self._first_errors = errors
            more = errors - self._first_errors
            if more > 0 and not health.fault:
                health = replace(
                    health, fault=f"{health.name} has had {more} uncorrected memory errors since the start"
                )
        self._hear(health)
        return health

    def start(self) -> None:
        threading.Thread(target=self._run, name="device", daemon=True).start()

    def stop(self) -> None:
        """Does not wait: a driver that hangs must not hold up who leaves."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.look()
            except Exception:  # the top of a thread: what cannot be asked is not watched, and that is said once
                log.exception("the device is not watched any more")
                return
            self._stopped.wait(self._interval_s)
