"""The configuration file and the flags over it: strict, in one line, with the file's name."""

import re
from pathlib import Path

import pytest
from msgspec import Struct

from headrace.cli import main as cli
from headrace.cli.configuration import Flags, parse_model, read_config, resolve_config
from headrace.core.config import (
    PROMISES,
    Config,
    CostProfile,
    FakeConfig,
    GatewayConfig,
    ModelConfig,
    TelemetryConfig,
    TenantEntry,
)
from headrace.core.errors import InvalidInput

EXAMPLE = Path(__file__).parents[3] / "examples" / "headrace.toml"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "headrace.toml"
    path.write_text(text)
    return path


def refusal(path: Path | None, flags: Flags | None = None) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        resolve_config(path, flags or Flags())
    return caught.value


def test_without_a_file_there_is_the_default_model() -> None:
    config = resolve_config(None, Flags())
    assert config == Config(models=(ModelConfig("default", source="default"),))


def test_the_example_says_what_the_defaults_are() -> None:
    config = resolve_config(EXAMPLE, Flags())
    assert (config.gateway, config.engine, config.telemetry) == (Config().gateway, Config().engine, Config().telemetry)
    assert [tenant.name for tenant in config.tenants] == ["acme", "bulk"]


@pytest.mark.parametrize("section", [GatewayConfig, TelemetryConfig, ModelConfig, FakeConfig, CostProfile, TenantEntry])
def test_the_example_names_everything_that_can_be_set(section: type[Struct]) -> None:
    text = EXAMPLE.read_text()
    for name in (*section.__struct_fields__, *PROMISES, "inject"):
        assert re.search(rf"^(# )?(\[+[a-z.]*\b{name}\b|{name} = )", text, re.MULTILINE), name


def test_flags_go_over_the_file(tmp_path: Path) -> None:
    path = written(
        tmp_path, '[gateway]\nport = 1\nhost = "::1"\n[[models]]\nname = "a"\nrunner = "fake"\nworkers = 2\n'
    )
    config = resolve_config(path, Flags(port=9))
    assert (config.gateway.host, config.gateway.port, config.models[0].workers) == ("::1", 9, 2)
    config = resolve_config(path, Flags(workers=3, models=("b", "a")))
    assert [(model.name, model.runner, model.workers) for model in config.models] == [
        ("b", "torch", 3),
        ("a", "fake", 3),
    ]


def test_device_and_dtype_are_the_files_unless_a_flag_says_otherwise(tmp_path: Path) -> None:
    path = written(tmp_path, '[[models]]\nname = "a"\ndevice = "cpu"\ndtype = "fp32"\n')
    found = [resolve_config(path, flags).models[0] for flags in (Flags(), Flags(dtype="int8"), Flags(device="auto"))]
    assert [(model.device, model.dtype) for model in found] == [("cpu", "fp32"), ("cpu", "int8"), ("auto", "fp32")]
    assert [refusal(None, flags).param for flags in (Flags(dtype="int2"), Flags(device="gpu"))] == [
        "--dtype",
        "--device",
    ]


def test_the_level_of_the_log_is_the_files_unless_a_flag_says_otherwise(tmp_path: Path) -> None:
    path = written(tmp_path, '[telemetry]\nlog_level = "warning"\n')
    assert resolve_config(path, Flags()).telemetry.log_level == "warning"
    assert resolve_config(path, Flags(log_level="debug")).telemetry.log_level == "debug"
    assert "one of debug, info, warning, error" in refusal(None, Flags(log_level="loud")).message


def test_the_first_model_is_the_default_unless_another_says_so(tmp_path: Path) -> None:
    config = resolve_config(None, Flags(models=("a", "b"), runner="fake"))
    assert [model.aliases for model in config.models] == [("default",), ()]
    path = written(tmp_path, '[[models]]\nname = "a"\n[[models]]\nname = "b"\naliases = ["default"]\n')
    assert [model.aliases for model in resolve_config(path, Flags()).models] == [(), ("default",)]


def test_the_fake_needs_no_source() -> None:
    config = resolve_config(None, Flags(runner="fake"))
    assert [(model.name, model.aliases) for model in config.models] == [("fake", ("default",))]


