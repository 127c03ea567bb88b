"""The local key: random per install, one for all who start at once, only its owner's to read."""

import json
import stat
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.accounts.keys import hash_key
from headrace.cli import main as cli
from headrace.cli.keys import CLIENT_VARIABLE, VARIABLE, find_key, local_key, with_local_tenant
from headrace.core.config import Config, TenantEntry, check_config
from headrace.core.errors import InvalidInput


@pytest.fixture(autouse=True)
def _no_key_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(CLIENT_VARIABLE, raising=False)


def test_the_key_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    first = local_key(tmp_path / "home")
    assert first == local_key(tmp_path / "home")
    assert first.key != local_key(tmp_path / "other").key
    assert first.path is not None and stat.S_IMODE(first.path.stat().st_mode) == 0o600
    assert list((tmp_path / "home").iterdir()) == [first.path]


def test_all_who_start_at_once_have_the_same_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert len({key.key for key in pool.map(local_key, [tmp_path] * 64)}) == 1


def test_a_file_that_others_could_read_is_closed(tmp_path: Path) -> None:
    path = local_key(tmp_path).path
    assert path is not None
    path.chmod(0o644)
    local_key(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_environment_goes_over_the_file_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "a-key-of-my-own-choice")
    key = local_key(tmp_path)
    assert (key.key, key.place, key.path) == ("a-key-of-my-own-choice", f"${VARIABLE}", None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "bad", ["", "short", "with a space in it", "x" * 513, "nön-äscii-letters-here", "new\nline-in-the-key"]
)
def test_a_key_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str) -> None:
    monkeypatch.setenv(VARIABLE, bad)
    with pytest.raises(InvalidInput):
        local_key(tmp_path)
    monkeypatch.delenv(VARIABLE)
    (tmp_path / "key").write_text(bad)
    with pytest.raises(InvalidInput):
        local_key(tmp_path)


def test_the_local_tenant_is_added_and_a_configured_one_keeps_its_settings() -> None:
    acme, key = TenantEntry("acme", keys=("ab" * 32,)), "some-long-enough-key"
    config = with_local_tenant(Config(tenants=(acme,)), key)
    local = config.tenants[1]
    assert config.tenants[0] == acme
    assert (local.name, local.tier, local.scopes, local.keys) == (
        "local",
        "enterprise",
        ("metrics", "admin"),
        (hash_key(key),),
    )
    mine = TenantEntry("local", weight=3.0, tier="plus", keys=("cd" * 32,), scopes=("admin",))
    local = with_local_tenant(Config(tenants=(mine,)), key).tenants[0]
    assert (local.weight, local.tier, local.scopes) == (3.0, "plus", ("admin", "metrics"))
    assert local.keys == ("cd" * 32, hash_key(key))
    check_config(with_local_tenant(with_local_tenant(config, key), key))


def test_a_new_key_comes_with_the_hash_a_configuration_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["keys", "new", "--json"])
    made = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0 and made["sha256"] == hash_key(made["key"])
    check_config(Config(tenants=(TenantEntry("a", keys=(made["sha256"],)),)))
    with pytest.raises(SystemExit):
        cli.main(["keys", "new"])
    shown = capsys.readouterr()
    assert made["key"] not in shown.out
    # What is told can be put in a file as it stands.
    (entry,) = tomllib.loads(shown.err.partition("configuration:\n")[2])["tenants"]
    assert entry["keys"] == [shown.out.split()[-1]]


HERE = ("127.0.0.1", "127.9.9.9", "::1", "localhost")
ELSEWHERE = ("127.example.com", "localhost.example.com", "example.com", "10.0.0.1", "0.0.0.0", "2130706433", "")


def test_this_installs_key_goes_to_this_machine_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    assert {find_key(None, host) for host in (*HERE, *ELSEWHERE)} == {None}
    (tmp_path / "key").write_text("hr-file\n")
    assert {find_key(None, host) for host in HERE} == {"hr-file"}
    monkeypatch.setenv(VARIABLE, "hr-local")
    assert {find_key(None, host) for host in HERE} == {"hr-local"}
    assert {find_key(None, host) for host in ELSEWHERE} == {None}


def test_a_clients_own_key_goes_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "hr-local")
    monkeypatch.setenv(CLIENT_VARIABLE, "hr-client")
    monkeypatch.setenv("OTHER", "k2")
    for host in (*HERE, *ELSEWHERE):
        assert find_key(None, host) == "hr-client"
        assert (find_key("k1", host), find_key("env:OTHER", host)) == ("k1", "k2")


@pytest.mark.parametrize("given", ["a\r\nb", "schlüssel", "env:HEADRACE_NO_SUCH_VARIABLE"])
def test_what_cannot_be_shown_to_a_server(given: str) -> None:
    with pytest.raises(InvalidInput):
        find_key(given, "example.com")
