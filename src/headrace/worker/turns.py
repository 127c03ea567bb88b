"""The engine's thread: takes commands, turns the engine, hands out frames, until it has drained.

Owns the engine, the matchers and whose each sequence is; nothing else touches them. Nothing that a message carries
ends it: what a submission does wrong becomes its refusal. A submission is taken in whole or not at all.
"""

import logging
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count
from typing import assert_never

from headrace.core.errors import HeadraceError, NotFound, QueueFull, Refused
from headrace.core.event import StepFrame, Waits
from headrace.core.messages import (
    Abort,
    Attach,
    AttachPart,
    Drain,
    Frame,
    Pause,
    Resume,
    Service,
    Submit,
    Tenants,
    Withdraw,
    WorkerState,
)
from headrace.core.ports import Clock
from headrace.engine.loop import Engine
from headrace.text.grammar import Grammar
from headrace.text.matchers import Matchers
from headrace.worker.grammars import grammar_of
from headrace.worker.inbox import Built, Crowded, Greeted, Inbox, Item, Left, Order, TurnedAway
from headrace.worker.keys import NO_NUMBER, NOBODY, Building, Entry, KeyTable, entries_of
from headrace.worker.lifecycle import Lifecycle
from headrace.worker.orphans import NOT_ATTACHABLE, ORPHAN_S, Orphans, is_score_lost, why_not_attach
from headrace.worker.packing import FramePacker

log = logging.getLogger("headrace.worker")

# Matchers that may be in the making at once; each holds its request.
_MOST_BUILDING = 4096
_SERVICE_EVERY_S = 0.25
_LONGEST_GRACE_S = 86_400.0
# Sequences wait, nothing runs and nothing tells when that changes: look again.
_STUCK_S = 0.05
# A turn so short is over before a gateway would have read what came ahead of it, and woken up for that. The next is taken
# for as long as the last one, or as the prompts that wait.
_SHORT_TURN_S = 0.001

Send = Callable[[list[tuple[int, Frame]]], None]


