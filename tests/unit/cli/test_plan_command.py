"""`headrace plan` from the command line: the acceptance numbers, the JSON document, the refusals."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.cli.main import main
from headrace.weights.profiles import ProfileStore
from headrace.weights.store import Manifest, StoredFile
from tests.unit.cli.profile.profile_rig import a_profile

PROFILE = {"c0_s": 5e-3, "c_in_s": 2e-5, "c_out_s": 3e-5, "c_kv_s": 2e-8, "c_att_s": 2e-10}
MEASURED = ["--tokens-per-s", "10000", "--prompt", "25", "--output", "50", "--rate", "4000"]
PEAK = ["--tokens-per-s", "1000", "--count", "output", "--prompt", "500", "--output", "1000", "--rate", "50000"]


class Command:
    """Runs the command in this process and keeps what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["plan", *arguments])
        out, err = self._capsys.readouterr()
        return int(ended.value.code or 0), out, err

    def report(self, *arguments: str) -> dict[str, Any]:
        code, out, err = self.run(*arguments, "--json")
        assert (code, err) == (0, "")
        document: dict[str, Any] = json.loads(out)
        return document

    def refusal(self, *arguments: str) -> str:
        code, out, err = self.run(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and err.count("\n") == 1
        return err


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**PROFILE, "slots": 32, "kv_tokens": 200_000}))
    return str(path)


def test_the_table_comes_with_the_arithmetic(command: Command) -> None:
    code, out, _ = command.run(*MEASURED, "--headroom", "20%")
    assert code == 0
    assert "133.33" in out and "with 20 % headroom: 30 × 1.2 = 36 GPUs" in out


@pytest.mark.parametrize(("more", "gpus"), [([], 30), (["--headroom", "0.2"], 36), (["--batching", "2"], 15)])
def test_measured_throughput_in_json(command: Command, more: list[str], gpus: int) -> None:
    report = command.report(*MEASURED, *more)
    assert report["gpus"] == gpus
    if "--batching" not in more:
        assert report["sustained_rate_per_s_per_replica"]["exact"] == "400/3"


def test_peak_with_price_and_with_given_gpus(command: Command) -> None:
    assert command.report(*PEAK)["gpus"] == 50_000
    found = command.report(*PEAK, "--batching", "8", "--price", "2")
    assert (found["gpus"], found["cost"]["per_day"]["exact"]) == (6_250, "300000")
    given = command.report(*PEAK, "--batching", "8", "--price", "2", "--gpus", "6000")
    assert (given["gpus"], given["cost"]["per_day"]["exact"]) == (6_000, "288000")
    assert any("104.17 %" in line for line in given["lines"])


def test_a_profile_with_targets_and_price(command: Command, profile: str) -> None:
    lengths = ["--prompt", "lognormal:300:0.8:10:4000", "--output", "uniform:5:200"]
    asked = ["--profile", profile, *lengths, "--rate", "300", "--headroom", "0.2", "--price", "2.50"]
    report = command.report(*asked, "--slo-ttft", "1", "--slo-itl", "0.05")
    assert report["source"] == "profile"
    assert report["replica"]["saturated"]["limit"] == "slots"
    assert 0.5 < report["utilisation"]["value"] < 1 / 1.2 + 1e-9
    code, out, _ = command.run(*asked)
    assert code == 0 and "split prefill/decode" in out


def test_a_plan_without_slack_is_called_one_that_does_not_hold(command: Command, profile: str) -> None:
    lengths = ["--profile", profile, "--prompt", "100", "--output", "200"]
    rate = str(command.report(*lengths, "--rate", "1")["sustained_rate_per_s_per_replica"]["value"] * 0.999)
    _, full, _ = command.run(*lengths, "--rate", rate)
    assert "This plan does not hold" in full and " s mean" in full.replace("ms mean", "")
    _, spare, _ = command.run(*lengths, "--rate", rate, "--headroom", "50%")
    assert "does not hold" not in spare and "ms mean" in spare


