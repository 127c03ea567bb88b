"""`headrace plan`: reads flags and files, asks the planner, prints a table and the arithmetic.

Owns the options and how a plan looks; the planning itself is in `sim.planner`.
"""

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from headrace.cli.console import note
from headrace.cli.model_store import model_store
from headrace.cli.profile.command import profile_store
from headrace.core.errors import InvalidInput
from headrace.core.profile import ModelProfile, convert_profile, is_profile
from headrace.sim.exact import Quantity, parse_exact, parse_whole, show, show_money, show_ms, show_percent
from headrace.sim.lengths import parse_lengths
from headrace.sim.mix import RequestMix, load_mix, single_mix
from headrace.sim.planner import Cost, Load, PlanReport, ReplicaPlan, Throughput, plan_profile, plan_throughput
from headrace.sim.profile import Targets, load_profile
from headrace.sim.scenario import read_document

# Of what replicas can do: the closer to all of it, the longer every queue, and the less a mean says.
_SATURATED = 0.95

_Text = str | None
TokensPerS = Annotated[_Text, typer.Option(help="Measured tokens/s of one GPU.")]
CountOption = Annotated[_Text, typer.Option("--count", help="What those tokens are: both (default) or output.")]
Prompt = Annotated[_Text, typer.Option(help="Prompt lengths: 25, uniform:100:1024, lognormal:60:1.0:5:500, mix:...")]
Output = Annotated[_Text, typer.Option(help="Output lengths, written like --prompt.")]
Mix = Annotated[Path | None, typer.Option(help="Kinds of requests with their lengths (JSON or TOML).")]
Rate = Annotated[_Text, typer.Option(help="Requests/s to plan for.")]
Headroom = Annotated[_Text, typer.Option(help="Share to keep spare: 0.2 or 20%.")]
Batching = Annotated[_Text, typer.Option(help="Multiplies the measured throughput.")]
Gpus = Annotated[_Text, typer.Option(help="Plan with this many GPUs instead of finding the number.")]
Price = Annotated[_Text, typer.Option(help="Dollars per GPU hour.")]
Profile = Annotated[
    _Text, typer.Option(help="A stored profile's name (headrace models profile), or a JSON or TOML file.")
]
SloTtft = Annotated[_Text, typer.Option(help="Target for the first token, in seconds.")]
SloItl = Annotated[_Text, typer.Option(help="Target between tokens, in seconds.")]
Slots = Annotated[_Text, typer.Option(help="Slots of a replica; goes before the profile's.")]
KvTokens = Annotated[_Text, typer.Option(help="Tokens of KV a replica holds; goes before the profile's.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]


def plan(
    tokens_per_s: TokensPerS = None,
    count: CountOption = None,
    prompt: Prompt = None,
    output: Output = None,
    mix: Mix = None,
    rate: Rate = None,
    headroom: Headroom = None,
    batching: Batching = None,
    gpus: Gpus = None,
    price: Price = None,
    profile: Profile = None,
    slo_ttft: SloTtft = None,
    slo_itl: SloItl = None,
    slots: Slots = None,
    kv_tokens: KvTokens = None,
    as_json: Json = False,
) -> None:
    """Turn a throughput or a profile, a mix and a rate into replicas, utilisation and cost."""
    load = Load(
        mix=_read_mix(prompt, output, mix),
        rate_per_s=parse_exact(_required("--rate", rate), "--rate"),
        headroom=parse_exact("0" if headroom is None else headroom, "--headroom"),
        price_per_hour=None if price is None else parse_exact(price, "--price"),
        gpus=None if gpus is None else parse_whole(gpus, "--gpus"),
    )
    if (profile is None) == (tokens_per_s is None):
        raise InvalidInput("give either --tokens-per-s or --profile", param="--tokens-per-s")
    if profile is None:
        unused = {"--slots": slots, "--kv-tokens": kv_tokens, "--slo-ttft": slo_ttft, "--slo-itl": slo_itl}
        _refuse(unused, "needs --profile")
        throughput = _read_throughput(_required("--tokens-per-s", tokens_per_s), count, batching)
        report = plan_throughput(load, throughput)
    else:
        _refuse({"--count": count, "--batching": batching}, "needs --tokens-per-s: a profile says it itself")
        sizes = [None if text is None else parse_whole(text, name) for name, text in _named(slots, kv_tokens)]
        replica = load_profile(_read_profile(profile), "--profile", slots=sizes[0], kv_tokens=sizes[1])
        report = plan_profile(load, replica, Targets(_seconds(slo_ttft, "--slo-ttft"), _seconds(slo_itl, "--slo-itl")))
    _print(report, as_json)


def _read_profile(asked: str) -> object:
    """What a stored profile or a file says of a replica, as the planner's own files are written."""
    store = profile_store()
    is_path = "/" in asked or Path(asked).suffix.lower() in (".json", ".toml")
    if not is_path and store.has(asked):
        measured = store.load(asked, "--profile")
    else:
        if not is_path and asked and not os.path.lexists(asked):
            message = f"no profile is stored as {asked[:200]!r}, and there is no such file; to make one: headrace models profile NAME"
            raise InvalidInput(message, param="--profile")
        raw = read_document(Path(asked), "--profile", "--profile")
        if not is_profile(raw):
            return raw
        measured = convert_profile(raw, f"--profile: {asked[:200]}", "--profile")
    _check_files(measured)
    note(f"profile {measured.name}: {measured.dtype} on {measured.machine.device}, measured {measured.measured_at}")
    return {
        **msgspec.to_builtins(measured.cost),
        "slots": measured.slots,
        "kv_tokens": measured.memory.kv_tokens,
        "max_step_tokens": measured.max_step_tokens,
        "max_step_s": measured.max_step_s,
        "block_tokens": measured.memory.block_tokens,
    }


def _check_files(measured: ModelProfile) -> None:
    """A model that was pulled anew since it was measured is another one."""
    pulled = [manifest for manifest in model_store().models() if manifest.name == measured.model]
    for path, file in ((path, file) for manifest in pulled for path, file in manifest.files.items()):
        if measured.files.get(Path(path).name, file.sha256) != file.sha256:
            message = (
                f"the profile {measured.name} is outdated: it was measured with another {path} of {measured.model} than"
                f" the one here (headrace models profile {measured.model})"
            )
            raise InvalidInput(message, param="--profile")


def _read_mix(prompt: str | None, output: str | None, mix: Path | None) -> RequestMix:
    if mix is None:
        lengths = _required("--prompt", prompt), _required("--output", output)
        return single_mix(parse_lengths(lengths[0], "--prompt"), parse_lengths(lengths[1], "--output"))
    _refuse({"--prompt": prompt, "--output": output}, "and --mix exclude each other")
    return load_mix(read_document(mix, "--mix", "--mix"), "--mix")


def _read_throughput(tokens_per_s: str, count: str | None, batching: str | None) -> Throughput:
    measured = parse_exact(tokens_per_s, "--tokens-per-s")
    times = parse_exact("1" if batching is None else batching, "--batching")
    if count == "output":
        return Throughput(measured, "output", times)
    if count not in (None, "both"):
        raise InvalidInput(f"--count must be both or output, not {count!r}", param="--count")
    return Throughput(measured, "both", times)


def _required(option: str, text: str | None) -> str:
    if text is None:
        raise InvalidInput(f"{option} is missing", param=option)
    return text


def _refuse(options: dict[str, str | None], why: str) -> None:
    for option, text in options.items():
        if text is not None:
            raise InvalidInput(f"{option} {why}", param=option)


def _named(slots: str | None, kv_tokens: str | None) -> tuple[tuple[str, str | None], ...]:
    return ("--slots", slots), ("--kv-tokens", kv_tokens)


def _seconds(text: str | None, option: str) -> float | None:
    return None if text is None else float(parse_exact(text, option))


def _print(report: PlanReport, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(report).decode())
        return
    table = Table(show_header=False, title="Capacity plan", title_justify="left")
    for name, value in _rows(report):
        table.add_row(name, value)
    Console().print(table)
    for line in report.lines:
        print(f"  {line}")
    if report.utilisation.value > _SATURATED:
        share = show_percent(report.utilisation.value)
        print(f"This plan does not hold: at {share} of what there is, queues grow with every burst. Give --headroom.")


def _rows(report: PlanReport) -> list[tuple[str, str]]:
    unit = "GPU" if report.replica is None else "replica"
    lengths = f"{_number(report.input_tokens_per_request)} in, {_number(report.output_tokens_per_request)} out"
    over = " (over 100 %)" if report.utilisation.value > 1 else ""
    rows = [
        ("requests/s", _number(report.rate_per_s)),
        ("tokens a request", lengths),
        (f"requests/s per {unit}", _number(report.sustained_rate_per_s_per_replica)),
        (f"{unit}s needed", f"{report.replicas_needed:,}"),
    ]
    if report.headroom.value:
        name = f"{unit}s with {show_percent(report.headroom.value)} headroom"
        rows.append((name, f"{report.replicas_with_headroom:,}"))
    rows.append((f"{unit}s {'given' if report.gpus_given else 'planned'}", f"{report.replicas:,}"))
    if report.gpus != report.replicas:
        rows.append(("GPUs", f"{report.gpus:,}"))
    rows.append(("utilisation", show_percent(report.utilisation.value) + over))
    rows.append(("output tokens/s", _number(report.output_tokens_per_s)))
    return [*rows, *_replica_rows(report.replica), *_cost_rows(report.cost)]


def _cost_rows(cost: Cost | None) -> list[tuple[str, str]]:
    if cost is None:
        return []
    return [
        ("cost", f"{show_money(cost.per_hour.value)} an hour, {show_money(cost.per_day.value)} a day"),
        ("cost per million tokens", show_money(cost.per_million_tokens.value)),
        ("  input", show_money(cost.per_million_input_tokens.value)),
        ("  output", show_money(cost.per_million_output_tokens.value)),
    ]


def _replica_rows(replica: ReplicaPlan | None) -> list[tuple[str, str]]:
    if replica is None:
        return []
    full = replica.saturated.at
    rows = [
        (
            "at saturation",
            f"{show(full.decode_rows)} rows, step {_time(full.step_s)}; limit: {replica.saturated.limit}",
        )
    ]
    if replica.planned is not None:
        at = replica.planned
        rows += [
            (
                "as planned",
                f"{show(at.decode_rows)} rows, step {_time(at.step_s)}, busy {show_percent(at.busy_share)}",
            ),
            ("inter-token time", _time(at.itl_s)),
            ("TTFT", f"{_time(at.ttft_s)} mean, {_time(at.long_ttft_s)} for long prompts"),
        ]
    if replica.split is not None:
        rows.append(("split prefill/decode", "pays" if replica.split.pays else "does not pay"))
    return rows


def _time(seconds: float) -> str:
    """In the unit a person would say it in."""
    if seconds < 1.0:
        return show_ms(seconds)
    return f"{show(seconds)} s" if seconds < 120.0 else f"{show(seconds / 60)} min"


def _number(quantity: Quantity) -> str:
    return show(quantity.value)
