"""`headrace generate`: one prompt streamed to the terminal, or a file of them through the same engine.

Owns the flags and what is printed or written. The model is put together in `local`; generation is `serving`'s.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, cast

import msgspec
import typer
from msgspec.structs import replace

from headrace.cli.console import check_finite, note, print_json
from headrace.core.errors import HeadraceError, InvalidInput
from headrace.serving.ask import Ask

if TYPE_CHECKING:
    from headrace.cli.local import LocalModel
    from headrace.serving.local import Spoken
    from headrace.serving.rows import Row

# Rows read ahead of the engine, so that it never runs dry and a huge file is never held at once.
_AHEAD = 4
_MOST_LINE_BYTES = 16 << 20
# Further ones are in the output only.
_SHOWN_ERRORS = 5


def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to say to the model.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="JSON lines, one ask each; - reads standard input.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where the replies of --file go, a line each. [default: stdout]"),
    ] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="A pulled model, a .gguf file or a folder.")] = "default",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a reply.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, max=100, help="0 takes the likeliest token every time.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0)] = 0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same reply.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the reply before this text; may be given again.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it stands, without a chat template.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu; auto takes a CUDA card that can be used.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, fp32, int8 or int4; on a card bf16 or fp8.")] = "auto",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="On a card: the same bits alone and in any company, more slowly.")
    ] = False,
    slots: Annotated[int, typer.Option(min=1, max=1024, help="Sequences that run at once.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """Generate with a local model. Fetches the default model the first time.

    A line of --file is an object with prompt, messages, raw or ids, an optional id, and any option of a reply:
    max_tokens, temperature, top_p, top_k, min_p, seed, n, stop, json_schema, regex, choices, logprobs and so on.
    What a line leaves open is as the flags say. Replies are written as they end; index is the line's number.
    """
    check_finite(temperature=temperature, top_p=top_p)
    _check_source(prompt, file)
    if system is not None and (raw or file is not None):
        raise InvalidInput("--system goes with a prompt that is a message", param="--system")
    defaults = Ask(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop or [])
    loading = _loading(model, device, dtype, slots, deterministic=deterministic)
    if file is not None:
        _answer_file(loading, file, output, defaults, as_json=as_json)
    elif prompt is not None:
        ask = _ask(defaults, prompt, system, raw=raw)
        with loading as local:
            _answer(local, ask, as_json=as_json)


def _loading(
    model: str, device: str, dtype: str, slots: int, *, deterministic: bool
) -> AbstractContextManager[LocalModel]:
    """It is loaded when it is entered."""
    from headrace.cli.local import open_local
    from headrace.worker.assembly import LoadSettings

    return open_local(model, LoadSettings(device=device, dtype=dtype, slots=slots, deterministic=deterministic))


def _answer_file(
    loading: AbstractContextManager[LocalModel], file: Path, output: Path | None, defaults: Ask, *, as_json: bool
) -> None:
    _check_target(file, output, as_json=as_json)
    # Opened first: a model takes seconds to load, and a misspelt path should not.
    with _source(file) as source, _target(output) as target, loading as local:
        if output is not None:
            # Only now: what an earlier run wrote must survive a model that cannot be loaded.
            target.truncate(0)
        _run_file(local, source, target, defaults, as_json=as_json)


def _check_source(prompt: str | None, file: Path | None) -> None:
    if prompt is None and file is None:
        raise InvalidInput('give a prompt, or a file of them with --file: headrace generate "Hello"', param="prompt")
    if prompt is not None and file is not None:
        raise InvalidInput("give a prompt or --file, not both", param="prompt")


def _check_target(file: Path, output: Path | None, *, as_json: bool) -> None:
    if as_json and output is None:
        raise InvalidInput("--file with --json needs --output for the replies", param="--output")
    if output is not None and output.exists() and file.exists() and output.samefile(file):
        raise InvalidInput("--output would overwrite --file", param="--output")


def _ask(defaults: Ask, prompt: str, system: str | None, *, raw: bool) -> Ask:
    if raw:
        return replace(defaults, raw=prompt)
    if system is None:
        return replace(defaults, prompt=prompt)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
    return replace(defaults, messages=messages)


def _answer(local: LocalModel, ask: Ask, *, as_json: bool) -> None:
    """One reply, shown as it comes."""
    started_s = time.perf_counter()
    first_s = 0.0
    texts: list[str] = []
    service = local.service
    service.submit(0, service.prepare(ask))
    last: Spoken | None = None
    while service.num_open:
        for spoken in service.turn():
            first_s = first_s or time.perf_counter() - started_s
            texts.append(spoken.text)
            last = spoken
            if not as_json:
                print(spoken.text, end="", flush=True)
    total_s = time.perf_counter() - started_s
    assert last is not None and last.ended is not None
    counters = last.ended.counters
    rate = (counters.emitted - 1) / (total_s - first_s) if counters.emitted > 1 else 0.0
    if last.finish_reason == "error":
        raise HeadraceError(last.ended.message or last.ended.reason)
    if as_json:
        timing = {"first_token_s": first_s, "total_s": total_s, "tokens_per_s": rate}
        body = {"text": "".join(texts), "finish_reason": last.finish_reason, "usage": counters, "timing": timing}
        print_json({**body, "model": local.describe()})
        return
    print(flush=True)
    note(f"{counters.emitted} tokens, the first after {first_s:.2f} s, then {rate:.1f} tokens/s ({local.headline})")


def _run_file(local: LocalModel, source: BinaryIO, target: BinaryIO, defaults: Ask, *, as_json: bool) -> None:
    from headrace.serving.rows import RowRun

    run = RowRun(local.service, defaults, max_open=_AHEAD * local.config.slots)
    started_s = time.perf_counter()
    shown_s = 0.0
    for row in run.rows(_lines(source)):
        _write(target, row)
        if row.error is not None and run.num_failed <= _SHOWN_ERRORS:
            note(f"line {row.index + 1}: {row.error.message}")
        now_s = time.perf_counter()
        if now_s - shown_s > 1.0:
            shown_s = now_s
            rate = run.num_tokens / (now_s - started_s)
            note(f"{run.num_answered} answered, {run.num_failed} failed, {_state(local)}, {rate:,.0f} tokens/s")
    total_s = time.perf_counter() - started_s
    summary = {
        "answered": run.num_answered,
        "failed": run.num_failed,
        "tokens": run.num_tokens,
        "prompt_tokens": run.num_prompt_tokens,
        "seconds": total_s,
        "tokens_per_s": run.num_tokens / total_s,
    }
    if as_json:
        print_json({**summary, "model": local.describe()})
    else:
        note(
            f"{run.num_answered} answered, {run.num_failed} failed: {run.num_prompt_tokens:,} prompt tokens and "
            f"{run.num_tokens:,} generated in {total_s:.1f} s, {run.num_tokens / total_s:,.1f} tokens/s ({local.headline})"
        )
    if run.num_failed:
        raise typer.Exit(1)


def _state(local: LocalModel) -> str:
    load = local.engine.load()
    return f"{load.running} sequences running, {load.waiting} waiting"


@contextmanager
def _source(path: Path) -> Iterator[BinaryIO]:
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    with _opened(path, "rb") as file:
        yield file


@contextmanager
def _target(path: Path | None) -> Iterator[BinaryIO]:
    if path is None:
        yield sys.stdout.buffer
        return
    with _opened(path, "ab") as file:
        yield file


def _opened(path: Path, mode: str) -> BinaryIO:
    try:
        return cast(BinaryIO, path.open(mode))
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}", param=str(path)) from None


def _lines(source: BinaryIO) -> Iterator[bytes]:
    """One piece per line; of one that is too long only the beginning, which then fails as the broken JSON it is."""
    while line := source.readline(_MOST_LINE_BYTES):
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = source.readline(_MOST_LINE_BYTES)
        yield line


def _write(target: BinaryIO, row: Row) -> None:
    target.write(msgspec.json.encode(row) + b"\n")
    target.flush()
