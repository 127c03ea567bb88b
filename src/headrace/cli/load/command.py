"""`headrace bench serve`: its flags, and what they mean together. The measuring modules are imported when it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from headrace.cli.console import as_text, check_finite, picture_target, print_json
from headrace.cli.keys import VARIABLE
from headrace.core.errors import InvalidInput

if TYPE_CHECKING:
    from headrace.cli.load.http import Endpoint
    from headrace.cli.load.measure import Measured, Settings
    from headrace.cli.load.plan import LoadPlan, TenantLoad

_DURATION_S = 10.0
_USERS = 8
_KEY_NAME = "HEADRACE_API_KEY"


class _Flags(NamedTuple):
    """The flags that decide the load, as they were given."""

    key: str | None
    rate: float | None
    constant: bool
    together: int | None
    users: int | None
    think: float
    trace: Path | None
    prompt: str
    output: str
    requests: int | None
    duration: float | None
    warmup: float
    tenant: list[str]
    disconnect: float
    timeout: float
    timeout_s: float
    seed: int


def serve(
    url: Annotated[str, typer.Option(help="Where the server is.")] = "http://127.0.0.1:8080",
    key: Annotated[
        str | None, typer.Option(help=f"env:NAME reads a variable. [default: {_KEY_NAME}, or this install's local key]")
    ] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Default: the first one listed.")] = "",
    api: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    rate: Annotated[float | None, typer.Option(min=1e-3, max=1e5, help="Open loop: requests/s.")] = None,
    constant: Annotated[bool, typer.Option("--constant", help="Evenly spaced, not Poisson.")] = False,
    together: Annotated[int | None, typer.Option(min=1, max=1_000_000, help="So many requests, all at once.")] = None,
    users: Annotated[
        int | None, typer.Option(min=1, max=20_000, help=f"Closed loop: so many users. [default: {_USERS}]")
    ] = None,
    think: Annotated[float, typer.Option(min=0, max=3600, help="Seconds a user waits between requests.")] = 0.0,
    trace: Annotated[Path | None, typer.Option(help="Open loop: arrivals and lengths from a JSONL trace.")] = None,
    prompt: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "lognormal:100:0.6:10:1000",
    output: Annotated[str, typer.Option(help="Output lengths in tokens.")] = "lognormal:50:1.0:5:500",
    requests: Annotated[int | None, typer.Option(min=1, max=5_000_000, help="Counted requests of each tenant.")] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.1, max=86_400, help=f"Seconds that are counted. [default: {_DURATION_S:g}]")
    ] = None,
    warmup: Annotated[float, typer.Option(min=0, max=3600, help="Seconds at the start that are not counted.")] = 1.0,
    stream: Annotated[bool, typer.Option(help="Replies as they are made, or whole.")] = True,
    compare: Annotated[bool, typer.Option("--compare", help="Both, in alternating pairs.")] = False,
    pairs: Annotated[int, typer.Option(min=1, max=100, help="Pairs of --compare.")] = 3,
    tenant: Annotated[
        list[str] | None,
        typer.Option(help="name=N,key=K and any of rate, users, together, think, requests, prompt, output; repeat."),
    ] = None,
    disconnect: Annotated[float, typer.Option(min=0, max=1, help="Share of clients that go away.")] = 0.0,
    timeout: Annotated[float, typer.Option(min=0, max=1, help="Share of clients that give up.")] = 0.0,
    timeout_s: Annotated[float, typer.Option(min=1e-3, max=3600, help="When those of --timeout give up.")] = 1.0,
    slo: Annotated[str | None, typer.Option(help="Limits for goodput in seconds: ttft=0.5,itl=0.1,e2e=10.")] = None,
    check_truth: Annotated[
        bool, typer.Option("--check-truth", help="Server with --runner fake: every token must be right.")
    ] = False,
    vocab_size: Annotated[int | None, typer.Option(min=2, max=10_000_000, help="If the server does not say.")] = None,
    eos: Annotated[list[int] | None, typer.Option(min=0, help="Ids that end a sequence, with --vocab-size.")] = None,
    choices: Annotated[int, typer.Option("--n", min=1, max=128, help="Choices of each request.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, max=100)] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Every reply has its full length.")] = True,
    extra: Annotated[str, typer.Option(help="A JSON object added to every request.")] = "{}",
    pid: Annotated[
        list[int] | None, typer.Option(min=1, help="Processes to watch. Default: who listens there.")
    ] = None,
    connections: Annotated[int, typer.Option(min=1, max=60_000, help="Most connections at once.")] = 20_000,
    patience_s: Annotated[float, typer.Option(min=0.1, max=86_400, help="A request without end by then hangs.")] = 600,
    ca: Annotated[Path | None, typer.Option(help="Certificate authority of an https server.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    picture: Annotated[Path | None, typer.Option(help="Draw the latencies there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """A load over HTTP and what its clients saw: TTFT, ITL, E2E, tokens/s, goodput, CPU of the server's processes.

    Open loop (--rate, --together, --trace): times are fixed in advance and latencies count from them, so that a
    server that stalls cannot hide it. Closed loop (--users): each user asks again when answered. Shares of clients go
    away in the middle (--disconnect) or give up (--timeout). Lengths are written 25, uniform:LOW:HIGH or
    lognormal:MEDIAN:SIGMA:LOW:HIGH. Exit code 1: a request without exactly one end, or a token that is not the truth.
    """
    from headrace.cli.load.figures import parse_slo
    from headrace.cli.load.http import parse_url
    from headrace.cli.load.measure import Settings

    check_finite(rate=rate, think=think, duration=duration, warmup=warmup, disconnect=disconnect, timeout=timeout)
    check_finite(timeout_s=timeout_s, temperature=temperature, patience_s=patience_s)
    if api not in ("chat", "completions"):
        raise InvalidInput(f"--api is chat or completions, not {api[:40]!r}", param="--api")
    flags = _Flags(
        key, rate, constant, together, users, think, trace, prompt, output, requests, duration, warmup, tenant or [],
        disconnect, timeout, timeout_s, seed,
    )  # fmt: skip
    endpoint = parse_url(url, None if ca is None else str(ca))
    settings = Settings(
        endpoint=endpoint,
        plan=load_plan(flags, endpoint),
        model=model,
        api="completions" if check_truth else api,
        streamed=stream,
        pairs=pairs if compare else 0,
        temperature=temperature,
        ignore_eos=ignore_eos,
        choices=choices,
        truth=check_truth,
        vocab_size=vocab_size,
        eos_ids=tuple(eos or ()),
        slo=None if slo is None else parse_slo(slo),
        patience_s=patience_s,
        connections=connections,
        pids=tuple(pid or ()),
        extra=_extra(extra),
    )
    target = None if picture is None else picture_target(picture, picture)
    _show(_measured(settings), settings, target, as_json=as_json)


def load_plan(flags: _Flags, endpoint: Endpoint) -> LoadPlan:
    """The load that the flags mean. Raises InvalidInput for those that contradict each other."""
    from msgspec import structs

    from headrace.cli.load.plan import Churn, LoadPlan, TenantLoad, parse_arrivals, parse_tenant
    from headrace.sim.lengths import parse_lengths

    ways = [name for name in ("rate", "together", "users", "trace") if getattr(flags, name) is not None]
    if len(ways) > 1:
        raise InvalidInput(f"--{ways[0]} and --{ways[1]} are two different loads", param=f"--{ways[1]}")
    if flags.disconnect + flags.timeout > 1.0:
        raise InvalidInput(
            "--disconnect and --timeout are shares of all requests: at most 1 together", param="--timeout"
        )
    base = TenantLoad(
        name="default",
        key=flags.key,
        prompt=parse_lengths(flags.prompt, "--prompt"),
        output=parse_lengths(flags.output, "--output"),
        arrivals=parse_arrivals(flags.rate, flags.together, constant=flags.constant),
        users=flags.users or (0 if ways else _USERS),
        think_s=flags.think,
        requests=flags.requests,
        trace=None if flags.trace is None else str(flags.trace),
    )
    tenants = [parse_tenant(text, base, constant=flags.constant) for text in flags.tenant] or [base]
    tenants = [structs.replace(load, key=find_key(load.key, endpoint)) for load in tenants]
    names = [load.name for load in tenants]
    if len(set(names)) < len(names):
        raise InvalidInput("--tenant: two tenants have the same name", param="--tenant")
    bounded = all(load.requests is not None or load.trace is not None or _is_crowd(load) for load in tenants)
    duration_s = flags.duration if flags.duration is not None or bounded else _DURATION_S
    # A crowd comes once: there is nothing to warm up with.
    warmup_s = 0.0 if all(_is_crowd(load) for load in tenants) else flags.warmup
    churn = Churn(flags.disconnect, flags.timeout, flags.timeout_s)
    return LoadPlan(tuple(tenants), warmup_s, duration_s, churn, flags.seed)


def _is_crowd(load: TenantLoad) -> bool:
    from headrace.sim.arrivals import Together

    return isinstance(load.arrivals, Together)


def find_key(given: str | None, endpoint: Endpoint) -> str | None:
    """A key on the command line can be read by every user of the machine: a variable may be named instead.

    This install's own key goes to servers of this machine only.
    """
    if given is not None and given.startswith("env:"):
        given = os.environ.get(given[4:])
        if given is None:
            raise InvalidInput("the variable that --key names is not set", param="--key")
    given = given or os.environ.get(_KEY_NAME)
    if given is None and endpoint.is_local:
        given = os.environ.get(VARIABLE) or _local_key()
    if given is not None and not (given.isascii() and given.isprintable()):
        raise InvalidInput("a key is printable ASCII", param="--key")
    return given


def _local_key() -> str | None:
    from headrace.cli.models import data_folder

    try:
        return (data_folder() / "key").read_text(errors="replace").strip() or None
    except OSError:
        return None


def _extra(text: str) -> dict[str, object]:
    import msgspec

    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"--extra: {error}", param="--extra") from None


def _measured(settings: Settings) -> Measured:
    import uvloop

    from headrace.cli.load.measure import measure
    from headrace.cli.load.progress import LiveProgress

    with LiveProgress() as progress:
        return uvloop.run(measure(settings, progress.show))


def _show(measured: Measured, settings: Settings, target: Path | None, *, as_json: bool) -> None:
    from msgspec import structs

    report = structs.replace(measured.report, picture=as_text(target))
    if target is not None:
        from headrace.cli.load.picture import draw_load

        draw_load(report, measured.records, [load.name for load in settings.plan.tenants], target)
    if as_json:
        print_json(report)
    else:
        from headrace.cli.load.report import print_report

        print_report(report)
        if target is not None:
            print(f"picture: {as_text(target)}")
    if not report.is_sound:
        raise typer.Exit(1)
