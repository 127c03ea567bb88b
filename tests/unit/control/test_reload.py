"""What a changed configuration changes while a server runs."""

import asyncio
import os
from pathlib import Path

from msgspec.structs import replace

from headrace.control.reload import merge, stamp_file, watch_file
from headrace.core.config import Config, GatewayConfig, ModelConfig, TelemetryConfig, TenantEntry
from tests.unit.control.virtual_loop import play

RUNNING = Config(models=(ModelConfig("a"),), tenants=(TenantEntry("acme"),))


def test_tenants_and_limits_change_at_once() -> None:
    wanted = replace(RUNNING, tenants=(TenantEntry("acme", weight=2.0),), gateway=GatewayConfig(heartbeat_s=1.0))
    assert merge(RUNNING, wanted) == (wanted, ())


def test_what_is_fixed_at_start_is_named_and_kept() -> None:
    gateway = GatewayConfig(port=9000, resume_s=1.0, tls_cert="c", tls_key="k", drain_s=1.0, receive_s=2.0)
    telemetry = TelemetryConfig(log_level="debug")
    wanted = replace(RUNNING, telemetry=telemetry, models=(ModelConfig("b"),), inject={"route": 1.0}, gateway=gateway)
    merged, waiting = merge(RUNNING, wanted)
    fixed = ("port", "resume_s", "tls_cert", "tls_key", "drain_s")
    assert waiting == ("telemetry", "models", "inject", *(f"gateway.{name}" for name in fixed))
    assert merged == replace(RUNNING, gateway=GatewayConfig(receive_s=2.0))


def test_the_file_is_seen_to_change_and_not_to_be_away(tmp_path: Path) -> None:
    path, seen = tmp_path / "c.toml", []

    async def story() -> None:
        path.write_text("")
        watch = asyncio.create_task(watch_file(path, stamp_file(path), lambda: seen.append(path.read_text())))
        await asyncio.sleep(2.5)
        assert seen == []
        path.unlink()
        await asyncio.sleep(2.0)
        assert seen == []
        (tmp_path / "new").write_text("changed")
        os.replace(tmp_path / "new", path)
        await asyncio.sleep(3.0)
        watch.cancel()

    play(story())
    assert seen == ["changed"]


def test_a_change_between_its_first_reading_and_the_watch_is_seen(tmp_path: Path) -> None:
    path, seen = tmp_path / "c.toml", []
    path.write_text("read")
    stamp = stamp_file(path)
    path.write_text("changed since")

    async def story() -> None:
        watch = asyncio.create_task(watch_file(path, stamp, lambda: seen.append(path.read_text())))
        await asyncio.sleep(3.0)
        watch.cancel()

    play(story())
    assert seen == ["changed since"]
