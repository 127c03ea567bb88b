"""Every kernel against its plain reference in float64, on the card: random shapes, odd lengths, single tokens, contexts
of 128k, poisoned outputs, NaN in whatever may not be read."""

import random
from collections.abc import Iterator
from itertools import pairwise

import torch
from clustered_checks import clustered_checks
from crossed_checks import crossed_checks
from eight_checks import eight_checks
from expert_checks import expert_checks
from kernel_rig import (
    BLOCK_SIZE,
    Pages,
    normal,
    offsets_of,
    poisoned,
    relative_error,
    tiles_of,
    worst_row_error,
)
from product_checks import product_checks

from headrace.runner.cuda.kernels import plain
from headrace.runner.cuda.kernels.activation import silu_mul
from headrace.runner.cuda.kernels.decode_attention import DecodeConfig, DecodeScratch, decode_attention, decode_config
from headrace.runner.cuda.kernels.fresh_attention import fresh_attention, fresh_rows
from headrace.runner.cuda.kernels.norms import add_rms_norm, rms_norm
from headrace.runner.cuda.kernels.prefill_attention import (
    PrefillConfig,
    PrefillScratch,
    prefill_attention,
    prefill_config,
    spread_over,
)
from headrace.runner.cuda.kernels.rotary_write import rotary_write
from headrace.runner.cuda.kernels.rules import apply_rules
from headrace.runner.cuda.kernels.sampling import Draws, draw_ruled, sample
from headrace.runner.cuda.kernels.scan import Scan
from headrace.runner.cuda.kernels.scores import score
from headrace.runner.cuda.kernels.streamed_attention import TileQueue, streamed_attention, streamed_rows
from headrace.runner.cuda.kernels.streamed_decode import StretchScratch, streamed_decode, streamed_decode_turned
from headrace.runner.cuda.kernels.streamed_product import can_stream
from headrace.runner.cuda.kernels.turned_attention import turned_attention
from headrace.runner.cuda.layout import MOST_ROUNDS
from headrace.runner.cuda.odd_space import PROMPT_BIT, RuledRows, Rules
from headrace.runner.torch import luck

# bf16 in, bf16 out.
TOLERANCE = 6e-3
Outcome = tuple[str, float, float]


