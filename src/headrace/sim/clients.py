"""The clients of the virtual world. Owns what one of them wants and has received so far.

A client outlives the sequence that serves it: after a worker's death another one goes on.
It decides nothing about time; the world calls it.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.core.config import EngineConfig
from headrace.core.hashing import chain_blocks, chain_root
from headrace.core.request import Admission, Request, SamplingParams, Tier
from headrace.sim.traces import TraceRow
from headrace.sim.workload import Prompts

_NO_TOKENS = np.zeros(0, np.int32)
_NO_TIMES = np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class Client:
    """`number` names its present sequence in the worker of index `worker`; -1: in none."""

    ordinal: int
    tenant: int
    row: TraceRow
    request: Request
    arrival_ns: int
    worker: int = -1
    number: int = -1
    first_ns: int = -1
    tries: int = 0
    replays: int = 0
    # What earlier sequences delivered before their workers died.
    delivered: NDArray[np.int32] = field(default_factory=lambda: _NO_TOKENS)
    delivered_ns: NDArray[np.int64] = field(default_factory=lambda: _NO_TIMES)
    # Unread tokens when last looked at, and when that was; only for slow readers.
    unread: float = 0.0
    read_ns: int = 0
    paused: bool = False
    num_pauses: int = 0
    # Its present sequence has been in a slot.
    started: bool = False
    # Instant of the last token from an earlier worker.
    last_ns: int = 0
    # Why the client, not the engine, ended it.
    cause: str = ""
    ended: bool = False

    def read_until(self, now_ns: int) -> float:
        """Unread tokens at `now_ns`, the client having read at its own pace since."""
        pace = self.row.reader_tokens_per_s or 0.0
        self.unread = max(0.0, self.unread - pace * (now_ns - self.read_ns) * 1e-9)
        self.read_ns = now_ns
        return self.unread


@dataclass(slots=True, eq=False)
class Stream:
    """What one client received; kept only in detail."""

    request: Request
    tokens: NDArray[np.int32]
    times_ns: NDArray[np.int64]
    finished: bool
    scripted: int | None


class Requests:
    """Turns rows of the load into requests."""

    def __init__(self, seed: int, config: EngineConfig, *, cells: bool) -> None:
        self._config = config
        self._cells = cells
        self._prompts = Prompts(seed, config.vocab_size, real=cells)
        self._plain = SamplingParams()
        self._tiers = {tenant.name: Tier[tenant.tier.upper()] for tenant in config.tenants}
        self._roots: dict[str, bytes] = {}

    def build(self, ordinal: int, row: TraceRow) -> Request:
        prompt_ids = self._prompts.ids(ordinal, row)
        root, hashes = self._hash(ordinal, row, prompt_ids)
        return Request(
            request_id=f"r{ordinal}",
            tenant=row.tenant,
            prompt_ids=prompt_ids,
            max_tokens=row.output_tokens if row.ends == "length" else row.max_tokens,
            sampling=SamplingParams(seed=ordinal) if self._cells else self._plain,
            tier=Tier[row.tier.upper()] if row.tier else self._tiers.get(row.tenant, Tier.PLUS),
            admission=Admission.GUARANTEED if row.admission == "guaranteed" else Admission.ELASTIC,
            ttft_target_s=row.ttft_target_s,
            itl_target_s=row.itl_target_s,
            queue_timeout_s=row.queue_timeout_s,
            deadline_s=row.deadline_s,
            prefix_root=root,
            block_hashes=hashes,
        )

    def _hash(self, ordinal: int, row: TraceRow, prompt_ids: tuple[int, ...]) -> tuple[bytes, tuple[bytes, ...]]:
        """Blank prompts are alike but stand for different ones: a root of its own keeps each apart."""
        if not self._config.prefix_cache:
            return b"", ()
        root = self._roots.get(row.tenant)
        if root is None:
            root = self._roots[row.tenant] = chain_root(salt=row.tenant.encode(), version="sim")
        if not self._cells and row.prefix_group is None:
            root = root[:24] + ordinal.to_bytes(8, "little")
        return root, chain_blocks(root, prompt_ids, self._config.block_size)
