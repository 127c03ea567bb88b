"""One line per request, and one traceback per failure of ours. Owns what is written and how it is made harmless.

No prompt, no key, no query string. Of requests without a key only so many a second, so that strangers cannot fill
a disk.
"""

import logging
from typing import TYPE_CHECKING

from headrace.telemetry.log import STRANGERS_PER_S, Allowance
from headrace.telemetry.metrics import Sample

if TYPE_CHECKING:
    from headrace.gateway.exchange import Exchange

_LOG = logging.getLogger("headrace.gateway")
_MAX_CHARS = 200
_STRANGERS = Allowance(STRANGERS_PER_S)


def escape(text: str) -> str:
    """Printable ASCII only, so that nothing can forge a line or colour a terminal; cut to a length."""
    if len(text) <= _MAX_CHARS and text.isascii() and text.isprintable() and "\\" not in text:
        return text
    cut = text[:_MAX_CHARS].encode("unicode_escape").decode("ascii")
    return cut if len(text) <= _MAX_CHARS else cut + "..."


def log_request(exchange: "Exchange", sample: Sample, *, worker: str = "", error_code: str = "") -> None:
    if not _LOG.isEnabledFor(logging.INFO):
        return
    caller = exchange.caller
    if caller is None:
        num_left_out = _STRANGERS.take(exchange.context.clock.now_s())
        if num_left_out is None:
            return
        if num_left_out:
            _LOG.info("%d more requests without a key are not shown", num_left_out)
    _LOG.info(
        "%s %s %d %.1f ms id=%s tenant=%s key=%s tokens=%d+%d%s%s",
        escape(exchange.method),
        escape(exchange.raw_path.decode("latin-1")),
        sample.status,
        sample.wall_s * 1e3,
        exchange.request_id,
        escape(sample.tenant) or "-",
        caller.key_id if caller is not None else "-",
        sample.prompt_tokens,
        sample.completion_tokens,
        f" worker={worker}" if worker else "",
        f" error={error_code}" if error_code else "",
    )


def log_failure(exchange: "Exchange", error: BaseException) -> None:
    _LOG.error("request %s failed", exchange.request_id, exc_info=error)
