"""`headrace models profile` over a tiny random model: measured, drawn, stored, and planned with."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.cli.profile.picture import draw_profile
from headrace.weights.profiles import ProfileStore
from tests.unit.cli.profile.profile_rig import a_profile
from tests.unit.weights.files import tiny_shape, write_gguf
from tests.unit.weights.wheels import sha256

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_a_model_is_measured_drawn_stored_and_planned_with(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, home: Path
) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", tiny_shape(context_len=256))
    asked = ("--slots", "4", "--dtype", "fp32", "--device", "cpu", "--patience", "0.5")
    code, out, err = run(capsys, "models", "profile", str(model), *asked, "--json")
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    profile = document["profile"]
    assert profile["files"] == {"tiny.gguf": sha256(model.read_bytes())}
    assert (profile["device"], profile["dtype"], profile["slots"]) == ("cpu", "fp32", 4)
    assert profile["fingerprint"] and profile["machine"]["cores"] >= 1
    assert {point["rows"] for point in profile["decode"]} == {1, 2, 4}
    assert profile["prompts"][0]["tokens_per_s"] > 0
    assert (tmp_path / "profile-tiny.png").read_bytes().startswith(b"\x89PNG")
    stored = home / "profiles" / "tiny.json"
    assert document["stored"] == str(stored)
    assert ProfileStore(home / "profiles").load("tiny").measured_at == profile["measured_at"]


def test_it_is_told_in_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from rich.console import Console

    from headrace.cli.profile.report import print_profile

    print_profile(a_profile(), Console(width=120))
    out = capsys.readouterr().out
    for said in ("tiny, int8 on a processor", "inter-token p50", "199.0", "knee", "prompt tokens/s", "KV holds"):
        assert said in out


def test_what_cannot_be_is_refused_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "models", "profile", "no-such", "--as", "../escape")
    assert code == 2 and "cannot name a profile" in err
    code, _, err = run(capsys, "models", "profile", "no-such", "--patience", "nan")
    assert code == 2 and "--patience" in err
    code, _, err = run(capsys, "models", "profile", "no-such")
    assert code == 1 and "neither a pulled model nor a path" in err


def test_the_picture_begins_every_axis_at_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: Any, **others: Any) -> None:
        drawn.append(figure)
        save(figure, *args, **others)

    monkeypatch.setattr(Figure, "savefig", keep)
    draw_profile(a_profile(), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    for axes in drawn[0].axes:
        assert axes.get_xlim()[0] == 0 and axes.get_ylim()[0] == 0
        assert axes.get_ylabel()
