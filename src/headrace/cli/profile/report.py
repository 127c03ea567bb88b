"""A profile as tables and sentences for a terminal. Owns their look; every number is the profile's."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from headrace.cli.profile.limits import KNEE_MEANS, binding, knee_words, memory_lengths, memory_words
from headrace.cli.profile.sweep import predict_s
from headrace.core.plan import Work
from headrace.core.profile import ModelProfile


def print_profile(profile: ModelProfile, console: Console) -> None:
    about = f"{profile.model}, {profile.dtype} on {profile.machine.device}"
    console.print(about, style="bold", highlight=False)
    for title, table in (
        ("decode: each row a sequence, greedy; time from one token to the next", _decode_table(profile)),
        ("prompts: one alone", _prompt_table(profile)),
        ("memory: sequences that have come to a length, at once", _memory_table(profile)),
    ):
        console.print(title, highlight=False)
        console.print(table)
    for line in sentences(profile):
        console.print(line, highlight=False)


def sentences(profile: ModelProfile) -> list[str]:
    """The verdicts, and what they mean."""
    cost = (
        f"a step takes {_short(profile.c0_s)} + {_short(profile.c_in_s)} a prompt token + {_short(profile.c_out_s)} a"
        f" decode row + {_short(profile.c_kv_s)} a KV token read + {_short(profile.c_att_s)} a chunk's token × its context"
    )
    error = f"{profile.fit_error_median:.0%} off in the median of the steps it was fitted to, {profile.fit_error_worst:.0%} at worst"
    return [
        *(knee_words(knee) for knee in profile.knees),
        KNEE_MEANS,
        memory_words(profile),
        f"{cost}: {error}",
        *profile.notes,
    ]


def _decode_table(profile: ModelProfile) -> Table:
    names = ("rows", "prompt", "tokens/s", "inter-token p50", "p95", "as fitted", "")
    table = _table(names)
    knees = {(knee.prompt_tokens, knee.rows) for knee in profile.knees if not knee.is_last}
    for point in profile.decode:
        fitted_s = predict_s(profile.cost, Work(0, point.rows, point.kv_tokens, 0))
        mark = "knee" if (point.prompt_tokens, point.rows) in knees else ""
        times = (_ms(point.itl_p50_s), _ms(point.itl_p95_s), _ms(fitted_s))
        table.add_row(f"{point.rows:,}", f"{point.prompt_tokens:,}", f"{point.tokens_per_s:,.1f}", *times, mark)
    return table


def _prompt_table(profile: ModelProfile) -> Table:
    table = _table(("tokens", "first token after", "prompt tokens/s", "then a token takes"))
    for point in profile.prompts:
        after = "–" if point.itl_s is None else _ms(point.itl_s)
        table.add_row(f"{point.tokens:,}", _ms(point.ttft_s), f"{point.tokens_per_s:,.1f}", after)
    return table


def _memory_table(profile: ModelProfile) -> Table:
    table = _table(("tokens", "KV holds", "slots", "limit"))
    for tokens in memory_lengths(profile):
        held = profile.memory.sequences(tokens)
        table.add_row(f"{tokens:,}", f"{held:,}", f"{profile.slots:,}", binding(profile, tokens))
    return table


def _table(names: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _short(seconds: float) -> str:
    """Three digits in the unit that shows them: coefficients span nine orders of magnitude."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-12:.3g} ps" if seconds else "0 s"
