"""What a changed configuration changes in a running server. Owns the rule and the watch of the file; applies nothing."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from headrace.core.config import Config, GatewayConfig

# These of the gateway's fields are looked at once, when it starts.
FIXED = (
    *("host", "port", "grpc_port", "processes", "journal", "resume_s", "resume_bytes", "max_unsent_bytes"),
    *("tls_cert", "tls_key", "drain_s"),
)
_FIXED_SECTIONS = ("engine", "telemetry", "models", "inject")

Stamp = tuple[int, int, int]


def merge(running: Config, wanted: Config) -> tuple[Config, tuple[str, ...]]:
    """What runs from now on, and the names of what changed and waits for a restart."""
    waiting = [name for name in _FIXED_SECTIONS if getattr(wanted, name) != getattr(running, name)]
    waiting += [f"gateway.{name}" for name in FIXED if getattr(wanted.gateway, name) != getattr(running.gateway, name)]
    gateway: GatewayConfig = replace(wanted.gateway, **{name: getattr(running.gateway, name) for name in FIXED})
    return replace(running, gateway=gateway, tenants=wanted.tenants), tuple(waiting)


async def watch_file(path: Path, seen: Stamp | None, changed: Callable[[], None], every_s: float = 1.0) -> None:
    """Until cancelled. `seen` is its stamp from before it was read. A file that is gone for a moment is being replaced."""
    while True:
        await asyncio.sleep(every_s)
        stamp = stamp_file(path)
        if stamp is not None and stamp != seen:
            seen = stamp
            changed()


def stamp_file(path: Path) -> Stamp | None:
    """Another one after every change."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
