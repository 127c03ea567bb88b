"""Threads of a process that may not keep all cores busy."""

from collections.abc import Iterator

import pytest
import torch

from headrace.runner.torch import threads

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("cores", "asked", "taken"), [(1, 0, 1), (2, 0, 2), (8, 0, 3), (1, 2, 2)])
def test_no_more_than_can_be_kept_busy_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, cores: int, asked: int, taken: int
) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: cores)
    threads.take_threads(asked)
    assert torch.get_num_threads() == taken
