"""Every token against what the fake runner must say. Owns the comparison; the truth itself is `runner.truth`."""

from collections.abc import Iterable

from msgspec import Struct

from headrace.cli.load.outcome import Outcome, State
from headrace.cli.load.wording import Wording
from headrace.runner.truth import truth


class Vocabulary(Struct, frozen=True):
    """What a server says of its ids."""

    size: int
    eos_ids: tuple[int, ...] = ()
    eos_probability: float = 0.0


class TruthReport(Struct, frozen=True):
    """`first` says in words where the first wrong reply went wrong; empty when none did."""

    requests: int
    tokens: int
    wrong: int
    first: str = ""


def check_truth(
    outcomes: Iterable[Outcome], wording: Wording, vocabulary: Vocabulary, *, choices: int = 1, ignore_eos: bool = True
) -> TruthReport:
    """A reply that its client left must be a beginning of the truth; one that finished must be all of it."""
    requests = tokens = wrong = 0
    first = ""
    for outcome in outcomes:
        if outcome.state in (State.REFUSED, None):
            continue
        requests += 1
        prompt = wording.prompt_ids(outcome.shot)
        faults = []
        for choice in range(choices):
            told = outcome.ids.get(choice, [])
            tokens += len(told)
            right = truth(
                prompt,
                outcome.shot.output_tokens,
                vocab_size=vocabulary.size,
                eos_ids=vocabulary.eos_ids,
                seed=outcome.shot.seed,
                choice=choice,
                eos_probability=vocabulary.eos_probability,
                stop_at_eos=not ignore_eos,
            )
            fault = _difference(told, right, whole=outcome.state is State.FINISHED)
            if fault:
                faults.append(f"request {outcome.shot.number} ({outcome.request_id}), choice {choice}: {fault}")
        wrong += bool(faults)
        first = first or "".join(faults[:1])
    return TruthReport(requests, tokens, wrong, first)


def _difference(told: list[int], right: list[int], *, whole: bool) -> str:
    for index, (one, other) in enumerate(zip(told, right, strict=False)):
        if one != other:
            return f"token {index} is {one}, must be {other}"
    if len(told) > len(right):
        return f"{len(told)} tokens came, {len(right)} must"
    if whole and len(told) < len(right):
        return f"{len(told)} tokens came of {len(right)}: token {len(told)} must be {right[len(told)]}"
    return ""
