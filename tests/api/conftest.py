"""Live servers that tests share: one over the fake, one over the default model. A failure shows what they said."""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.api.live_server import PATIENCE_S, LiveServer, live_server, written

_MOST_LINES = 200
FAKE = """
[[models]]
name = "fake"
runner = "fake"
[models.fake]
profile = { c0_s = 0.001, c_in_s = 1e-6, c_out_s = 1e-6 }
"""


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The fake with short steps, one worker: answers can be computed from prompts. Not for tests that kill."""
    home = tmp_path_factory.mktemp("fake")
    with live_server(home, "--config", str(written(home, FAKE))) as server:
        yield server


@pytest.fixture(scope="module")
def model_server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[LiveServer]:
    """The default chat model, really computed. Started for each module that uses it, and it takes its time."""
    with live_server(tmp_path_factory.mktemp("model"), "--model", f"default={smollm2_path}") as server:
        yield server


@pytest.fixture
def client(fake_server: LiveServer) -> Iterator[OpenAI]:
    """The official client, of the fake."""
    with openai_client(fake_server) as client:
        yield client


@pytest.fixture
def model_client(model_server: LiveServer) -> Iterator[OpenAI]:
    """The official client, of the default model."""
    with openai_client(model_server) as client:
        yield client


def openai_client(server: LiveServer, key: str | None = None, max_retries: int = 0) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key or server.key, max_retries=max_retries, timeout=PATIENCE_S)


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short path, whatever the test's name: sockets lie below it, and their paths are bounded."""
    return tmp_path_factory.mktemp("h") / "home"


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
