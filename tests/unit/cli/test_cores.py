"""What the environment tells the libraries that compute."""

import pytest

from headrace.cli.cores import library_settings


def test_only_what_libraries_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(library_settings()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setenv("HEADRACE_API_KEY", "secret")
    assert library_settings() == {"MKL_CBWR": "COMPATIBLE"}
