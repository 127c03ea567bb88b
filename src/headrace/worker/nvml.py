"""What NVIDIA's driver says of a card: memory, temperature, power, memory errors. The only user of `pynvml`.

The library (package `nvidia-ml-py`) is optional and opened when first asked for. A figure that a card does not tell is
None. Judges nothing but whether the card is there.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from headrace.core.errors import NotFound
from headrace.core.messages import DeviceHealth

T = TypeVar("T")

# From nvml.h.
_TEMPERATURE_OF_GPU = 0
_UNCORRECTED = 1
_SINCE_DRIVER_LOAD = 0
_FAULTS = {15: "has fallen off the bus", 16: "must be reset before anything can run on it"}


class NvmlDevice:
    """One card. `read` may take a while: the driver answers one at a time."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle
        self.name = _text(library.nvmlDeviceGetName(handle))

    def read(self) -> DeviceHealth:
        library, handle = self._library, self._handle
        faults: list[str] = []

        def ask(figure: Callable[[], T]) -> T | None:
            try:
                return figure()
            except library.NVMLError as error:
                fault = _FAULTS.get(getattr(error, "value", 0))
                if fault is not None and fault not in faults:
                    faults.append(fault)
                return None

        memory = ask(lambda: library.nvmlDeviceGetMemoryInfo(handle))
        milliwatts = ask(lambda: library.nvmlDeviceGetPowerUsage(handle))
        celsius = ask(lambda: library.nvmlDeviceGetTemperature(handle, _TEMPERATURE_OF_GPU))
        return DeviceHealth(
            self.name,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            temperature_c=None if celsius is None else float(celsius),
            power_w=None if milliwatts is None else milliwatts / 1e3,
            ecc_uncorrected=ask(
                lambda: int(library.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _SINCE_DRIVER_LOAD))
            ),
            fault=f"{self.name} {' and '.join(faults)}" if faults else "",
        )


def find_device(device_id: str, library: Any = None) -> NvmlDevice:
    """The card of this id, "GPU-" and its UUID. NotFound says why it cannot be asked."""
    library = _opened(library)
    try:
        return NvmlDevice(library, library.nvmlDeviceGetHandleByUUID(device_id))
    except library.NVMLError as error:
        raise NotFound(f"NVML knows no card {device_id}: {error}") from error


def all_devices(library: Any = None) -> list[NvmlDevice]:
    """Of this machine, whatever this process may use of it. NotFound where there is no driver to ask."""
    library = _opened(library)
    try:
        count = library.nvmlDeviceGetCount()
        return [NvmlDevice(library, library.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
    except library.NVMLError as error:
        raise NotFound(f"NVML does not answer: {error}") from error


def words(health: DeviceHealth) -> str:
    """For people."""
    gib = 2**30
    said = [
        None
        if health.memory_used_bytes is None or health.memory_total_bytes is None
        else f"{health.memory_used_bytes / gib:.1f} of {health.memory_total_bytes / gib:.1f} GiB used",
        None if health.temperature_c is None else f"{health.temperature_c:.0f} °C",
        None if health.power_w is None else f"{health.power_w:.0f} W",
        None if health.ecc_uncorrected is None else f"{health.ecc_uncorrected} uncorrected memory errors",
        health.fault or None,
    ]
    return f"{health.name}: {', '.join(part for part in said if part) or 'tells nothing'}"


def _opened(library: Any) -> Any:
    try:
        library = import_module("pynvml") if library is None else library
    except ImportError as error:
        raise NotFound("nvidia-ml-py is not installed (pip install headrace[gpu])") from error
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise NotFound(f"NVML cannot be opened: {error}") from error
    return library


def _text(name: Any) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)
