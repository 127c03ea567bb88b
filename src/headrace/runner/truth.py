"""The right output of a stream, computed from its prompt alone: what the fake must say under any load.

Plain and slow on purpose. Shares the constants and `mix_int` with the fake and nothing else: no
blocks, no tables, no vectors.
"""

from collections.abc import Callable, Collection, Sequence

from headrace.runner.cells import FACTOR, LUCK, MASK_64, PEEK, ROOT, STRIDE, mix_int

# From the ids emitted so far to the ids allowed next; None where this token is not masked.
MaskRule = Callable[[Sequence[int]], Collection[int] | None]


def truth(
    prompt_ids: Sequence[int],
    num_tokens: int,
    *,
    vocab_size: int,
    eos_ids: Sequence[int] = (),
    seed: int = 0,
    choice: int = 0,
    scripted: int | None = None,
    eos_probability: float = 0.0,
    masks: MaskRule | None = None,
    stop_at_eos: bool = True,
) -> list[int]:
    """At most `num_tokens` tokens, up to and with the end-of-sequence id unless told to go on past it.

    `scripted` is the output length given to `FakeRunner.script`. Where `masks` allows no id at all
    the stream ends before that token.
    """
    cells: list[int] = []
    prev = ROOT
    for token in prompt_ids:
        prev = (prev * FACTOR + mix_int(token + 1)) & MASK_64
        cells.append(prev)
    key = mix_int(mix_int(seed + PEEK) + choice)
    output: list[int] = []
    while len(output) < num_tokens:
        position = len(cells) - 1
        peeked = cells[mix_int(position) % (position + 1)]
        mixed = mix_int(cells[position] + peeked * PEEK + position * STRIDE + key)
        token = mixed % vocab_size
        while token in eos_ids:
            token = (token + 1) % vocab_size
        if scripted is None:
            if mix_int(mixed ^ LUCK) < int(eos_probability * 2**64):
                token = eos_ids[0]
        elif len(output) == scripted - 1:
            token = eos_ids[0]
        allowed = masks(output) if masks is not None else None
        if allowed is not None:
            if not allowed:
                break
            token = min(allowed, key=lambda one: (one - token) % vocab_size)
        output.append(token)
        if stop_at_eos and token in eos_ids:
            break
        prev = (prev * FACTOR + mix_int(token + 1)) & MASK_64
        cells.append(prev)
    return output
