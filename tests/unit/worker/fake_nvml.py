# ruff: noqa: N802
"""NVIDIA's library as far as a worker asks it, without a driver: figures are set, or are errors that it raises."""

from types import SimpleNamespace
from typing import Any

NOT_SUPPORTED = 3
GPU_IS_LOST = 15


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class FakeNvml:
    """`figures` by name: memory (used, total), power (mW), temperature, errors. One set to an NVMLError raises it."""

    NVMLError = NVMLError

    def __init__(self, *ids: str, fails: int | None = None) -> None:
        self.ids = ids or ("GPU-1",)
        self.figures: dict[str, Any] = {"memory": (3 << 30, 80 << 30), "power": 71_500, "temperature": 31, "errors": 2}
        self._fails = fails

    def nvmlInit(self) -> None:
        if self._fails is not None:
            raise NVMLError(self._fails)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.ids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in self.ids:
            raise NVMLError(6)
        return self.ids.index(uuid)

    def nvmlDeviceGetName(self, handle: int) -> bytes | str:
        return b"NVIDIA X" if handle else "NVIDIA X"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        used, total = self._figure("memory")
        return SimpleNamespace(used=used, total=total)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> Any:
        return self._figure("power")

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> Any:
        assert sensor == 0
        return self._figure("temperature")

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> Any:
        assert (kind, counter) == (1, 0)
        return self._figure("errors")

    def _figure(self, name: str) -> Any:
        figure = self.figures[name]
        if isinstance(figure, NVMLError):
            raise figure
        return figure
