"""The folder of a running server: private, short enough for sockets, and gone afterwards."""

import stat
import tempfile
from pathlib import Path

import pytest

from headrace.control.orders import Orders
from headrace.control.run_folder import RunFolder, read_orders
from headrace.core.config import Config, ModelConfig, TenantEntry
from headrace.core.errors import HeadraceError

ORDERS = Orders(Config(models=(ModelConfig("a"),), tenants=(TenantEntry("t"),)), {"a": "/m"}, {"a": ("/s",)})


def test_only_its_owner_can_enter_and_it_is_removed() -> None:
    # A short name, whatever folder the tests are run in.
    with tempfile.TemporaryDirectory() as home, RunFolder(Path(home)) as folder:
        assert folder.path.parent == Path(home) / "run"
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        path = folder.path
    assert not path.exists()


def test_orders_are_read_as_they_were_written_and_only_by_their_owner(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.write_orders(Orders(Config(), {}, {}))
        folder.write_orders(ORDERS)
        assert read_orders(folder.path) == ORDERS
        assert stat.S_IMODE((folder.path / "orders.json").stat().st_mode) == 0o600
        (folder.path / "orders.json").write_text("{")
        with pytest.raises(HeadraceError):
            read_orders(folder.path)


def test_a_deep_home_gets_a_folder_that_sockets_fit_into(tmp_path: Path) -> None:
    with RunFolder(tmp_path / ("d" * 100)) as folder:
        assert len(folder.worker_address(255, 255)) <= 107
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        path = folder.path
    assert not path.exists()


def test_what_a_killed_server_left_is_swept_and_a_living_one_is_not(tmp_path: Path) -> None:
    left = tmp_path / "run" / "1-dead"
    left.mkdir(parents=True)
    (left / "lock").touch()
    foreign = tmp_path / "run" / "no-lock"
    foreign.mkdir()
    with RunFolder(tmp_path) as living, RunFolder(tmp_path):
        assert living.path.exists()
        assert (left.exists(), foreign.exists()) == (False, True)
