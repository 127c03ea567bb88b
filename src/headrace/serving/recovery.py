"""Voices that lost their worker, until another has them. Owns what waits for one, and who is suspected of a death.

Most go on at once. Whoever may have killed the worker goes alone: one such life at a time to each replica, until
that has said a few of its tokens. Which replica takes a life is for `serving.placement`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.core.errors import HeadraceError, Refused, TimedOut, Unreachable
from headrace.core.messages import WorkerState
from headrace.core.ports import Clock
from headrace.core.stages import Stage
from headrace.serving.failures import WORKER_LOST, failure_of
from headrace.serving.life import Life
from headrace.serving.lives import Lives
from headrace.serving.placement import Placement
from headrace.serving.quarantine import MOST_KILLS
from headrace.serving.replica_table import ReplicaEnd
from headrace.serving.voice import Voice

FAILOVER_S = 60.0
LOOK_S = 0.1
# A suspect that has done no harm for so long does not hold up the others.
TURN_S = 10.0
# Refusals and ends without reason: not again at once, and not much later either.
_SHORTEST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
# Of several that were suspected together, or of one that its worker may never have seen, a death proves less.
_MOST_KILLS_UNPROVEN = MOST_KILLS + 1


@dataclass(slots=True)
class Waiting:
    """Voices of one life that go together, not before `from_s`."""

    voices: list[Voice]
    from_s: float


@dataclass(slots=True)
class Turn:
    """A suspect that is being tried, alone."""

    life: Life
    until_s: float


class Recovery:
    """After `failover_s` without a worker that could take it over, a life fails."""

    def __init__(self, lives: Lives, placement: Placement, clock: Clock, *, failover_s: float = FAILOVER_S) -> None:
        self._lives = lives
        self._placement = placement
        self._clock = clock
        self._failover_s = failover_s
        self._waiting: dict[Life, Waiting] = {}
        # By the name of the replica.
        self._turns: dict[str, Turn] = {}
        self._timer: asyncio.TimerHandle | None = None
        lives.rescue = self

    @property
    def num_waiting(self) -> int:
        """Lives with voices that no worker has."""
        return len(self._waiting)

    def judge(self, replica: str, lost: Mapping[Life, Sequence[Voice]]) -> set[Life]:
        """A worker died: who of those that were there is suspected of it, and who is guilty.

        Suspected is who had said next to nothing there. If some of these were suspected before, it was one of them,
        and nobody else is suspected: guilty, if there is but one and the worker had it for sure.
        """
        self._turns.pop(replica, None)
        now_s = self._clock.now_s()
        suspects = [life for life, voices in lost.items() if any(voice.is_fresh for voice in voices)]
        accused = [life for life in suspects if life.kills]
        for life in lost:
            if life not in accused:
                life.kills = 0
        for life in accused or suspects:
            life.kills += 1
        is_proven = len(accused) == 1 and any(voice.is_accepted for voice in lost[accused[0]])
        most_kills = MOST_KILLS if is_proven else _MOST_KILLS_UNPROVEN
        guilty = {life for life in accused if life.kills >= most_kills}
        for life in guilty:
            self._placement.quarantine.remember(life, MOST_KILLS, now_s)
        return guilty

    def displace(self, life: Life, voices: Sequence[Voice], *, after_s: float = 0.0) -> None:
        """Voices without a worker; those of a life that lost theirs one by one go on together."""
        now_s = self._clock.now_s()
        waiting = self._waiting.get(life)
        has_progressed = any(len(voice.heard) > voice.num_replayed for voice in voices)
        if has_progressed or life.stalled_s is None:
            life.stalled_s = now_s
        from_s = now_s + min(after_s, _LONGEST_PAUSE_S)
        if waiting is None:
            self._waiting[life] = Waiting(list(voices), from_s)
        else:
            waiting.voices = sorted({*waiting.voices, *voices}, key=lambda voice: voice.number)
            waiting.from_s = max(waiting.from_s, from_s)
        if all(voice.key < 0 for voice in life.voices):
            life.stages.enter(Stage.ROUTE, now_s)
        self._arm()

    def forget(self, life: Life) -> None:
        self._waiting.pop(life, None)

    def heard(self) -> None:
        """Voices have heard a frame: whose turn it was may be cleared by it."""
        if self._turns and self._end_turns():
            self.look()

    def look(self) -> None:
        """Place what can be placed, give up what has waited too long."""
        self._end_turns()
        for life, waiting in list(self._waiting.items()):
            if self._waiting.get(life) is waiting:
                with self._lives.guard(life):
                    self._try(life, waiting)
        self._arm()

    def replica_changed(self, replica: ReplicaEnd) -> None:
        """One became ready, or is leaving: both may let something move."""
        if replica.is_ready and self._waiting:
            self.look()
        if replica.is_ready or replica.state is WorkerState.DRAINING:
            self._hand_over()

    def _try(self, life: Life, waiting: Waiting) -> None:
        now_s = self._clock.now_s()
        is_suspect = life.kills > 0
        replica = self._placement.find(life, avoided=self._turns if is_suspect else ())
        if is_suspect and (all(voice.is_paused for voice in waiting.voices) or self._is_in_line(life, replica)):
            # It waits for its turn, or for its reader, and not for a worker.
            life.stalled_s = now_s
            replica = None
        if self._has_expired(life, waiting, now_s) or replica is None or now_s < waiting.from_s:
            return
        del self._waiting[life]
        try:
            self._placement.replay(life, waiting.voices, replica)
        except Refused as refused:
            self._waiting[life] = waiting
            life.stages.enter(Stage.ROUTE, now_s)
            waiting.from_s = now_s + min(max(refused.retry_after_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
        except HeadraceError as error:
            self._lives.fail(life, failure_of(error))
        else:
            if is_suspect:
                self._turns[replica.name] = Turn(life, now_s + TURN_S)

    def _is_in_line(self, life: Life, replica: ReplicaEnd | None) -> bool:
        return replica is None and self._placement.find(life) is not None

    def _has_expired(self, life: Life, waiting: Waiting, now_s: float) -> bool:
        """Ends it if so."""
        limits = [voice.prepared.ask.deadline_s for voice in waiting.voices]
        error: HeadraceError
        if any(limit is not None and life.age_s(now_s) >= limit for limit in limits):
            error = TimedOut("the deadline has passed", param="deadline_s")
        elif life.stalled_s is not None and now_s - life.stalled_s >= self._failover_s:
            why = f": {life.refusal}" if life.refusal else ""
            error = Unreachable(f"{WORKER_LOST}, and no other could take it over{why}")
        else:
            return False
        self._lives.fail(life, failure_of(error))
        return True

    def _end_turns(self) -> bool:
        """Whether any is over. Who has said enough is not suspected any more."""
        now_s = self._clock.now_s()
        over = []
        for name, turn in self._turns.items():
            there = [voice for voice in turn.life.live if voice.key >= 0 and _is_at(voice, name)]
            if not any(voice.is_fresh for voice in there):
                over.append(name)
                if turn.life not in self._waiting:
                    turn.life.kills = 0
            elif now_s >= turn.until_s or all(voice.is_paused for voice in there):
                over.append(name)
        for name in over:
            del self._turns[name]
        return bool(over)

    def _hand_over(self) -> None:
        """What draining workers have goes where it can go on at once; else it stays to be finished."""
        tried = [turn.life for turn in self._turns.values()]
        for life, voices in self._lives.draining().items():
            replica = self._placement.find(life)
            if replica is None or life in tried:
                continue
            with self._lives.guard(life):
                try:
                    self._placement.replay(life, voices, replica)
                except HeadraceError:
                    continue  # it is well where it is

    def _arm(self) -> None:
        if self._timer is None and (self._waiting or self._turns):
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.look()


def _is_at(voice: Voice, name: str) -> bool:
    return voice.replica is not None and voice.replica.name == name
