"""The flags of `headrace bench serve`, one name each: what they are called, their bounds and their help."""

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from headrace.cli.keys import KEY_HELP

DURATION_S = 10.0
USERS = 8

Url = Annotated[str, typer.Option(help="Where the server is.")]
Key = Annotated[str | None, typer.Option(help=KEY_HELP)]
Model = Annotated[str, typer.Option("--model", "-m", help="Default: the first one listed.")]
Api = Annotated[str, typer.Option(help="chat or completions.")]
Rate = Annotated[float | None, typer.Option(min=1e-3, max=1e5, help="Open loop: requests/s.")]
Constant = Annotated[bool, typer.Option("--constant", help="Evenly spaced, not Poisson.")]
Together = Annotated[int | None, typer.Option(min=1, max=1_000_000, help="So many requests, all at once.")]
Users = Annotated[int | None, typer.Option(min=1, max=20_000, help=f"Closed loop: so many users. [default: {USERS}]")]
Think = Annotated[float, typer.Option(min=0, max=3600, help="Seconds a user waits between requests.")]
Trace = Annotated[Path | None, typer.Option(help="Open loop: arrivals and lengths from a JSONL trace.")]
Prompt = Annotated[str, typer.Option(help="Prompt lengths in tokens.")]
Output = Annotated[str, typer.Option(help="Output lengths in tokens.")]
Requests = Annotated[int | None, typer.Option(min=1, max=5_000_000, help="Counted requests of each tenant.")]
Duration = Annotated[
    float | None, typer.Option(min=0.1, max=86_400, help=f"Seconds that are counted. [default: {DURATION_S:g}]")
]
Warmup = Annotated[float, typer.Option(min=0, max=3600, help="Seconds at the start that are not counted.")]
Stream = Annotated[bool, typer.Option(help="Replies as they are made, or whole.")]
Compare = Annotated[bool, typer.Option("--compare", help="Both, in alternating pairs.")]
Pairs = Annotated[int, typer.Option(min=1, max=100, help="Pairs of --compare.")]
Tenant = Annotated[
    list[str] | None,
    typer.Option(help="name=N,key=K and any of rate, users, together, think, requests, prompt, output; repeat."),
]
Disconnect = Annotated[float, typer.Option(min=0, max=1, help="Share of clients that go away.")]
Timeout = Annotated[float, typer.Option(min=0, max=1, help="Share of clients that give up.")]
TimeoutS = Annotated[float, typer.Option(min=1e-3, max=3600, help="When those of --timeout give up.")]
Slo = Annotated[str | None, typer.Option(help="Limits for goodput in seconds: ttft=0.5,itl=0.1,e2e=10.")]
CheckTruth = Annotated[
    bool, typer.Option("--check-truth", help="Server with --runner fake: every token must be right.")
]
VocabSize = Annotated[int | None, typer.Option(min=2, max=10_000_000, help="If the server does not say.")]
Eos = Annotated[list[int] | None, typer.Option(min=0, help="Ids that end a sequence, with --vocab-size.")]
Choices = Annotated[int, typer.Option("--n", min=1, max=128, help="Choices of each request.")]
Temperature = Annotated[float, typer.Option(min=0, max=100)]
IgnoreEos = Annotated[bool, typer.Option(help="Every reply has its full length.")]
Extra = Annotated[str, typer.Option(help="A JSON object added to every request.")]
Pid = Annotated[list[int] | None, typer.Option(min=1, help="Processes to watch. Default: who listens there.")]
Connections = Annotated[int, typer.Option(min=1, max=60_000, help="Most connections at once.")]
PatienceS = Annotated[float, typer.Option(min=0.1, max=86_400, help="A request without end by then hangs.")]
WaitS = Annotated[float, typer.Option(min=0, max=3600, help="How long to wait for a server that starts.")]
CaCert = Annotated[Path | None, typer.Option("--cacert", "--ca", help="Trust this certificate (PEM), for https.")]
Seed = Annotated[int, typer.Option(min=0)]
Picture = Annotated[Path | None, typer.Option(help="Draw the latencies there.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")]


class Flags(NamedTuple):
    """All of them as they were given, in the order of the command's help."""

    url: str
    key: str | None
    model: str
    api: str
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
    stream: bool
    compare: bool
    pairs: int
    tenant: list[str] | None
    disconnect: float
    timeout: float
    timeout_s: float
    slo: str | None
    check_truth: bool
    vocab_size: int | None
    eos: list[int] | None
    choices: int
    temperature: float
    ignore_eos: bool
    extra: str
    pid: list[int] | None
    connections: int
    patience_s: float
    wait_s: float
    cacert: Path | None
    seed: int
    picture: Path | None
    as_json: bool
