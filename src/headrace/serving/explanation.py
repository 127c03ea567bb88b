"""Where the milliseconds of past requests went. Owns a bounded store of explanations; measures nothing."""

from collections import OrderedDict

from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from headrace.core.errors import NotFound
from headrace.streams.record import Usage


class Explanation(Struct, frozen=True, array_like=True):
    """One request that is over. The stages sum to `wall_s`. `ttft_s` and `itl_s` are None where no token came."""

    request_id: str
    tenant: str
    model: str
    replica: str
    stages: dict[str, float]
    wall_s: float
    usage: Usage
    finish: tuple[str, ...] = ()
    ttft_s: float | None = None
    # Mean time between the tokens of the choice that ended last.
    itl_s: float | None = None
    preemptions: int = 0
    recomputed_tokens: int = 0
    overrun_tokens: int = 0
    attempts: int = 1
    # Of its reply, computed again by workers that took over from lost ones.
    replayed_tokens: int = 0
    error: str | None = None


class Explanations:
    """The last ones; each is for its tenant alone.

    They are kept as bytes: a third of what they take as objects, and nothing that the garbage collector looks at.
    """

    def __init__(self, remembered: int = 10_000) -> None:
        self._remembered = remembered
        # By the hash of tenant and id: who is told one is checked against what it says itself.
        self._found: OrderedDict[int, bytes] = OrderedDict()
        self._encoder = Encoder()
        self._decoder = Decoder(Explanation)

    def file(self, explanation: Explanation) -> None:
        key = hash((explanation.tenant, explanation.request_id))
        self._found.pop(key, None)
        self._found[key] = self._encoder.encode(explanation)
        if len(self._found) > self._remembered:
            self._found.popitem(last=False)

    def find(self, tenant: str, request_id: str) -> Explanation:
        found = self._found.get(hash((tenant, request_id)))
        explanation = None if found is None else self._decoder.decode(found)
        if explanation is None or (explanation.tenant, explanation.request_id) != (tenant, request_id):
            raise NotFound("no request of that id has ended, or it was too long ago", param="request_id")
        return explanation
