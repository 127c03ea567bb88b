"""`headrace bench serve`: what its flags mean together. The measuring modules are imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from headrace.cli.console import as_text, check_finite, note, picture_target, print_json
from headrace.cli.keys import find_key
from headrace.cli.load import options
from headrace.core.errors import InvalidInput

if TYPE_CHECKING:
    from headrace.cli.load.http import Endpoint
    from headrace.cli.load.measure import Measured, Settings
    from headrace.cli.load.plan import LoadPlan, TenantLoad

_NUMBERS = (
    "rate", "think", "duration", "warmup", "disconnect", "timeout", "timeout_s", "temperature", "patience_s", "wait_s",
)  # fmt: skip


def serve(
    url: options.Url = "http://127.0.0.1:8080",
    key: options.Key = None,
    model: options.Model = "",
    api: options.Api = "chat",
    rate: options.Rate = None,
    constant: options.Constant = False,
    together: options.Together = None,
    users: options.Users = None,
    think: options.Think = 0.0,
    trace: options.Trace = None,
    prompt: options.Prompt = "lognormal:100:0.6:10:1000",
    output: options.Output = "lognormal:50:1.0:5:500",
    requests: options.Requests = None,
    duration: options.Duration = None,
    warmup: options.Warmup = 1.0,
    stream: options.Stream = True,
    compare: options.Compare = False,
    pairs: options.Pairs = 3,
    tenant: options.Tenant = None,
    disconnect: options.Disconnect = 0.0,
    timeout: options.Timeout = 0.0,
    timeout_s: options.TimeoutS = 1.0,
    slo: options.Slo = None,
    check_truth: options.CheckTruth = False,
    vocab_size: options.VocabSize = None,
    eos: options.Eos = None,
    choices: options.Choices = 1,
    temperature: options.Temperature = 0.0,
    ignore_eos: options.IgnoreEos = True,
    extra: options.Extra = "{}",
    pid: options.Pid = None,
    connections: options.Connections = 20_000,
    patience_s: options.PatienceS = 600,
    wait_s: options.WaitS = 15.0,
    cacert: options.CaCert = None,
    seed: options.Seed = 0,
    picture: options.Picture = None,
    as_json: options.AsJson = False,
) -> None:
    """A load over HTTP and what its clients saw: TTFT, ITL, E2E, tokens/s, goodput, CPU of the server's processes.

    Open loop (--rate, --together, --trace): times are fixed in advance and latencies count from them, so that a
    server that stalls cannot hide it. Closed loop (--users): each user asks again when answered. Shares of clients go
    away in the middle (--disconnect) or give up (--timeout). Lengths are written 25, uniform:LOW:HIGH or
    lognormal:MEDIAN:SIGMA:LOW:HIGH. Exit code 1: a request without exactly one end, or a token that is not the truth.
    """
    # Nothing but the flags is local yet.
    _run(options.Flags(**locals()))


def _run(flags: options.Flags) -> None:
    check_finite(**{name: getattr(flags, name) for name in _NUMBERS})
    if flags.api not in ("chat", "completions"):
        raise InvalidInput(f"--api is chat or completions, not {flags.api[:40]!r}", param="--api")
    settings = _settings(flags)
    target = None if flags.picture is None else picture_target(flags.picture, flags.picture)
    _show(_measured(settings), settings, target, as_json=flags.as_json)


def _settings(flags: options.Flags) -> Settings:
    from headrace.cli.load.figures import parse_slo
    from headrace.cli.load.http import parse_url
    from headrace.cli.load.measure import Settings

    endpoint = parse_url(flags.url, None if flags.cacert is None else str(flags.cacert))
    return Settings(
        endpoint=endpoint,
        plan=load_plan(flags, endpoint),
        model=flags.model,
        api="completions" if flags.check_truth else flags.api,
        streamed=flags.stream,
        pairs=flags.pairs if flags.compare else 0,
        temperature=flags.temperature,
        ignore_eos=flags.ignore_eos,
        choices=flags.choices,
        truth=flags.check_truth,
        vocab_size=flags.vocab_size,
        eos_ids=tuple(flags.eos or ()),
        slo=None if flags.slo is None else parse_slo(flags.slo),
        patience_s=flags.patience_s,
        wait_s=flags.wait_s,
        connections=flags.connections,
        pids=tuple(flags.pid or ()),
        extra=_extra(flags.extra),
    )


def load_plan(flags: options.Flags, endpoint: Endpoint) -> LoadPlan:
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
        users=flags.users or (0 if ways else options.USERS),
        think_s=flags.think,
        requests=flags.requests,
        trace=None if flags.trace is None else str(flags.trace),
    )
    tenants = [parse_tenant(text, base, constant=flags.constant) for text in flags.tenant or ()] or [base]
    tenants = [structs.replace(load, key=find_key(load.key, endpoint.host)) for load in tenants]
    names = [load.name for load in tenants]
    if len(set(names)) < len(names):
        raise InvalidInput("--tenant: two tenants have the same name", param="--tenant")
    bounded = all(load.requests is not None or load.trace is not None or _is_crowd(load) for load in tenants)
    duration_s = flags.duration if flags.duration is not None or bounded else options.DURATION_S
    # A crowd comes once: there is nothing to warm up with.
    warmup_s = 0.0 if all(_is_crowd(load) for load in tenants) else flags.warmup
    churn = Churn(flags.disconnect, flags.timeout, flags.timeout_s)
    return LoadPlan(tuple(tenants), warmup_s, duration_s, churn, flags.seed)


def _is_crowd(load: TenantLoad) -> bool:
    from headrace.sim.arrivals import Together

    return isinstance(load.arrivals, Together)


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
        return uvloop.run(measure(settings, progress.show, note))


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
