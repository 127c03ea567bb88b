"""Who asks what, and when. Owns the load as it is intended, drawn from seeds before anything is sent.

An open load's times are fixed in advance and do not depend on the server; a closed load's users ask again when they
were answered. Knows no protocol.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from msgspec import Struct, structs

from headrace.core.errors import InvalidInput
from headrace.sim.arrivals import Arrivals, Evenly, Poisson, Together
from headrace.sim.lengths import Lengths, parse_lengths
from headrace.sim.traces import TraceRow, read_trace

# A client that leaves before anything came does so within this time.
_SOON_S = 0.05
_CHUNK = 1024
MAX_REQUESTS = 5_000_000
# Where prompts are cut from: see `wording`.
POOL_TOKENS = 1 << 17


class Shot(Struct, frozen=True):
    """One request as intended. `at_s` counts from the start of the load; a closed load's is set when it is sent."""

    number: int
    tenant: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    # Where in the pool its prompt begins.
    offset: int
    seed: int
    # The client goes away: after so many pieces of the reply, or so long after it asked.
    leave_after_pieces: int | None = None
    leave_after_s: float | None = None
    timeout_s: float | None = None
    prefix_offset: int = 0
    prefix_tokens: int = 0


class TenantLoad(Struct, frozen=True):
    """What one key does. Just one of `arrivals`, `users` and `trace` is set."""

    name: str
    key: str | None
    prompt: Lengths
    output: Lengths
    arrivals: Arrivals | None = None
    users: int = 0
    think_s: float = 0.0
    requests: int | None = None
    trace: str | None = None

    @property
    def is_closed(self) -> bool:
        return self.users > 0


class Churn(Struct, frozen=True):
    """Shares of clients that go away in the middle, and of those that give up when `timeout_s` is over."""

    disconnect: float = 0.0
    timeout: float = 0.0
    timeout_s: float = 1.0


class LoadPlan(Struct, frozen=True):
    """The whole load. What starts in the first `warmup_s` is sent and not counted."""

    tenants: tuple[TenantLoad, ...]
    warmup_s: float = 0.0
    duration_s: float | None = None
    churn: Churn = Churn()
    seed: int = 0

    @property
    def until_s(self) -> float:
        return math.inf if self.duration_s is None else self.warmup_s + self.duration_s


class Draw:
    """Endless requests of one tenant, the same for the same seed."""

    def __init__(self, plan: LoadPlan, tenant: int) -> None:
        self._plan = plan
        self._load = plan.tenants[tenant]
        self._tenant = tenant
        self._rng = np.random.default_rng([plan.seed, tenant])
        self._made = self._make()

    def next(self, at_s: float) -> Shot:
        return structs.replace(next(self._made), at_s=at_s)

    def times(self) -> Iterator[float]:
        """An open load's arrivals; they end with the plan, or with the tenant's own number of requests."""
        arrivals, load, plan = self._load.arrivals, self._load, self._plan
        assert arrivals is not None
        rng = np.random.default_rng([plan.seed, self._tenant, 1])
        left = math.inf if load.requests is None else float(load.requests)
        # A crowd comes when the counting begins.
        start_s = plan.warmup_s if isinstance(arrivals, Together) else 0.0
        for chunk in arrivals.chunks(rng, plan.until_s if load.requests is None else math.inf):
            for at_s in (start_s + chunk).tolist():
                if at_s >= plan.until_s or left <= 0:
                    return
                left -= at_s >= plan.warmup_s
                yield at_s

    def _make(self) -> Iterator[Shot]:
        rng, load, churn = self._rng, self._load, self._plan.churn
        number = 0
        while True:
            prompts, outputs = load.prompt.sample(rng, _CHUNK).tolist(), load.output.sample(rng, _CHUNK).tolist()
            offsets = rng.integers(0, POOL_TOKENS, _CHUNK).tolist()
            seeds = rng.integers(0, 2**31, _CHUNK).tolist()
            fates, chances = rng.random(_CHUNK).tolist(), rng.random(_CHUNK).tolist()
            for prompt, output, offset, seed, fate, chance in zip(
                prompts, outputs, offsets, seeds, fates, chances, strict=True
            ):
                shot = Shot(number, self._tenant, 0.0, prompt, output, offset, seed)
                number += 1
                yield _with_fate(shot, churn, fate, chance)