def all_checks(seed: int) -> Iterator[Outcome]:
    """(what, error, tolerance); an error of NaN is a failure too."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    yield from attention_checks(chance)
    yield from row_checks()
    yield from product_checks()
    yield from clustered_checks()
    yield from crossed_checks()
    yield from turned_checks(chance)
    yield from sampling_checks()
    yield from expert_checks()
    yield from eight_checks()


def decode_check(lengths: list[int], heads: int, kv_heads: int, dim: int, config: DecodeConfig) -> float:
    pages = Pages.make(lengths, kv_heads, dim)
    slots = [*range(len(lengths)), -1]
    random.Random(1).shuffle(slots)
    q, out = normal(len(slots), heads, dim), poisoned(len(slots), heads, dim)
    scratch = DecodeScratch.make(len(slots), heads, kv_heads, dim, config, "cuda")
    named = torch.tensor(slots, dtype=torch.int32, device="cuda")
    args = (q, pages.keys[0], pages.values[0], pages.tables, named, pages.lengths, dim**-0.5)
    want, errors = plain.decode_attention(*args), []
    for _ in range(3):
        for each in (out, scratch.sums, scratch.stats):
            each.fill_(torch.nan)
        decode_attention(out, *args, scratch)
        if scratch.tickets.any() or out.isnan().any():
            return torch.nan
        errors.append(worst_row_error(out, want))
    return max(errors)


def prefill_check(
    counts: list[int],
    prior: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    config: PrefillConfig,
    *,
    cut: bool = False,
) -> float:
    """`cut`: as a step spreads tiles over the card. Twice, since tickets must be as they were."""
    pages = Pages.make([before + count for before, count in zip(prior, counts, strict=True)], kv_heads, dim)
    tokens = sum(counts)
    q, out = normal(tokens, heads, dim), poisoned(tokens, heads, dim)
    slots = torch.arange(len(counts), dtype=torch.int32, device="cuda")
    offsets, before = offsets_of(counts), torch.tensor(prior, dtype=torch.int32, device="cuda")
    args = (q, pages.keys[0], pages.values[0], pages.tables, slots, offsets, before)
    spread = spread_over(kv_heads) if cut else 0
    scratch = PrefillScratch.make(MOST_ROUNDS * spread, kv_heads, dim, config, "cuda") if cut else None
    tiles = tiles_of(counts, prior, config.tokens(heads, kv_heads), spread)
    worst, want = 0.0, plain.prefill_attention(*args, dim**-0.5)
    for _ in range(2):
        prefill_attention(out.fill_(torch.nan), *args, tiles, dim**-0.5, config, scratch)
        worst = max(worst, torch.nan if out.isnan().any() else relative_error(out, want))
    if scratch is not None and (scratch.tickets.any() or int(tiles[:, 3].max()) < 2):
        return torch.nan
    return worst


def attention_checks(chance: random.Random) -> Iterator[Outcome]:
    for heads, kv_heads, dim in ((32, 8, 128), (16, 8, 128), (9, 3, 64), (32, 4, 64), (8, 8, 128), (8, 2, 256)):
        name = f"{heads}/{kv_heads}x{dim}"
        lengths = [chance.randint(1, 900) for _ in range(6)] + [1, 16, 17, 5000]
        default = decode_config(len(lengths) + 1, kv_heads)
        yield f"decode {name}", decode_check(lengths, heads, kv_heads, dim, default), TOLERANCE
        counts = [1, 2, chance.randint(3, 300), chance.randint(3, 300), 129]
        prior = [chance.randint(0, 2000), 0, 16, 1023, 0]
        config = prefill_config(dim)
        yield f"prefill {name}", prefill_check(counts, prior, heads, kv_heads, dim, config), TOLERANCE
    long = decode_config(2, 8)
    yield "decode 128k", decode_check([131072 - 5], 32, 8, 128, long), TOLERANCE
    yield "prefill 128k", prefill_check([201], [131072 - 300], 8, 2, 128, prefill_config(128)), TOLERANCE
    for heads, kv_heads, dim in ((32, 8, 128), (16, 8, 128), (9, 3, 64), (8, 2, 256)):
        for counts, prior in (([64], [60_000]), ([1, 33], [8191, 2500]), ([129, 5], [20_000, 0])):
            error = prefill_check(counts, prior, heads, kv_heads, dim, prefill_config(dim), cut=True)
            yield f"prefill cut {heads}/{kv_heads}x{dim} {counts} after {prior}", error, TOLERANCE
    yield "prefill bits", prefill_bits(), 0.0
    for heads, kv_heads in ((32, 8), (16, 8), (8, 8), (28, 4)):
        for counts in ([1, 2, chance.randint(3, 300), 64, chance.randint(3, 300), 129], [2100], [1000, 65]):
            error = fresh_check(counts, heads, kv_heads, 128)
            yield f"fresh {heads}/{kv_heads}x128 {counts}", error, TOLERANCE
    if not can_stream(torch.device("cuda")):
        return
    for heads, kv_heads in ((32, 8), (16, 8), (8, 8), (64, 8), (32, 2), (64, 2), (64, 1)):
        few, many = [1, 2, chance.randint(3, 300), 64, chance.randint(3, 300), 129], [37] * 90 + [1, 700, 333]
        for counts in (few, many, [128], [2100], [1000, 65], [5000, 1, 3000]):
            name = f"streamed {heads}/{kv_heads}x128 {counts if len(counts) < 9 else len(counts)}"
            yield name, fresh_check(counts, heads, kv_heads, 128, streamed=True), TOLERANCE


def fresh_check(counts: list[int], heads: int, kv_heads: int, dim: int, *, streamed: bool = False) -> float:
    """Every second chunk is NaN, and so is padding behind the last: the others must not see it, and padding is not
    written."""
    tokens, spare = sum(counts), 9
    qkv, q = normal(tokens + spare, (heads + 2 * kv_heads) * dim), normal(tokens + spare, heads, dim)
    bounds = offsets_of(counts).tolist()
    for chunk in range(1, len(counts), 2):
        qkv[bounds[chunk] : bounds[chunk + 1]] = torch.nan
    qkv[tokens:] = torch.nan
    out = poisoned(tokens + spare, heads, dim)
    is_sound, again = True, []
    if streamed:
        tiles = tiles_of(counts, [0] * len(counts), streamed_rows(heads, kv_heads, dim))
        tiles = torch.cat((tiles, torch.full_like(tiles, -1)))
        # Of few programs each takes many tiles.
        for queue in (TileQueue.make(132, "cuda"), TileQueue.make(7, "cuda")):
            # One launch behind the other draws from the same queue.
            for _ in range(3):
                out = poisoned(tokens + spare, heads, dim)
                streamed_attention(out, q, qkv, offsets_of(counts), tiles, dim**-0.5, queue)
                again.append(out)
            is_sound &= not queue.tickets.any()
        is_sound &= all(torch.equal(each.nan_to_num(7.0), out.nan_to_num(7.0)) for each in again)
    else:
        tiles = tiles_of(counts, [0] * len(counts), fresh_rows(heads, kv_heads, dim, q.device))
        fresh_attention(out, q, qkv, offsets_of(counts), tiles, dim**-0.5)
    keys, values = qkv.view(tokens + spare, -1, dim)[:, heads:].chunk(2, 1)
    worst = 0.0 if is_sound and out[tokens:].isnan().all() else torch.nan
    for chunk in range(0, len(counts), 2):
        own = slice(bounds[chunk], bounds[chunk + 1])
        error = relative_error(out[own], plain.attend(q[own], keys[own], values[own], 0, dim**-0.5))
        worst = torch.nan if out[own].isnan().any() else max(worst, error)
    return worst


def prefill_bits() -> float:
    """The same tokens cut otherwise, and one at a time beside others, give the same bits."""
    heads, kv_heads, dim, length = 16, 8, 128, 700
    pages, config = Pages.make([length], kv_heads, dim), prefill_config(128)
    q = normal(length, heads, dim)

    def run(bounds: list[int]) -> torch.Tensor:
        counts = [stop - first for first, stop in pairwise(bounds)]
        out = poisoned(length, heads, dim)
        prefill_attention(
            out, q, pages.keys[0], pages.values[0], pages.tables,
            torch.zeros(len(counts), dtype=torch.int32, device="cuda"), offsets_of(counts),
            torch.tensor(bounds[:-1], dtype=torch.int32, device="cuda"),
            tiles_of(counts, bounds, config.tokens(heads, kv_heads)), dim**-0.5, config,
        )  # fmt: skip
        return out

    whole = run([0, length])
    cuts = ([0, 333, length], [0, 1, 17, 512, 699, length], list(range(length + 1)))
    return float(max((run(cut) != whole).sum() for cut in cuts))


def row_checks() -> Iterator[Outcome]:
    for rows, width in ((1, 576), (33, 1024), (300, 4096), (7, 8192)):
        x, residual, weight = normal(rows, width), normal(rows, width), normal(width)
        added, want = plain.add_rms_norm(x, residual, weight, 1e-5)
        out = poisoned(rows, width)
        add_rms_norm(x, residual, weight, 1e-5, out)
        error = relative_error(out, want) if torch.equal(residual, added) else torch.nan
        yield f"add+norm {rows}x{width}", error, TOLERANCE
        rms_norm(x, weight, 1e-5, out.fill_(torch.nan))
        yield f"norm {rows}x{width}", relative_error(out, plain.rms_norm(x, weight, 1e-5)), TOLERANCE
        gate_up, act = normal(rows, 2 * width), poisoned(rows, width)
        silu_mul(gate_up, act)
        yield f"silu*mul {rows}x{width}", relative_error(act, plain.silu_mul(gate_up)), TOLERANCE
    for heads, kv_heads, dim, normed in ((16, 8, 128, True), (32, 8, 128, False), (9, 3, 64, False)):
        error = rotary_check(77, heads, kv_heads, dim, normed=normed)
        yield f"rotary+write {heads}/{kv_heads}x{dim}", error, TOLERANCE


def rotary_check(tokens: int, heads: int, kv_heads: int, dim: int, *, normed: bool) -> float:
    qkv = normal(tokens, (heads + 2 * kv_heads) * dim)
    positions = torch.randint(0, 3000, (tokens,), device="cuda", dtype=torch.int32)
    cells = torch.randperm(40 * BLOCK_SIZE, device="cuda")[:tokens]
    cells[3] = -1
    angles = torch.rand(3000, dim // 2, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    q_norm, k_norm = (normal(dim), normal(dim)) if normed else (None, None)
    keys, values = poisoned(40, kv_heads, BLOCK_SIZE, dim), poisoned(40, kv_heads, BLOCK_SIZE, dim)
    q_out = poisoned(tokens, heads, dim)
    left = qkv.clone()
    rotary_write(left, positions, cells, cos, sin, q_norm, k_norm, 1e-6, q_out, keys, values, in_place=True)
    q, k, v = plain.rotary(qkv, positions, cos, sin, q_norm, k_norm, 1e-6, heads, kv_heads)
    errors = [relative_error(q_out, q), relative_error(left.view(tokens, -1, dim)[:, heads:], torch.cat((k, v), 1))]
    if not torch.equal(left[:, : heads * dim], qkv[:, : heads * dim]):
        return torch.nan
    for got, rows in ((keys, k), (values, v)):
        want = torch.full(got.shape, torch.nan, dtype=torch.float64, device="cuda")
        plain.put(want, cells, rows)
        if not torch.equal(got.isnan(), want.isnan()):
            return torch.nan
        errors.append(relative_error(got.nan_to_num(), want.nan_to_num()))
    return max(errors)


def turned_checks(chance: random.Random) -> Iterator[Outcome]:
    for heads, kv_heads, dim, normed in ((16, 8, 128, True), (32, 8, 128, False), (9, 3, 64, False)):
        lengths = [chance.randint(1, 900) for _ in range(6)] + [1, 2, 16, 17, 33, 5000]
        for rows in (1, len(lengths), 300):
            config = decode_config(rows, kv_heads, 8192)
            error = turned_check(lengths, heads, kv_heads, dim, config, normed=normed)
            yield f"turned {heads}/{kv_heads}x{dim} as of {rows} rows", error, TOLERANCE
    if can_stream(torch.device("cuda")):
        yield from streamed_decode_checks(chance)


def streamed_decode_checks(chance: random.Random) -> Iterator[Outcome]:
    """Groups of 1 to 16; rows that end where tiles and pages do and beside; many, few, and long ones that are cut; and as if
    the card were small, so that each program has many stretches. One scratch for all of them, as in an engine."""
    ends = [edge + by for edge in (16, 64, 128, 512, 1024) for by in (-1, 0, 1, 2)]
    loads = {
        "at ends": [1, 2, *ends],
        "many": [chance.randint(1, 1500) for _ in range(255)],
        "one": [3000],
        "one long among short": [20000, *(chance.randint(1, 90) for _ in range(40))],
        "128k": [131072, 7],
    }
    for heads, kv_heads, normed in (
        (16, 8, True), (32, 8, False), (8, 8, False), (24, 8, False), (14, 2, False), (16, 2, True), (16, 1, True),
    ):  # fmt: skip
        for multiprocessors in (132, 3):
            scratch = StretchScratch.make(heads, kv_heads, 128, TileQueue.make(multiprocessors, "cuda"))
            for name, lengths in loads.items():
                if name in ("many", "128k") and heads // kv_heads not in (2, 7, 16):
                    continue
                told = f"{heads}/{kv_heads} {name}, {multiprocessors}"
                for kind, apart in (("streamed decode", False), ("streamed decode, turned before,", True)):
                    error = turned_check(lengths, heads, kv_heads, 128, scratch, normed=normed, apart=apart)
                    yield f"{kind} {told}", error, TOLERANCE


def turned_check(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    way: DecodeConfig | StretchScratch,
    *,
    normed: bool,
    apart: bool = False,
) -> float:
    """`apart`: the launch before turns the rows and writes their cells, and may still run when this one starts."""
    pages = Pages.make(lengths, kv_heads, dim)
    keys, values = pages.keys[0], pages.values[0]
    order = [*range(len(lengths)), -1]
    random.Random(2).shuffle(order)
    slots = torch.tensor(order, dtype=torch.int32, device="cuda")
    positions = torch.where(slots >= 0, pages.lengths[slots.clamp(min=0)] - 1, 0)
    blocks = pages.tables[slots.clamp(min=0).long(), (positions // BLOCK_SIZE).long()].long()
    cells = torch.where(slots >= 0, blocks * BLOCK_SIZE + positions % BLOCK_SIZE, -1)
    live = cells[cells >= 0]
    for cells_of in (keys, values):
        cells_of[live // BLOCK_SIZE, :, live % BLOCK_SIZE] = torch.nan
    qkv = normal(len(slots), (heads + 2 * kv_heads) * dim)
    angles = torch.rand(max(lengths), dim // 2, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    q_norm, k_norm = (normal(dim), normal(dim)) if normed else (None, None)
    q, k, v = plain.rotary(qkv, positions, cos, sin, q_norm, k_norm, 1e-6, heads, kv_heads)
    full_keys, full_values = keys.clone(), values.clone()
    plain.put(full_keys, cells, k)
    plain.put(full_values, cells, v)
    want = plain.decode_attention(q, full_keys, full_values, pages.tables, slots, pages.lengths, dim**-0.5)
    out = poisoned(len(slots), heads, dim)
    given = (qkv, cos, sin, q_norm, k_norm, 1e-6, keys, values, pages.tables, slots, pages.lengths, dim**-0.5)
    if isinstance(way, StretchScratch):
        for each in (way.sums, way.stats):
            each.fill_(torch.nan)
        counters = (way.marks, way.queue.tickets)
        if apart:
            turned = poisoned(len(slots), heads, dim)
            rotary_write(qkv, positions, cells, cos, sin, q_norm, k_norm, 1e-6, turned, keys, values)
            streamed_decode_turned(out, turned, *given[6:], way)
        else:
            streamed_decode(out, *given, way)
    else:
        scratch = DecodeScratch.make(len(slots), heads, kv_heads, dim, way, "cuda")
        turned_attention(out, *given, scratch)
        counters = (scratch.tickets,)
    if not torch.equal(keys.isnan(), full_keys.isnan()) or any(each.any() for each in counters):
        return torch.nan
    if out[slots < 0].any():
        return torch.nan
    errors = [
        worst_row_error(out[slots >= 0], want[slots >= 0]),
        relative_error(keys.nan_to_num(), full_keys.nan_to_num()),
        relative_error(values.nan_to_num(), full_values.nan_to_num()),
    ]
    return float(torch.tensor(errors).max())


def draws_of(rows: int, temperature: float, top_k: int, top_p: float, min_p: float) -> Draws:
    full = {"device": "cuda"}
    return Draws(
        seeds=torch.tensor([luck.key(seed, 0) for seed in range(rows)], **full),
        positions=torch.full((rows,), 9, dtype=torch.int32, **full),
        temperature=torch.full((rows,), temperature, **full),
        top_k=torch.full((rows,), top_k, dtype=torch.int32, **full),
        top_p=torch.full((rows,), top_p, **full),
        min_p=torch.full((rows,), min_p, **full),
    )


def drawn(logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    rows = logits.shape[0]
    tokens = torch.full((rows,), -9, dtype=torch.int32, device="cuda")
    statuses = torch.full((rows,), 99, dtype=torch.uint8, device="cuda")
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    sample(logits, slots, draws, tokens, statuses, Scan.make(rows, logits.shape[1], "cuda"))
    return tokens, statuses


def sampling_checks() -> Iterator[Outcome]:
    for vocab, dtype in ((151936, torch.bfloat16), (49152, torch.float32), (1000, torch.float32)):
        logits = normal(40, vocab, dtype=dtype)
        logits[7, vocab // 2] = torch.nan
        tokens, statuses = drawn(logits, draws_of(40, 0.0, 0, 1.0, 0.0))
        want = logits.float().argmax(-1).int()
        # The first of equals, which torch does not promise.
        want = torch.where(logits.float() == logits.float().amax(-1, keepdim=True), 1, 0).argmax(-1).int()
        want[7] = -1
        bad = (tokens != want).sum() + (statuses[7] != 1) + statuses[:7].sum() + statuses[8:].sum()
        yield f"greedy {vocab}", float(bad), 0.0
    rows = 4096
    for vocab, spread in ((900, 1.0), (900, 4.0), (9000, 0.3)):
        values = (torch.randn(vocab, device="cuda") * spread).bfloat16()
        logits = values.expand(rows, -1).contiguous()
        for temperature, top_k, top_p, min_p in (
            (1.0, 0, 1.0, 0.0), (0.8, 20, 0.95, 0.0), (1.0, 0, 0.6, 0.0), (1.0, 300, 0.9, 0.0), (1.2, 0, 1.0, 0.05),
            (1.0, 500, 1.0, 0.1),
        ):  # fmt: skip
            chances = plain.kept(values, temperature, top_k, top_p, min_p)
            tokens, _ = drawn(logits, draws_of(rows, temperature, top_k, top_p, min_p))
            yield f"draws {vocab} {spread} T{temperature} k{top_k} p{top_p} m{min_p}", surprise(tokens, chances), 1.0
    yield "rules", float(wrong_rules()), 0.0
    yield "scores", float(wrong_scores()), 0.0


def surprise(tokens: torch.Tensor, chances: torch.Tensor) -> float:
    """Above 1 when counts lie further from their chances than six standard deviations of chi-squared, or outside."""
    rows = tokens.shape[0]
    counts = torch.bincount(tokens.long(), minlength=chances.shape[0]).double()
    # An id at the very edge of a nucleus may fall on either side of it by rounding.
    if counts[chances == 0].sum() > 2:
        return torch.inf
    order = torch.argsort(chances, descending=True)
    expected, found = chances[order] * rows, counts[order]
    # Bins of at least ten expected.
    group = (expected.cumsum(0) / 10).floor().long()
    size = int(group.max()) + 1
    want = torch.zeros(size, device="cuda", dtype=torch.float64).index_add_(0, group, expected)
    got = torch.zeros(size, device="cuda", dtype=torch.float64).index_add_(0, group, found)
    held = want > 1
    chi = float((((got - want) ** 2) / want)[held].sum())
    free = max(1, int(held.sum()) - 1)
    return (chi - free) / (6 * (2 * free) ** 0.5)


def wrong_rules() -> int:
    """How many things are wrong."""
    vocab, rows = 151936, 3
    logits = normal(rows, vocab)
    bias = torch.zeros(1, vocab, device="cuda")
    bias[0, 5], bias[0, 6] = 3.0, -torch.inf
    counts = torch.zeros(1, vocab, dtype=torch.int32, device="cuda")
    counts[0, 9], counts[0, 10] = 2, PROMPT_BIT
    words, limits = torch.randint(-(2**31), 2**31 - 1, (2, 1, vocab // 32), dtype=torch.int32, device="cuda")
    line = torch.tensor([0, -1, 0], dtype=torch.int32, device="cuda")
    no = torch.tensor([-1, 0, -1], dtype=torch.int32, device="cuda")
    factors = torch.tensor([[1.3] * rows, [0.5] * rows, [0.25] * rows], device="cuda")
    out = poisoned(rows, vocab, dtype=torch.float32)
    places = torch.arange(rows, dtype=torch.int32, device="cuda")
    ruled = RuledRows(places, places, Rules(bias, line, limits, no, words, no, counts, line, factors), out)
    draws, room = draws_of(rows, 0.0, 0, 1.0, 0.0), Scan.make(rows, vocab, "cuda")
    apply_rules(logits, ruled, draws.temperature, room)
    want = logits.float()
    want[[0, 2]] += bias
    repetition, frequency, presence = factors[:, 0]
    for token, times in ((9, 2), (10, 0)):
        column = want[[0, 2], token]
        column = torch.where(column > 0, column / repetition, column * repetition) - frequency * times
        want[[0, 2], token] = column - (presence if times else 0)
    allowed = (((words & limits)[0].repeat_interleave(32) >> (torch.arange(vocab, device="cuda") % 32)) & 1) != 0
    want[1] = torch.where(allowed, want[1], -torch.inf)
    # Each operation is rounded by itself: not a bit may differ.
    return int((out != want).sum()) + _wrong_tokens(ruled, draws, room)


def _wrong_tokens(ruled: RuledRows, draws: Draws, room: Scan) -> int:
    """The last row failed before; the second has no line to be counted in."""
    first, other = (int((row == row.max()).nonzero()[0]) for row in ruled.logits[:2])
    counts = ruled.rules.counts
    held = counts[0].clone()
    held[first] += 1
    tokens = torch.full((3,), -1, dtype=torch.int32, device="cuda")
    statuses = torch.tensor([0, 0, 1], dtype=torch.uint8, device="cuda")
    draw_ruled(ruled, draws, tokens, statuses, room, torch.zeros(3, dtype=torch.int32, device="cuda"))
    wrong = int(tokens.tolist() != [first, other, -1]) + int(statuses.tolist() != [0, 0, 1])
    return wrong + int((counts[0] != held).sum())


def wrong_scores() -> int:
    vocab, rows = 151936, 3
    logits = normal(rows, vocab)
    places = torch.arange(rows, dtype=torch.int32, device="cuda")
    logprobs = poisoned(rows, dtype=torch.float32)
    top_ids = torch.zeros(rows, 32, dtype=torch.int32, device="cuda")
    tops = poisoned(rows, 32, dtype=torch.float32)
    ids = torch.tensor([3, 151935, 70000], dtype=torch.int32, device="cuda")
    asked = torch.tensor([32, 0, 5], dtype=torch.int32, device="cuda")
    score(logits, places, ids, asked, logprobs, top_ids, tops, Scan.make(rows, vocab, "cuda"))
    truth = torch.log_softmax(logits.float(), -1)
    wrong = int((~torch.isclose(logprobs, truth[places.long(), ids.long()], atol=1e-4)).sum())
    best = torch.sort(truth, descending=True, stable=True)
    wrong += int((top_ids[0] != best.indices[0, :32]).sum() + (top_ids[2, :5] != best.indices[2, :5]).sum())
    wrong += int((top_ids[1] != -1).sum() + (top_ids[2, 5:] != -1).sum())
    return wrong + int((~torch.isclose(tops[0], best.values[0, :32], atol=1e-4)).sum())
