"""The grammar of a submission as this worker can follow it, or why it cannot. Builds nothing."""

from headrace.core.errors import InvalidInput
from headrace.core.messages import SubmitPart
from headrace.text.grammar import SUBJECTS, Grammar


def grammar_of(part: SubmitPart, *, can_follow: bool) -> Grammar | None:
    """None where the part has none. Raises InvalidInput; `can_follow`: the model has matchers."""
    text = part.grammar
    if text is None:
        if part.request.sampling.masked:
            raise InvalidInput("a masked request needs its grammar", param="grammar")
        return None
    kinds = [kind for kind in SUBJECTS if kind == text.kind]
    if not can_follow or not kinds:
        what = "this model cannot follow a grammar" if kinds else "no such kind of grammar"
        raise InvalidInput(what, param="response_format")
    return Grammar(kinds[0], text.source)