def _with_fate(shot: Shot, churn: Churn, fate: float, chance: float) -> Shot:
    if fate < churn.disconnect:
        pieces = int(chance * (shot.output_tokens + 1))
        if pieces == 0:
            return structs.replace(shot, leave_after_s=chance * (shot.output_tokens + 1) * _SOON_S)
        return structs.replace(shot, leave_after_pieces=pieces, leave_after_s=churn.timeout_s * chance)
    if fate < churn.disconnect + churn.timeout:
        return structs.replace(shot, timeout_s=churn.timeout_s)
    return shot


def open_shots(plan: LoadPlan) -> list[Shot]:
    """Everything of the open loads, by time."""
    shots: list[Shot] = []
    for tenant, load in enumerate(plan.tenants):
        if load.is_closed:
            continue
        if load.trace is not None:
            shots += _replayed(plan, tenant, load.trace)
        else:
            draw = Draw(plan, tenant)
            for at_s in draw.times():
                shots.append(draw.next(at_s))
                if len(shots) > MAX_REQUESTS:
                    raise InvalidInput(f"the load has more than {MAX_REQUESTS:,} requests", param="--requests")
    return sorted(shots, key=lambda shot: (shot.at_s, shot.tenant, shot.number))


def _replayed(plan: LoadPlan, tenant: int, trace: str) -> Iterator[Shot]:
    """A trace's rows for this tenant: those that name it, or all where the plan has one tenant."""
    name = plan.tenants[tenant].name
    rng = np.random.default_rng([plan.seed, tenant])
    for number, row in enumerate(_rows(trace, name, alone=len(plan.tenants) == 1)):
        offset, seed, group = (int(drawn) for drawn in rng.integers(0, POOL_TOKENS, 3))
        shot = Shot(number, tenant, row.arrival_s, row.prompt_tokens, row.output_tokens, offset, seed)
        if row.prefix_group is not None:
            group = (row.prefix_group * 0x9E3779B1) % POOL_TOKENS
            shot = structs.replace(
                shot, prefix_offset=group, prefix_tokens=min(row.prefix_tokens, row.prompt_tokens - 1)
            )
        yield structs.replace(shot, leave_after_s=row.cancel_after_s, leave_after_pieces=row.cancel_after_tokens)


def _rows(trace: str, name: str, *, alone: bool) -> Iterator[TraceRow]:
    return (row for row in read_trace(Path(trace)) if alone or row.tenant == name)


def parse_arrivals(rate: float | None, together: int | None, *, constant: bool) -> Arrivals | None:
    if together is not None:
        return Together(together)
    if rate is None:
        return None
    return Evenly(rate) if constant else Poisson(rate)


def parse_tenant(text: str, base: TenantLoad, *, constant: bool) -> TenantLoad:
    """`name=quiet,key=KEY,rate=2,prompt=uniform:10:20,output=16`; what is not said is as the plain flags say.

    One of rate, users and together replaces how the others arrive.
    """
    words = {}
    for pair in re.split(r",(?=[a-z]+=)", text):
        name, equals, value = pair.partition("=")
        if not equals or name not in _TENANT_WORDS:
            raise InvalidInput(f"--tenant: {pair[:60]!r}; it takes {', '.join(_TENANT_WORDS)}", param="--tenant")
        words[name] = value
    kinds = [kind for kind in ("rate", "users", "together") if kind in words]
    if len(kinds) > 1 or "name" not in words:
        raise InvalidInput("--tenant needs a name, and at most one of rate, users and together", param="--tenant")
    load = structs.replace(base, name=words["name"], key=words.get("key", base.key))
    if kinds:
        together = _whole(words, "together") if "together" in words else None
        rate = _number(words, "rate") if "rate" in words else None
        users = _whole(words, "users") if "users" in words else 0
        arrivals = parse_arrivals(rate, together, constant=constant)
        load = structs.replace(load, arrivals=arrivals, users=users, trace=None)
    if "think" in words:
        load = structs.replace(load, think_s=_number(words, "think"))
    if "requests" in words:
        load = structs.replace(load, requests=_whole(words, "requests"))
    for field in ("prompt", "output"):
        if field in words:
            load = structs.replace(load, **{field: parse_lengths(words[field], "--tenant")})
    return load


_TENANT_WORDS = ("name", "key", "rate", "users", "together", "think", "requests", "prompt", "output")


def _number(words: dict[str, str], name: str) -> float:
    try:
        value = float(words[name])
    except ValueError:
        value = math.nan
    if not 1e-4 <= value <= 1e6:
        raise InvalidInput(f"--tenant: {name} must be a number from 0.0001 to 1,000,000", param="--tenant")
    return value


def _whole(words: dict[str, str], name: str) -> int:
    value = _number(words, name)
    if value != int(value):
        raise InvalidInput(f"--tenant: {name} must be a whole number", param="--tenant")
    return int(value)
