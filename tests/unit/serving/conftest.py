"""One pool of limited processes for all stories here: they take a while to start."""

from collections.abc import Iterator

import pytest

from headrace.text.limited import LimitedPool


@pytest.fixture(scope="session")
def pool() -> Iterator[LimitedPool]:
    with LimitedPool() as pool:
        yield pool
