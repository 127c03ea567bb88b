"""Where the journal lies is said without what opens it."""

import pytest

from headrace.cli.redis import address_told

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("redis://127.0.0.1", "127.0.0.1"),
        ("redis://somebody:secret@journal.example:6390/2", "journal.example:6390"),
        ("rediss://:se@cret@journal.example", "journal.example"),
        ("unix:///run/redis.sock?password=secret", "/run/redis.sock"),
    ],
)
def test_without_name_and_password(address: str, told: str) -> None:
    assert address_told(address) == told