class TurnLoop:
    def __init__(
        self,
        engine: Engine,
        matchers: Matchers | None,
        inbox: Inbox,
        lifecycle: Lifecycle,
        clock: Clock,
        send: Send,
        orphan_s: float = ORPHAN_S,
    ) -> None:
        self._engine = engine
        self._matchers = matchers
        self._inbox = inbox
        self._lifecycle = lifecycle
        self._clock = clock
        self._send = send
        self._keys = KeyTable()
        self._orphans = Orphans(orphan_s)
        self._packer = FramePacker(self._keys, self._forget)
        self._building: dict[int, Building] = {}
        self._num_building = 0
        self._tickets = count()
        self._crowded: set[int] = set()
        self._drain_at_s: float | None = None
        self._next_service_s = -math.inf
        self._is_service_untold = False
        # How long the last turn with a step was.
        self._turn_s = math.inf
        self._is_proof_due = False

    @property
    def is_drained(self) -> bool:
        return self._drain_at_s is not None and not self._keys.count and not self._engine.in_flight

    def run(self) -> None:
        """Until told to drain and done with it. Raises RunnerFailed when the device is gone."""
        while not self.is_drained:
            if not self.turn() and not self.is_drained:
                self._inbox.wait(self.patience_s())

    def turn(self) -> bool:
        """All commands, then one step; False when nothing is left to run.

        What the last step brought is sent last: whom that wakes may be given this very core, and waits for this thread.
        """
        engine = self._engine
        begun_s = now_s = self._clock.now_s()
        items = self._inbox.take()
        for item in items:
            self._take(item, now_s)
        self._enforce_grace(now_s)
        if now_s >= self._orphans.next_expiry_s:
            self._give_up(self._orphans.expired(now_s), now_s)
        if items and (max(self._turn_s, engine.queued_prompt_s) > _SHORT_TURN_S or self._is_proof_due):
            self._is_proof_due = False
            self._emit(engine.take_events(now_s))
        while engine.begin(now_s):
            pass
        if not engine.in_flight:
            self._emit(engine.take_events(now_s))
            self._tell_service(now_s)
            return False
        engine.wait()
        now_s = self._clock.now_s()
        self._turn_s = now_s - begun_s
        frame = engine.end(now_s)
        self._is_service_untold = True
        if now_s >= self._next_service_s:
            self._tell_service(now_s)
        is_idle = engine.idle
        if is_idle:
            engine.rest()
        self._emit(frame)
        return not is_idle

    def patience_s(self) -> float:
        """How long there is nothing to do, if nothing comes in."""
        now_s = self._clock.now_s()
        until_s = min(self._engine.next_expiry_s, self._orphans.next_expiry_s)
        if self._drain_at_s is not None:
            until_s = min(until_s, self._drain_at_s)
        if self._is_service_untold:
            until_s = min(until_s, self._next_service_s)
        return until_s - now_s if self._engine.idle else min(until_s - now_s, _STUCK_S)

    def _emit(self, frame: StepFrame) -> None:
        self._lifecycle.load = load = self._engine.load()
        frames = self._packer.pack(frame, load)
        if frames:
            self._send(frames)

    def _tell_service(self, now_s: float) -> None:
        self._next_service_s = now_s + _SERVICE_EVERY_S
        self._is_service_untold = False
        self._lifecycle.serve(self._engine.take_service())

    # Commands

    def _take(self, item: Item, now_s: float) -> None:
        match item:
            case Order():
                self._obey(item, now_s)
            case Greeted():
                # It lives, and goes on elsewhere with what it had here.
                if not item.attaches:
                    self._give_up(self._orphans.of(item.gateway), now_s)
            case Left():
                self._leave(item, now_s)
            case Crowded():
                self._crowd(item, now_s)
            case TurnedAway():
                error = QueueFull("too much waits to be taken in", retry_after_s=1.0)
                self._packer.turn_away(item.link, item.keys, error)
            case Built():
                self._built(item.ticket, now_s)
            case _:
                assert_never(item)

    def _obey(self, order: Order, now_s: float) -> None:
        command = order.command
        match command:
            case Submit():
                self._submit(order, command, now_s)
            case Attach():
                for part in command.parts:
                    self._attach(order.link, part, now_s)
            case Abort():
                self._abort(order.link, command, now_s)
            case Withdraw():
                self._withdraw(order.link, command.key, now_s)
            case Pause():
                self._pause(order.link, command.key, now_s)
            case Resume():
                self._resume(order.link, command.key, now_s)
            case Tenants() | Service():
                self._tune(command)
            case Drain():
                self._drain(command.grace_s, now_s)
            case _:
                assert_never(command)

    def _submit(self, order: Order, submit: Submit, now_s: float) -> None:
        by_part = [entries_of(part, order.link, order.arrived_s) for part in submit.parts]
        entries = list(chain.from_iterable(by_part))
        keys = [entry.key for entry in entries]
        if len(set(keys)) < len(keys) or self._keys.has_any(order.link, keys):
            return  # delivered twice
        if self._drain_at_s is not None:
            error = Refused("this worker is leaving", retry_after_s=1.0)
            self._packer.turn_away(order.link, keys, error, "draining")
            return
        for entry in entries:
            older = self._keys.named(entry.name)
            if older is not None and older in self._orphans:
                self._give_up((older,), now_s)  # whoever submits its name goes on by replay
            self._keys.add(entry)
        try:
            grammars = [grammar_of(part, can_follow=self._matchers is not None) for part in submit.parts]
            if any(grammars):
                self._build(entries, list(zip(by_part, grammars, strict=True)))
            else:
                self._place(entries, now_s)
        except HeadraceError as error:
            self._packer.refuse(entries, error)

    def _place(self, entries: Sequence[Entry], now_s: float) -> bool:
        try:
            numbers = self._engine.submit_all([entry.request for entry in entries], now_s)
        except HeadraceError as error:
            self._packer.refuse(entries, error)
            return False
        except Exception as error:  # the top loop: ends exactly one submission
            log.exception("a submission could not be taken in")
            self._packer.refuse(entries, HeadraceError(f"the request failed with {type(error).__name__}"))
            return False
        for entry, number in zip(entries, numbers, strict=True):
            entry.early_s = max(0.0, now_s - entry.arrived_s)
            self._keys.number(entry, number)
            self._packer.accept(entry)
            self._is_proof_due |= entry.is_suspect
            if entry.is_paused or entry.link in self._crowded:
                self._engine.pause(number, now_s)
        return True

    def _build(self, entries: list[Entry], parts: "list[tuple[list[Entry], Grammar | None]]") -> None:
        """Matchers are made elsewhere; the engine hears of the sequences when all are there."""
        assert self._matchers is not None
        masked = [(entry, grammar) for made, grammar in parts if grammar is not None for entry in made]
        if self._num_building + len(masked) > _MOST_BUILDING:
            raise QueueFull("too many grammars are being built", retry_after_s=1.0)
        ticket = next(self._tickets)
        self._building[ticket] = Building(entries, len(masked))
        self._num_building += len(masked)
        for entry, grammar in masked:
            entry.matcher = self._matchers.build(grammar, entry.request.replay_ids)
            entry.matcher.add_done_callback(lambda _: self._inbox.put(Built(ticket)))

    def _built(self, ticket: int, now_s: float) -> None:
        building = self._building[ticket]
        building.num_left -= 1
        self._num_building -= 1
        if building.num_left:
            return
        del self._building[ticket]
        # Others were aborted, or their gateway left.
        entries = [entry for entry in building.entries if self._keys.find(entry.link, entry.key) is entry]
        if entries:
            self._place_built(entries, now_s)

    def _place_built(self, entries: list[Entry], now_s: float) -> None:
        assert self._matchers is not None
        try:
            matchers = [None if entry.matcher is None else entry.matcher.result() for entry in entries]
        except HeadraceError as error:
            self._packer.refuse(entries, error)
            return
        except Exception as error:  # the top loop: ends exactly one submission
            log.exception("a grammar could not be built")
            self._packer.refuse(entries, HeadraceError(f"the grammar failed with {type(error).__name__}"))
            return
        if self._place(entries, now_s):
            for entry, matcher in zip(entries, matchers, strict=True):
                entry.matcher = None
                if matcher is not None:
                    self._matchers.put(entry.number, matcher)

    def _abort(self, link: int, abort: Abort, now_s: float) -> None:
        entry = self._keys.find(link, abort.key)
        if entry is None:
            return
        if entry.number == NO_NUMBER:
            self._cancel_build(entry)
            self._packer.end_unplaced(entry, "aborted", now_s - entry.arrived_s)
        else:
            self._engine.abort(entry.number, now_s, used_tokens=abort.used_tokens)

    def _withdraw(self, link: int, key: int, now_s: float) -> None:
        entry = self._keys.find(link, key)
        if entry is None:
            return
        if entry.number == NO_NUMBER:
            self._cancel_build(entry)
            self._packer.end_unplaced(entry, "withdrawn", now_s - entry.arrived_s)
        else:
            self._engine.withdraw(entry.number, now_s)

    def _pause(self, link: int, key: int, now_s: float) -> None:
        entry = self._keys.find(link, key)
        if entry is not None:
            entry.is_paused = True
            self._engine.pause(entry.number, now_s)

    def _resume(self, link: int, key: int, now_s: float) -> None:
        entry = self._keys.find(link, key)
        if entry is not None:
            entry.is_paused = False
            if link not in self._crowded:
                self._engine.resume(entry.number, now_s)

    def _tune(self, command: Tenants | Service) -> None:
        try:
            if isinstance(command, Tenants):
                self._engine.set_tenants(command.tenants)
            else:
                for tenant, seconds in command.seconds.items():
                    self._engine.observe_service(tenant, seconds)
        except HeadraceError as error:
            log.warning("%s: nothing is changed by it: %s", type(command).__name__, error.message)

    # Links

    def _crowd(self, news: Crowded, now_s: float) -> None:
        """A gateway that does not take its frames gets no more tokens; one that does again goes on where it was."""
        if news.is_full:
            self._crowded.add(news.link)
        else:
            self._crowded.discard(news.link)
        for entry in self._keys.of(news.link):
            if news.is_full:
                self._engine.pause(entry.number, now_s)
            elif not entry.is_paused:
                self._engine.resume(entry.number, now_s)

    def _leave(self, left: Left, now_s: float) -> None:
        """Nobody is left to hear of these sequences; somebody may come for some. The paused ones stay so."""
        self._packer.drop_link(left.link)
        for entry in self._keys.of(left.link):
            if not entry.outlives or not self._recall(entry):
                self._give_up((entry,), now_s)
                continue
            entry.is_paused |= left.link in self._crowded
            self._keys.orphan(entry)
            self._orphans.add(entry, left.gateway, now_s)
        self._crowded.discard(left.link)
        if left.for_good:
            self._give_up(self._orphans.of(left.gateway), now_s)

    def _attach(self, link: int, part: AttachPart, now_s: float) -> None:
        if self._keys.find(link, part.key) is not None:
            return  # delivered twice
        entry = self._keys.named((part.tenant, part.request_id, part.number))
        if entry is not None and not self._recall(entry):
            entry = None
        why = "no such sequence is here" if entry is None else why_not_attach(entry, part)
        if entry is None or why:
            self._packer.turn_away(link, (part.key,), NotFound(why), NOT_ATTACHABLE)
            if entry is not None and entry in self._orphans and is_score_lost(entry, part.index):
                self._give_up((entry,), now_s)  # nobody can have it any more
            return
        counters = self._engine.counters_of(entry.number) if entry.end is None else entry.end.counters
        if entry.link != NOBODY:
            self._packer.end_for(entry, "taken", counters, Waits())
        self._orphans.remove(entry)
        self._keys.move(entry, link, part.key)
        entry.is_paused = False
        if entry.number == NO_NUMBER:
            return  # it is accepted when it is placed
        self._packer.tell_again(entry, part.index, counters)
        entry.ids = array("i")
        (self._engine.pause if link in self._crowded else self._engine.resume)(entry.number, now_s)

    def _recall(self, entry: Entry) -> bool:
        """Note its tokens up to now; False where it has just been ended by command."""
        if entry.link == NOBODY or entry.number == NO_NUMBER:
            return True
        outputs = self._engine.outputs_of(entry.number)
        entry.ids = array("i", outputs or ())
        return outputs is not None

    def _give_up(self, entries: Iterable[Entry], now_s: float) -> None:
        """Ends what nobody will hear of."""
        for entry in entries:
            self._orphans.remove(entry)
            self._cancel_build(entry)
            self._keys.drop(entry)
            self._engine.abort(entry.number, now_s)
            self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        if entry.end is None:
            self._orphans.remove(entry)
        if self._matchers is not None and entry.request.sampling.masked:
            self._matchers.remove(entry.number)

    def _cancel_build(self, entry: Entry) -> None:
        if entry.matcher is not None:
            entry.matcher.cancel()

    # Leaving

    def _drain(self, grace_s: float, now_s: float) -> None:
        """The nearest end of all graces given holds."""
        grace_s = min(max(grace_s, 0.0), _LONGEST_GRACE_S) if math.isfinite(grace_s) else _LONGEST_GRACE_S
        until_s = now_s + grace_s
        self._drain_at_s = until_s if self._drain_at_s is None else min(self._drain_at_s, until_s)
        self._lifecycle.enter(WorkerState.DRAINING, "finishing what there is")

    def _enforce_grace(self, now_s: float) -> None:
        if self._drain_at_s is None or now_s < self._drain_at_s:
            return
        self._give_up(self._keys.of(NOBODY), now_s)
        for entry in self._keys:
            self._abort(entry.link, Abort(entry.key), now_s)
