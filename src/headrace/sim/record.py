"""What happened, kept compactly: the trace hash, a row of columns per request, gaps between tokens.

Owns the meaning of every column. Nothing here is an object per token, and per request only what is
asked for in detail: a run of a million requests is a few hundred megabytes of arrays.
"""

import struct
from enum import IntEnum
from hashlib import sha256

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple
from numpy.typing import NDArray

from headrace.core.event import Counters, Waits

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class Mark(IntEnum):
    """Kinds of decision that enter the trace hash. The numbers are part of the hash: never reuse one."""

    SUBMIT = 1
    REFUSE = 2
    FIRST = 3
    END = 4
    DEATH = 5
    REPLAY = 6
    RESTART = 7
    CANCEL = 8
    PAUSE = 9
    RESUME = 10
    INVALID = 11
    CHANGE = 12


class TraceHash:
    """SHA-256 over (kind, instant, worker, request, detail) of every decision, in order."""

    _RECORD = struct.Struct("<Bqiqq")
    _FLUSH_BYTES = 1 << 16

    def __init__(self) -> None:
        self._digest = sha256()
        self._pending = bytearray()

    def mark(self, kind: Mark, time_ns: int, worker: int, ordinal: int, detail: int = 0) -> None:
        self._pending += self._RECORD.pack(kind, time_ns, worker, ordinal, detail)
        if len(self._pending) > self._FLUSH_BYTES:
            self._digest.update(self._pending)
            self._pending.clear()

    def hexdigest(self) -> str:
        self._digest.update(self._pending)
        self._pending.clear()
        return self._digest.hexdigest()


class Fate(IntEnum):
    """What became of a request, as its client sees it."""

    FINISHED = 0
    CANCELLED = 1
    FAILED = 2
    REFUSED = 3
    INVALID = 4


class RequestEnd(Struct, frozen=True):
    """One request's row. Instants are nanoseconds; -1 means never."""

    ordinal: int
    tenant: int
    worker: int
    fate: Fate
    reason: str
    arrival_ns: int
    first_ns: int
    end_ns: int
    prompt_tokens: int
    counters: Counters
    waits: Waits
    preemptions: int = 0
    replays: int = 0
    tries: int = 1
    # First token and mean gap kept the targets, and the request was finished.
    good: bool = False


_INTEGERS = ("ordinal", "arrival_ns", "first_ns", "end_ns")
_SMALL = ("tenant", "worker", "fate", "reason", "prompt_tokens", "preemptions", "replays", "tries", "good")
_COUNTERS = Counters.__struct_fields__
_WAITS = Waits.__struct_fields__
_ROW = np.dtype(
    [(name, "<i8") for name in _INTEGERS]
    + [(name, "<i4") for name in (*_SMALL, *_COUNTERS)]
    + [(name, "<f8") for name in _WAITS]
)
_PACK = struct.Struct(f"<{len(_INTEGERS)}q{len(_SMALL) + len(_COUNTERS)}i{len(_WAITS)}d").pack


class Records:
    """Columns of ended requests, in the order of their ends."""

    def __init__(self) -> None:
        self._rows = bytearray()
        self.reasons: list[str] = []
        self._reason_codes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._rows) // _ROW.itemsize

    def add(self, end: RequestEnd) -> int:
        """Returns the code of the end's reason."""
        code = self._code(end.reason)
        self._rows += _PACK(
            end.ordinal,
            end.arrival_ns,
            end.first_ns,
            end.end_ns,
            end.tenant,
            end.worker,
            end.fate,
            code,
            end.prompt_tokens,
            end.preemptions,
            end.replays,
            end.tries,
            end.good,
            *astuple(end.counters),
            *astuple(end.waits),
        )
        return code

    def column(self, name: str) -> IntArray:
        return np.frombuffer(self._rows, _ROW)[name].astype(np.int64)

    def seconds(self, name: str) -> FloatArray:
        """One of the parts of `Waits`."""
        return np.frombuffer(self._rows, _ROW)[name].astype(np.float64)

    def _code(self, reason: str) -> int:
        code = self._reason_codes.get(reason)
        if code is None:
            code = self._reason_codes[reason] = len(self.reasons)
            self.reasons.append(reason)
        return code


class Gaps:
    """Times between tokens as a histogram: exact counts in buckets half a per cent wide."""

    _WIDTH = 0.005
    _LEAST_NS = 1e3
    _BUCKETS = 5_600
    _CHUNK = 1 << 15

    def __init__(self) -> None:
        self._counts = np.zeros(self._BUCKETS, np.int64)
        self._pending = np.zeros(self._CHUNK, np.int64)
        self._fill = 0
        self._sum_ns = 0

    def add(self, gaps_ns: IntArray) -> None:
        end = self._fill + len(gaps_ns)
        if end > self._CHUNK:
            self._flush()
            end = len(gaps_ns)
            if end > self._CHUNK:
                self._count(gaps_ns)
                return
        self._pending[self._fill : end] = gaps_ns
        self._fill = end

    @property
    def total(self) -> int:
        self._flush()
        return int(self._counts.sum())

    def quantile_s(self, share: float) -> float | None:
        """The gap that a `share` of all gaps does not exceed, to the middle of its bucket; None without gaps."""
        total = self.total
        if total == 0:
            return None
        cumulative = np.cumsum(self._counts)
        bucket = int(np.searchsorted(cumulative, max(1.0, share * total)))
        return self._LEAST_NS * float(np.exp((bucket + 0.5) * self._WIDTH)) / 1e9

    def mean_s(self) -> float | None:
        total = self.total
        return self._sum_ns / total / 1e9 if total else None

    def _flush(self) -> None:
        self._count(self._pending[: self._fill])
        self._fill = 0

    def _count(self, gaps_ns: IntArray) -> None:
        if len(gaps_ns):
            scaled = np.log(np.maximum(gaps_ns, self._LEAST_NS) / self._LEAST_NS) / self._WIDTH
            buckets = np.minimum(scaled, self._BUCKETS - 1).astype(np.int64)
            self._sum_ns += int(gaps_ns.sum())
            self._counts += np.bincount(buckets, minlength=self._BUCKETS)
