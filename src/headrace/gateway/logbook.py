"""One line per request, and one traceback per failure of ours. Owns what is written and how it is made harmless.

No prompt, no key, no query string.
"""

import logging
from typing import TYPE_CHECKING

from headrace.telemetry.metrics import Sample

if TYPE_CHECKING:
    from headrace.gateway.exchange import Exchange

_LOG = logging.getLogger("headrace.gateway")
_MAX_CHARS = 200


def escape(text: str) -> str:
    """Printable ASCII only, so that nothing can forge a line or colour a terminal; cut to a length."""
    cut = text[:_MAX_CHARS].encode("unicode_escape").decode("ascii")
    return cut if len(text) <= _MAX_CHARS else cut + "..."


def log_request(exchange: "Exchange", sample: Sample) -> None:
    if not _LOG.isEnabledFor(logging.INFO):
        return
    caller = exchange.caller
    _LOG.info(
        "%s %s %d %.1f ms id=%s tenant=%s key=%s tokens=%d+%d",
        escape(exchange.method),
        escape(exchange.raw_path.decode("latin-1")),
        sample.status,
        sample.wall_s * 1e3,
        exchange.request_id,
        escape(sample.tenant) or "-",
        caller.key_id if caller is not None else "-",
        sample.prompt_tokens,
        sample.completion_tokens,
    )


def log_failure(exchange: "Exchange", error: BaseException) -> None:
    _LOG.error("request %s failed", exchange.request_id, exc_info=error)
