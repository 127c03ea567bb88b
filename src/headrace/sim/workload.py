"""The load of a scenario, drawn lazily. Owns every random draw about requests and the ids of prompts.

Each draw comes from a generator seeded by (scenario seed, purpose), so that a change to one tenant or
one kind of draw moves no other. Knows neither engines nor time.
"""

import heapq
from collections.abc import Iterator
from hashlib import sha256
from itertools import islice, repeat
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.sim.scenario import Scenario, TenantLoad, written_lengths
from headrace.sim.traces import TraceRow, read_trace

_MASK = 2**64 - 1
# Ids that are kept to be shared; beyond it they are made anew.
_MOST_KEPT = 2**24


def generator(seed: int, purpose: str) -> np.random.Generator:
    """The stream of random numbers that belongs to one purpose."""
    digest = sha256(purpose.encode()).digest()
    return np.random.Generator(np.random.PCG64([seed, int.from_bytes(digest[:8], "little")]))


def draw_rows(scenario: Scenario) -> Iterator[TraceRow]:
    """All requests of a scenario in order of arrival; of the same instant, the trace first, then tenants as listed."""
    sources = [_tenant_rows(scenario, tenant) for tenant in scenario.tenants if tenant.arrivals is not None]
    if scenario.trace is not None:
        sources.insert(0, _trace_rows(scenario, scenario.trace))
    merged = sources[0] if len(sources) == 1 else heapq.merge(*sources, key=attrgetter("arrival_s"))
    return islice(merged, scenario.requests)


def _trace_rows(scenario: Scenario, path: str) -> Iterator[TraceRow]:
    for row in read_trace(path):
        if scenario.duration_s is not None and row.arrival_s >= scenario.duration_s:
            return
        yield row


def _tenant_rows(scenario: Scenario, tenant: TenantLoad) -> Iterator[TraceRow]:
    return islice(_endless_rows(scenario, tenant), tenant.requests)


def _endless_rows(scenario: Scenario, tenant: TenantLoad) -> Iterator[TraceRow]:
    assert tenant.arrivals is not None
    ends = [end for end in (tenant.stop_s, scenario.duration_s) if end is not None]
    stop_s = min(ends, default=np.inf)
    draw = _Columns(scenario.seed, tenant)
    for chunk in tenant.arrivals.chunks(generator(scenario.seed, f"arrivals/{tenant.name}"), stop_s - tenant.start_s):
        times = (chunk + tenant.start_s).tolist()
        for arrival_s, *values in zip(times, *draw.columns(len(times)), strict=False):
            if arrival_s >= stop_s:
                return
            yield _row(tenant, arrival_s, *values)


def _row(
    tenant: TenantLoad,
    arrival_s: float,
    prompt: int,
    output: int,
    stops: bool,
    group: int | None,
    cancel_s: float | None,
    cancel_tokens: int | None,
    reader: float | None,
) -> TraceRow:
    return TraceRow(
        arrival_s=arrival_s,
        prompt_tokens=prompt,
        output_tokens=output,
        tenant=tenant.name,
        tier=tenant.tier,
        admission=tenant.admission,
        ends="stop" if stops else "length",
        max_tokens=tenant.max_tokens if stops else None,
        prefix_group=group,
        prefix_tokens=tenant.prefix.tokens if group is not None and tenant.prefix else 0,
        cancel_after_s=cancel_s,
        cancel_after_tokens=cancel_tokens,
        reader_tokens_per_s=reader,
        ttft_target_s=tenant.ttft_target_s,
        itl_target_s=tenant.itl_target_s,
        queue_timeout_s=tenant.queue_timeout_s,
        deadline_s=tenant.deadline_s,
    )