def test_flags_go_before_the_profile(command: Command, profile: str) -> None:
    asked = ["--profile", profile, "--prompt", "100", "--output", "100", "--rate", "100"]
    assert command.report(*asked, "--slots", "8")["replicas"] > command.report(*asked)["replicas"]
    assert command.report(*asked, "--kv-tokens", "1000")["replica"]["saturated"]["limit"] == "kv"


def test_a_toml_profile_and_a_toml_mix(command: Command, tmp_path: Path) -> None:
    profile, mix = tmp_path / "profile.toml", tmp_path / "mix.toml"
    profile.write_text("\n".join(f"{name} = {value}" for name, value in PROFILE.items()))
    mix.write_text(
        '[[classes]]\nweight = 9\nprompt = "uniform:50:300"\noutput = 60\n'
        '[[classes]]\nweight = 1\nprompt = 4000\noutput = {kind = "fixed", value = 300}\n'
    )
    sizes = ["--slots", "32", "--kv-tokens", "100000"]
    report = command.report("--profile", str(profile), "--mix", str(mix), "--rate", "20", *sizes)
    assert report["output_tokens_per_request"]["exact"] == "84"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([*MEASURED[:-1], "-4000"], "rate"),
        ([*MEASURED[:-1], "nan"], "--rate"),
        ([*MEASURED[:-1], "1e99"], "rate"),
        (MEASURED[:-2], "--rate is missing"),
        (MEASURED[2:], "--tokens-per-s or --profile"),
        ([*MEASURED, "--profile", "x.json"], "--tokens-per-s or --profile"),
        (["--tokens-per-s", "0", *MEASURED[2:]], "tokens_per_s"),
        (["--tokens-per-s", "10000", "--prompt", "0", *MEASURED[4:]], "--prompt"),
        ([*MEASURED, "--output", "inf"], "--output"),
        ([*MEASURED, "--headroom", "-20%"], "headroom"),
        ([*MEASURED, "--batching", "0"], "batching"),
        ([*MEASURED, "--gpus", "2.5"], "--gpus"),
        ([*MEASURED, "--gpus", "0"], "gpus"),
        ([*MEASURED, "--price", "free"], "--price"),
        ([*MEASURED, "--count", "input"], "--count"),
        ([*MEASURED, "--slots", "8"], "--slots needs --profile"),
        ([*MEASURED, "--mix", "mix.json"], "--prompt and --mix"),
        (["--profile", "/nonexistent.json", *MEASURED[2:]], "--profile: cannot read"),
    ],
)
def test_bad_flags_are_refused_in_one_line_that_names_them(command: Command, arguments: list[str], named: str) -> None:
    assert named in command.refusal(*arguments)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("{", "malformed"),
        ("[]", "object"),
        ("[" * 100_000, "malformed"),
        (json.dumps({**PROFILE, "slots": 32}), "kv_tokens"),
        (json.dumps({**PROFILE, "slots": 0, "kv_tokens": 10_000}), "slots"),
        (json.dumps({**PROFILE, "slots": 32, "kv_tokens": 10_000, "c_in_s": "fast"}), "c_in_s"),
        (json.dumps({**PROFILE, "slots": 32, "kv_tokens": 10_000, "c_in_s": -1}), "c_in_s"),
        (json.dumps({**PROFILE, "slots": 32, "kv_tokens": 10_000, "c_on_s": 1}), "c_on_s"),
        (json.dumps({"c0_s": 5e-3, "slots": 32, "kv_tokens": 10_000}), "c_in_s"),
        (json.dumps({**PROFILE, "slots": 32, "kv_tokens": 60}), "kv_tokens"),
    ],
)
def test_a_malformed_profile_is_refused_by_field(command: Command, tmp_path: Path, body: str, named: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(body)
    assert named in command.refusal("--profile", str(path), *MEASURED[2:])


def test_a_malformed_toml_profile_is_refused(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    path.write_text("c0_s = nan\n" + "\n".join(f"{name} = 1e-5" for name in list(PROFILE)[1:]))
    assert "c0_s" in command.refusal("--profile", str(path), *MEASURED[2:], "--slots", "4", "--kv-tokens", "999")
    path.write_bytes(b"\xff\xfe")
    assert "malformed" in command.refusal("--profile", str(path), *MEASURED[2:])


def test_a_malformed_mix_is_refused_by_field(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "mix.json"
    path.write_text(json.dumps({"classes": [{"prompt": {"kind": "uniform", "low": 1}, "output": 5}]}))
    error = command.refusal("--tokens-per-s", "100", "--mix", str(path), "--rate", "5")
    assert "high" in error and "classes" in error


LOAD = ["--prompt", "100", "--output", "100", "--rate", "100"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProfileStore:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return ProfileStore(tmp_path / "home" / "profiles")


def test_a_stored_profile_plans_like_a_file_that_says_the_same(
    command: Command, store: ProfileStore, tmp_path: Path
) -> None:
    store.save(a_profile())
    code, out, err = command.run("--profile", "tiny", *LOAD, "--json")
    assert code == 0 and err.startswith("profile tiny: int8 on a processor, measured 2026-01-01")
    written = tmp_path / "flat.json"
    written.write_text(json.dumps({**PROFILE, "slots": 32, "kv_tokens": 32_000, "max_step_tokens": 256}))
    assert json.loads(out) == command.report("--profile", str(written), *LOAD)


def test_a_stored_profile_may_be_carried_elsewhere_as_a_file(command: Command, store: ProfileStore) -> None:
    path = store.save(a_profile())
    by_path, by_name = (command.run("--profile", asked, *LOAD, "--json") for asked in (str(path), "tiny"))
    assert by_path == by_name and by_path[0] == 0


def test_flags_go_before_a_stored_profile_too(command: Command, store: ProfileStore) -> None:
    store.save(a_profile())
    _, out, _ = command.run("--profile", "tiny", *LOAD, "--kv-tokens", "1000", "--json")
    assert json.loads(out)["replica"]["saturated"]["limit"] == "kv"


def test_a_file_without_a_suffix_is_still_a_file(command: Command, store: ProfileStore, tmp_path: Path) -> None:
    flat = {**PROFILE, "slots": 8, "kv_tokens": 9000}
    (tmp_path / "replica").write_text("\n".join(f"{name} = {value}" for name, value in flat.items()))
    assert command.report("--profile", "replica", *LOAD)["source"] == "profile"


def test_a_name_that_nobody_stored_says_how_to_measure_it(command: Command, store: ProfileStore) -> None:
    code, out, err = command.run("--profile", "default", *LOAD)
    assert (code, out) == (2, "")
    assert "no profile is stored as 'default', and there is no such file; to make one: headrace models profile" in err


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{", "is damaged"),
        ("[]", "is not a Headrace profile"),
        (json.dumps({"format": "headrace-profile", "version": 0}), "measure again"),
        (json.dumps({"format": "headrace-profile", "version": 1, "slots": "many"}), "is damaged"),
    ],
)
def test_a_stored_profile_that_is_none_is_refused_in_one_line(
    command: Command, store: ProfileStore, body: str, said: str
) -> None:
    path = store.save(a_profile())
    path.write_text(body)
    assert said in command.refusal("--profile", "tiny", *LOAD)


def test_a_profile_of_other_files_than_those_pulled_is_outdated(command: Command, store: ProfileStore) -> None:
    store.save(a_profile())
    folder = store.folder.parent / "models" / "tiny"
    folder.mkdir(parents=True)
    manifest = Manifest("tiny", "tiny.gguf", {"tiny.gguf": StoredFile(1, "1" * 64, "pypi:a==1#tiny.gguf")})
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    assert "is outdated" in command.refusal("--profile", "tiny", *LOAD)
    store.save(a_profile(files={"tiny.gguf": "1" * 64}))
    assert command.run("--profile", "tiny", *LOAD)[0] == 0
