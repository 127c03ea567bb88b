"""What a client may ask by headers, and by `priority`: times, a lower tier, more about each chunk.

Owns their names and bounds. Header names are in lower case.
"""

import re
from collections.abc import Mapping

from msgspec import Struct

from headrace.core.errors import InvalidInput
from headrace.core.request import Tier

MAX_MS = 1e9
_NUMBER = re.compile(r"[0-9]{1,10}(\.[0-9]{1,6})?")


class Targets(Struct, frozen=True):
    """In seconds, as an Ask has them."""

    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    deadline_s: float | None = None
    queue_timeout_s: float | None = None


TARGET_HEADERS = {
    "ttft_target_s": "x-headrace-ttft-target-ms",
    "itl_target_s": "x-headrace-itl-target-ms",
    "deadline_s": "x-headrace-deadline-ms",
    "queue_timeout_s": "x-headrace-queue-timeout-ms",
}
_TARGET_HEADERS = frozenset(TARGET_HEADERS.values())
_NO_TARGETS = Targets()


def read_targets(headers: Mapping[str, str]) -> Targets:
    """InvalidInput, naming the header, for what is no positive number of milliseconds."""
    if _TARGET_HEADERS.isdisjoint(headers):
        return _NO_TARGETS
    return Targets(
        **{name: _seconds(headers[header], header) for name, header in TARGET_HEADERS.items() if header in headers}
    )


def wants_metadata(headers: Mapping[str, str]) -> bool:
    return headers.get("x-headrace-metadata", "").strip().lower() in ("1", "true")


def lowered_tier(priority: int | str | None, tier: Tier) -> Tier:
    """The tier a request is served in: its tenant's, or a lower one that it names.

    An integer is vLLM's: 0 and less is the tenant's own, each one more is a tier lower.
    """
    if priority is None:
        return tier
    if isinstance(priority, str):
        if priority.upper() not in Tier.__members__:
            raise InvalidInput("priority must be an integer, batch, free, plus or enterprise", param="priority")
        return min(tier, Tier[priority.upper()])
    return Tier(max(Tier.BATCH, tier - max(0, priority)))


def _seconds(text: str, header: str) -> float:
    value = float(text) if _NUMBER.fullmatch(text.strip()) else 0.0
    if not 0.0 < value <= MAX_MS:
        raise InvalidInput(f"{header} must be a positive number of milliseconds", param=header)
    return value / 1000.0