class _Columns:
    """Draws what a tenant's requests differ in, a chunk at a time, one generator a column."""

    def __init__(self, seed: int, tenant: TenantLoad) -> None:
        self._tenant = tenant
        self._prompt = written_lengths(tenant.prompt, "prompt")
        self._output = written_lengths(tenant.output, "output")
        purposes = ("prompt", "output", "stops", "prefix", "cancels", "readers")
        self._rngs = {purpose: generator(seed, f"{purpose}/{tenant.name}") for purpose in purposes}

    def columns(self, n: int) -> tuple[Any, ...]:
        """Prompt, output, stops, prefix group, cancel seconds, cancel tokens, reader speed."""
        prompt = self._prompt.sample(self._rngs["prompt"], n).tolist()
        output = self._output.sample(self._rngs["output"], n).tolist()
        return (prompt, output, self._stops(n), self._groups(n), *self._cancels(n), self._readers(n))

    def _stops(self, n: int) -> Any:
        share = self._tenant.stop_share
        return (self._rngs["stops"].random(n) < share).tolist() if share else repeat(False)

    def _groups(self, n: int) -> Any:
        prefix = self._tenant.prefix
        if prefix is None:
            return repeat(None)
        rng = self._rngs["prefix"]
        groups = rng.integers(0, prefix.groups, n).tolist()
        return _some(groups, rng.random(n) < prefix.share)

    def _cancels(self, n: int) -> tuple[Any, Any]:
        cancels = self._tenant.cancels
        if cancels is None:
            return repeat(None), repeat(None)
        rng = self._rngs["cancels"]
        chosen = rng.random(n) < cancels.share
        if cancels.after_s is not None:
            return _some((1e-9 + rng.exponential(cancels.after_s, n)).tolist(), chosen), repeat(None)
        assert cancels.after_tokens is not None
        lengths = written_lengths(cancels.after_tokens, "after_tokens")
        return repeat(None), _some(lengths.sample(rng, n).tolist(), chosen)

    def _readers(self, n: int) -> Any:
        readers = self._tenant.slow_readers
        if readers is None:
            return repeat(None)
        return _some([readers.tokens_per_s] * n, self._rngs["readers"].random(n) < readers.share)


def _some(values: list[Any], chosen: NDArray[np.bool_]) -> list[Any]:
    return [value if yes else None for value, yes in zip(values, chosen.tolist(), strict=True)]


class Prompts:
    """Ids of prompts: a function of (seed, request) and, in a shared prefix, of (seed, tenant, group).

    Without cells nobody looks at ids, so that all prompts of one length are the same object.
    """

    def __init__(self, seed: int, vocab_size: int, real: bool) -> None:
        self._vocab_size = vocab_size
        self._root = int(generator(seed, "prompts").integers(0, 2**63))
        self._real = real
        self._blank: dict[int, tuple[int, ...]] = {}
        self._prefixes: dict[tuple[str, int, int], tuple[int, ...]] = {}
        self._num_kept = 0

    def ids(self, ordinal: int, row: TraceRow) -> tuple[int, ...]:
        if row.prefix_group is not None:
            shared = self._prefix(row.tenant, row.prefix_group, min(row.prefix_tokens, row.prompt_tokens))
            return shared + self._own(ordinal, row.prompt_tokens - len(shared))
        if self._real:
            return self._own(ordinal, row.prompt_tokens)
        blank = self._blank.get(row.prompt_tokens)
        if blank is None:
            self._make_room(row.prompt_tokens)
            blank = self._blank[row.prompt_tokens] = (1,) * row.prompt_tokens
        return blank

    def _own(self, ordinal: int, count: int) -> tuple[int, ...]:
        return self._mixed(self._root + ordinal * 0xD1342543DE82EF95, count)

    def _prefix(self, tenant: str, group: int, count: int) -> tuple[int, ...]:
        key = (tenant, group, count)
        if key not in self._prefixes:
            digest = sha256(f"{self._root}/{tenant}/{group}".encode()).digest()
            self._make_room(count)
            self._prefixes[key] = self._mixed(int.from_bytes(digest[:8], "little"), count)
        return self._prefixes[key]

    def _make_room(self, count: int) -> None:
        """Before `count` more ids are kept: very many different ones would fill the memory."""
        if self._num_kept + count > _MOST_KEPT:
            self._blank.clear()
            self._prefixes.clear()
            self._num_kept = 0
        self._num_kept += count

    def _mixed(self, start: int, count: int) -> tuple[int, ...]:
        """The splitmix64 sequence from `start`, folded into the vocabulary."""
        x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start & _MASK)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        return tuple((x % np.uint64(self._vocab_size)).tolist())
