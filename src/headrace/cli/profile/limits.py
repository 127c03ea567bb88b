"""What follows from a sweep: the latency knee and the memory limit, and both in words. Pure arithmetic."""

from collections.abc import Sequence

from headrace.core.profile import DecodePoint, Knee, MemoryUse, ModelProfile

KNEE_MEANS = (
    "knee: the rows at which tokens/s divided by inter-token time is greatest; with more rows the wait for a token grows"
    " by a larger factor than tokens/s do"
)


def find_knees(points: Sequence[DecodePoint]) -> tuple[Knee, ...]:
    """One for each prompt length. From b rows to more, tokens/s grow by a smaller factor than the inter-token time
    exactly if their quotient falls; of equals the fewest rows count."""
    knees = []
    for prompt_tokens in sorted({point.prompt_tokens for point in points}):
        curve = sorted(
            (point for point in points if point.prompt_tokens == prompt_tokens), key=lambda point: point.rows
        )
        best = max(curve, key=lambda point: point.tokens_per_s / max(point.itl_p50_s, 1e-12))
        knees.append(Knee(prompt_tokens, best.rows, best.tokens_per_s, best.itl_p50_s, best is curve[-1]))
    return tuple(knees)


def knee_words(knee: Knee) -> str:
    at = f"{knee.rows:,} {_rows(knee.rows)}, {knee.tokens_per_s:,.1f} tokens/s at {knee.itl_s * 1e3:,.1f} ms a token"
    behind = f"behind {knee.prompt_tokens:,} prompt tokens"
    if knee.is_last:
        return f"{behind} no knee up to {at}: it lies further out, if anywhere"
    return f"{behind} the knee is at {at}"


def memory_lengths(profile: ModelProfile) -> list[int]:
    """Lengths at which to say how many sequences fit: doubling down from the context."""
    lengths: list[int] = []
    length = min(profile.context_len, profile.memory.kv_tokens)
    while length >= profile.memory.block_tokens and len(lengths) < 8:
        lengths.append(length)
        length //= 2
    return lengths[::-1] or [profile.memory.kv_tokens]


def binding(profile: ModelProfile, tokens: int) -> str:
    """What ends the number of sequences of a length: slots or KV memory."""
    return "KV" if profile.memory.sequences(tokens) < profile.slots else "slots"


def memory_words(profile: ModelProfile) -> str:
    memory = profile.memory
    longest = memory.blocks // profile.slots * memory.block_tokens
    per_token = memory.block_bytes // memory.block_tokens
    taken = f"KV: {memory.kv_tokens:,} tokens in {memory.blocks:,} blocks, {per_token:,} bytes a token"
    if longest >= profile.context_len:
        more = _room(memory, profile)
        return f"{taken}: every slot may come to the whole context of {profile.context_len:,} tokens{more}"
    if longest == 0:
        return f"{taken}: fewer blocks than the {profile.slots:,} slots"
    return f"{taken}: binds before the {profile.slots:,} slots do when sequences come to more than {longest:,} tokens"


def _room(memory: MemoryUse, profile: ModelProfile) -> str:
    fitting = memory.room_blocks // -(-profile.context_len // memory.block_tokens)
    return f"; memory would hold {fitting:,} such sequences" if fitting > profile.slots else ""


def _rows(count: int) -> str:
    return "row" if count == 1 else "rows"
