"""Live servers that tests share: one over the fake, one over the default model. A failure shows what they said."""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.api.live_server import LiveServer, live_server

_MOST_LINES = 200


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """`--runner fake`, one worker: answers can be computed from prompts. Not for tests that kill."""
    with live_server(tmp_path_factory.mktemp("fake"), "--runner", "fake") as server:
        yield server


@pytest.fixture(scope="session")
def model_server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[LiveServer]:
    """The default chat model, really computed."""
    with live_server(tmp_path_factory.mktemp("model"), "--model", f"default={smollm2_path}") as server:
        yield server


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        logs = {value.log for value in item.funcargs.values() if isinstance(value, LiveServer)}
        folder = item.funcargs.get("home")
        if isinstance(folder, Path):
            logs |= set(folder.rglob("serve.log"))
        for log in logs:
            lines = log.read_text(errors="replace").splitlines()[-_MOST_LINES:]
            report.sections.append((f"server log {log.parent.name}", "\n".join(lines)))
    return report