@pytest.mark.parametrize(
    ("text", "param", "words"),
    [
        ("[gateway]\nport = 'x'", "gateway.port", "expected int, got str"),
        ("[gateway]\nprot = 1", "gateway", "unknown field prot; known are host, port, grpc_port, "),
        ("lunch = 1", "config", "the file: object contains unknown field lunch; known are engine, "),
        ("[[models]]\nname = 1", "models[0].name", "expected str, got int"),
        ("[[tenants]]\nweight = 1", "tenants[0]", "missing required field name"),
        ("[gateway\n", "config", "line 1"),
        ("[gateway]\nport = 70000", "gateway.port", "from 0 to 65535"),
        ("[gateway]\nport = true", "gateway.port", "expected int, got bool"),
        ("[inject]\nroute = nan", "inject.route", "must be a number"),
        ("[gateway]\nprocesses = 2", "gateway.processes", "needs Redis"),
        ("[[tenants]]\nname = 'a'\ntier = 'gold'", "tier", "one of batch, free, plus, enterprise"),
        ("[[models]]\nname = 'a'\ndtype = 'fp4'", "models[0].dtype", "one of auto, fp32, bf16, fp8, int8, int4"),
        ("[telemetry]\nlog_level = 'INFO'", "telemetry.log_level", "one of debug, info, warning, error"),
    ],
)
def test_a_broken_file_is_one_line_that_names_file_and_field(tmp_path: Path, text: str, param: str, words: str) -> None:
    path = written(tmp_path, text)
    error = refusal(path)
    assert error.param == param
    assert error.message.startswith(f"{path}: ") and words in error.message and "\n" not in error.message


def test_a_file_that_is_none(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.toml").message
    assert refusal(tmp_path).param == "config"
    (tmp_path / "latin.toml").write_bytes(b"# \xff")
    assert refusal(tmp_path / "latin.toml").param == "config"
    (tmp_path / "huge.toml").write_text("#" * (1 << 21))
    assert "1 MiB" in refusal(tmp_path / "huge.toml").message
    (tmp_path / "deep.toml").write_text("a = " + "[" * 100_000)
    assert refusal(tmp_path / "deep.toml").param == "config"


def test_whole_numbers_are_numbers(tmp_path: Path) -> None:
    assert read_config(written(tmp_path, "[gateway]\ndrain_s = 5")).gateway.drain_s == 5.0


def test_paths_in_the_file_start_at_its_folder(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").touch()
    text = '[gateway]\ntls_cert = "c.pem"\ntls_key = "/k.pem"\n'
    text += '[[models]]\nname = "a"\nsource = "tiny.gguf"\n[[models]]\nname = "b"\nsource = "default"\n'
    config = read_config(written(tmp_path, text))
    assert (config.gateway.tls_cert, config.gateway.tls_key) == (str(tmp_path / "c.pem"), "/k.pem")
    assert [model.source for model in config.models] == [str(tmp_path / "tiny.gguf"), "default"]


@pytest.mark.parametrize(
    ("word", "name", "source"),
    [
        ("default", "default", "default"),
        ("small=default", "small", "default"),
        ("models/Tiny Model.gguf", "Tiny-Model", "models/Tiny Model.gguf"),
        ("tiny.Q4_1.gguf", "tiny.Q4_1", "tiny.Q4_1.gguf"),
        ("/srv/qwen2.5", "qwen2.5", "/srv/qwen2.5"),
        ("mine=/srv/qwen2.5", "mine", "/srv/qwen2.5"),
    ],
)
def test_a_model_on_the_command_line(word: str, name: str, source: str) -> None:
    assert parse_model(word) == ModelConfig(name, source=source)


def test_a_path_that_holds_an_equals_sign_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b.gguf").touch()
    assert parse_model("a=b.gguf") == ModelConfig("a-b", source="a=b.gguf")


def test_a_path_without_a_name_needs_one() -> None:
    with pytest.raises(InvalidInput, match="give it a name"):
        parse_model("/")


def test_a_bad_file_ends_serve_with_code_2_before_anything_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--config", str(written(tmp_path, "[gateway]\nport = 'x'"))])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "home" / "run").exists()
