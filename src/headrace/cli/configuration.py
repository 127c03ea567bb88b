"""From a TOML file and flags to one checked `core.config.Config`. Owns the file's reading and what flags put over it.

Every error is one line that names the file and the field. What the values may be is said in `core.config`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from headrace.core.closed_set import possible
from headrace.core.config import DEVICES, DTYPES, Config, ModelConfig, check_config
from headrace.core.errors import InvalidInput

DEFAULT_ALIAS = "default"

_MOST_BYTES = 1 << 20
# Flags that are fields of the gateway's section.
_GATEWAY_FLAGS = ("host", "port", "grpc_port", "processes", "journal", "tls_cert", "tls_key")
# And of every model's.
_MODEL_FLAGS = ("runner", "device", "dtype", "workers")
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,99})=([^=].*)")
_FIELD_OF = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<where>[^`]*)`)?$", re.DOTALL)


class Flags(Struct, frozen=True):
    """What a command line says over the file. None and () leave a value to the file."""

    host: str | None = None
    port: int | None = None
    models: tuple[str, ...] = ()
    runner: str | None = None
    device: str | None = None
    dtype: str | None = None
    workers: int | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    grpc_port: int | None = None
    processes: int | None = None
    journal: str | None = None
    log_level: str | None = None


def resolve_config(path: Path | None, flags: Flags) -> Config:
    """The file, the flags over it, at least one model, an alias for the first; checked."""
    config = read_config(path) if path is not None else Config()
    try:
        config = _with_flags(config, flags)
        check_config(config)
    except InvalidInput as error:
        if path is None:
            raise
        raise InvalidInput(f"{path}: {error.message}", param=error.param) from None
    return config


def read_config(path: Path) -> Config:
    """Strict: a wrong type, an unknown name and a broken line are refused. Paths in it start at its folder."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise InvalidInput(f"{path}: a configuration has at most {_MOST_BYTES >> 20} MiB", param="config")
        config = msgspec.convert(tomllib.loads(text.decode()), Config)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror or error}", param="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path}: {error}", param="config") from None
    except RecursionError:
        raise InvalidInput(f"{path}: nested too deep", param="config") from None
    except msgspec.ValidationError as error:
        what, where = _split(str(error))
        names = possible(str(error), Config)
        known = f"; known are {', '.join(names)}" if names else ""
        raise InvalidInput(f"{path}: {where or 'the file'}: {what}{known}", param=where or "config") from None
    return _at_folder(config, path.parent)


def _split(message: str) -> tuple[str, str]:
    """msgspec's sentence as (what is wrong, where)."""
    parts = _FIELD_OF.fullmatch(message)
    assert parts is not None
    what = parts["what"].replace("`", "")
    return what[:1].lower() + what[1:], parts["where"] or ""


def _at_folder(config: Config, folder: Path) -> Config:
    def placed(name: str | None) -> str | None:
        return name if name is None else str(folder / Path(name).expanduser())

    gateway = replace(config.gateway, tls_cert=placed(config.gateway.tls_cert), tls_key=placed(config.gateway.tls_key))
    models = tuple(
        replace(model, source=placed(model.source)) if model.source and (folder / model.source).exists() else model
        for model in config.models
    )
    return replace(config, gateway=gateway, models=models)


def _with_flags(config: Config, flags: Flags) -> Config:
    for flag, value, known in (("--device", flags.device, DEVICES), ("--dtype", flags.dtype, DTYPES)):
        if value is not None and value not in known:
            raise InvalidInput(f"{flag} must be one of {', '.join(known)}", param=flag)
    gateway = replace(config.gateway, **_said(flags, _GATEWAY_FLAGS))
    models = config.models
    if flags.models or not models:
        configured = {model.name: model for model in models}
        words = flags.models or ("fake" if flags.runner == "fake" else "default",)
        models = tuple(configured.get(word) or parse_model(word) for word in words)
    models = tuple(replace(model, **_said(flags, _MODEL_FLAGS)) for model in models)
    telemetry = replace(config.telemetry, log_level=flags.log_level or config.telemetry.log_level)
    return replace(config, gateway=gateway, telemetry=telemetry, models=_with_default(models))


def _said(flags: Flags, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(flags, name)) is not None}


def _with_default(models: tuple[ModelConfig, ...]) -> tuple[ModelConfig, ...]:
    """A client that names no particular model means the first."""
    if any(DEFAULT_ALIAS in (model.name, *model.aliases) for model in models):
        return models
    first = models[0]
    return (replace(first, aliases=(*first.aliases, DEFAULT_ALIAS)), *models[1:])


def parse_model(word: str) -> ModelConfig:
    """`--model`: a name, a path, or NAME=SOURCE."""
    named = _NAMED.fullmatch(word)
    if named and not Path(word).exists():
        return ModelConfig(named[1], source=named[2])
    if "/" not in word and not word.endswith(".gguf"):
        return ModelConfig(word, source=word)
    path = Path(word).expanduser()
    stem = path.stem if path.suffix == ".gguf" else path.resolve().name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")
    if not name:
        raise InvalidInput(f"--model {word[:200]}: give it a name: NAME={word[:200]}", param="--model")
    return ModelConfig(name, source=str(path))
