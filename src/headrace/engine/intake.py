"""What is refused at submission, before anything is allocated. Owns the queue's bound in seconds of work.

What is submitted together is judged together, by the queue that it finds: its own siblings do not stand in its way.
"""

from collections.abc import Iterable

from headrace.core.errors import ContextLengthExceeded, DeadlineUnmeetable, InvalidInput, QueueFull
from headrace.core.ids import are_below
from headrace.core.request import Admission, Request, check_sampling, check_times
from headrace.engine.budget import QUEUE_PART
from headrace.engine.cost import CostModel
from headrace.engine.estimate import OutputEstimates
from headrace.engine.sequence import Sequence
from headrace.engine.state import State


class Intake:
    def __init__(self, state: State) -> None:
        self._state = state
        # What the device was measured to do, and what is thought of outputs, before anything ran: this does not change.
        self._first_model = CostModel(state.config.profile)
        self._first_estimates = OutputEstimates()
        self._next_number = 0

    def accept(self, requests: Iterable[Request], now_s: float) -> list[int]:
        """Check, bound and file requests, all or none; returns their sequence numbers."""
        sequences: list[Sequence] = []
        checked: Request | None = None
        for request in requests:
            limit = self._check(request, checked)
            sequences.append(self._make(request, self._next_number + len(sequences), limit, now_s))
            checked = request
        # Whoever has heard something was let in elsewhere, with all that was submitted with it.
        is_new = not any(sequence.request.replay_ids for sequence in sequences)
        if is_new:
            self._bound_together(sequences)
        for sequence in sequences:
            sequence.expected_wait_s = self._queued_s(sequence)
            if is_new:
                self._bound(sequence)
        # Only the wait before the first was judged, so only that one's can bear it out.
        for sequence in sequences[1:]:
            sequence.expected_wait_s = 0.0
        for sequence in sequences:
            self._state.accept(sequence, now_s)
        self._next_number += len(sequences)
        return [sequence.number for sequence in sequences]

    def _check(self, request: Request, checked: Request | None) -> int:
        """Refuse what could never run; returns the most tokens the sequence may come to.

        What it shares with a request that was `checked` just before is not looked at again: prompts are long.
        """
        config = self._state.config
        num_prompt = len(request.prompt_ids)
        if num_prompt == 0:
            raise InvalidInput("the prompt is empty", param="prompt")
        if num_prompt >= config.context_len:
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt} tokens; the context holds {config.context_len}, one of them for output",
                param="prompt",
            )
        if checked is None or request.prompt_ids is not checked.prompt_ids:
            _check_ids(request.prompt_ids, config.vocab_size, "prompt")
        if checked is None or request.sampling is not checked.sampling:
            check_sampling(request.sampling, config.vocab_size)
        check_times(request)
        limit = self._limit(request)
        if request.sampling.min_tokens > limit - num_prompt:
            raise InvalidInput("min_tokens exceeds max_tokens", param="min_tokens")
        if request.replay_ids:
            _check_ids(request.replay_ids, config.vocab_size, "replay_ids")
            if num_prompt + len(request.replay_ids) >= limit:
                raise InvalidInput("replay_ids leave nothing to generate", param="replay_ids")
        self._check_pool(request, limit)
        return limit

    def _limit(self, request: Request) -> int:
        config = self._state.config
        num_prompt = len(request.prompt_ids)
        if request.max_tokens is None:
            return max(num_prompt + 1, min(config.context_len, config.blocks * config.block_size))
        if request.max_tokens < 1:
            raise InvalidInput("max_tokens must be at least 1", param="max_tokens")
        if num_prompt + request.max_tokens > config.context_len:
            raise ContextLengthExceeded(
                f"prompt ({num_prompt}) and max_tokens ({request.max_tokens}) exceed the context of {config.context_len}",
                param="max_tokens",
            )
        return num_prompt + request.max_tokens

    def _check_pool(self, request: Request, limit: int) -> None:
        """The last token is never computed, so it needs no cell."""
        config = self._state.config
        if limit - 1 > config.blocks * config.block_size:
            need = self._state.blocks_for(limit - 1)
            raise InvalidInput(
                f"the request may need {need} KV blocks; this engine has {config.blocks}", param="max_tokens"
            )
        if request.admission is Admission.GUARANTEED:
            self._check_guarantee(request)

    def _check_guarantee(self, request: Request) -> None:
        """What others have reserved is never lent to a guaranteed sequence."""
        state = self._state
        tenant = state.tenants.index(request.tenant)
        known = len(request.prompt_ids) + len(request.replay_ids)
        least = state.blocks_for(known + state.config.block_size)
        slots, _ = state.tenants.reserved_by_others(tenant)
        within = least <= state.guarantee_limit(tenant) and slots < state.config.slots
        # Above a cap one may only borrow, and what is borrowed is not guaranteed.
        if not within or least > state.tenants.max_blocks[tenant] or state.tenants.max_slots[tenant] < 1:
            raise InvalidInput("more than may be guaranteed to this tenant is asked", param="admission")

    def _make(self, request: Request, number: int, limit: int, now_s: float) -> Sequence:
        state = self._state
        tenant = state.tenants.index(request.tenant)
        num_prompt, num_replayed = len(request.prompt_ids), len(request.replay_ids)
        known = num_prompt + num_replayed
        expected = min(state.estimates.expected(request.tenant, num_prompt), float(limit - num_prompt))
        return Sequence(
            number=number,
            request=request,
            tenant=tenant,
            arrival_s=now_s,
            ttft_at_s=now_s + state.ttft_s(request),
            limit=limit,
            expected_output=expected,
            prompt_s=state.model.prompt_s(known),
            work_s=self._work_s(state.model, known, max(1.0, expected - num_replayed)),
            outputs=list(request.replay_ids),
        )

    def _work_s(self, model: CostModel, known: int, output: float) -> float:
        """Device-seconds of `known` tokens, and of `output` more in a full engine, where as many rows as fit share each
        step's c0."""
        state = self._state
        rows = min(state.config.slots, state.config.blocks / state.blocks_for(int(known + output)))
        token_s = model.c_out_s + model.c_kv_s * (known + 0.5 * output) + model.c0_s / max(1.0, rows)
        return model.prompt_s(known) + output * token_s

    def _first_work_s(self, sequence: Sequence) -> float:
        """What its work was thought to be when nothing had run."""
        num_prompt = sequence.num_prompt
        expected = self._first_estimates.expected(sequence.request.tenant, num_prompt)
        return self._work_s(self._first_model, num_prompt, min(expected, float(sequence.limit - num_prompt)))

    def _bound_together(self, sequences: list[Sequence]) -> None:
        """Refuse what is too much by itself, whatever the queue holds: for good what was so from the first, else for now."""
        config = self._state.config
        count = len(sequences)
        if count > config.max_waiting:
            raise InvalidInput(
                f"{count} sequences at once are too many: at most {config.max_waiting} may wait",
                param=_param_of(sequences),
            )
        ahead_s = sum(sequence.work_s for sequence in sequences[:-1])
        if ahead_s > config.max_queue_s:
            told = (
                f"{count} sequences at once are too many: they are {{:.1f}} s of work before the last one begins, and at "
                f"most {config.max_queue_s:g} s may be queued"
            )
            first_s = sum(self._first_work_s(sequence) for sequence in sequences[:-1])
            if first_s > config.max_queue_s:
                raise InvalidInput(told.format(first_s), param=_param_of(sequences))
            # It is slow now, and need not stay so; where nothing runs, nothing would tell.
            if self._state.line.count or self._state.table.num_free < config.slots:
                raise QueueFull(told.format(ahead_s), retry_after_s=max(1.0, ahead_s - config.max_queue_s))
        if self._state.line.count + count > config.max_waiting:
            wait_s = self._borne_out(sequences[0], self._queued_s(sequences[0]))
            raise QueueFull("too many sequences wait", retry_after_s=max(1.0, wait_s))

    def _bound(self, sequence: Sequence) -> None:
        """Refuse at once what would wait longer than it was promised, or than the queue may hold.

        Each tenant may queue its share of the bound, so that a flood shuts out nobody but itself.
        """
        state = self._state
        config = state.config
        wait_s = self._borne_out(sequence, sequence.expected_wait_s)
        most_s = min(config.max_queue_s, QUEUE_PART * state.ttft_s(sequence.request))
        if wait_s > most_s:
            raise QueueFull(
                f"the wait is {wait_s:.1f} s for this tenant now and may be {most_s:.1f} s",
                retry_after_s=max(0.1, wait_s - most_s),
            )
        deadline_s = sequence.request.deadline_s
        if deadline_s is not None and wait_s + sequence.work_s > deadline_s:
            raise DeadlineUnmeetable(
                f"the deadline of {deadline_s:.3g} s cannot be met: about {wait_s:.3g} s of wait and "
                f"{sequence.work_s:.3g} s of work come first",
                retry_after_s=max(0.1, wait_s + sequence.work_s - deadline_s),
                param="deadline_s",
            )

    def _borne_out(self, sequence: Sequence, wait_s: float) -> float:
        """How long a new sequence would wait, as far as its tenant's past waits have borne that out."""
        return wait_s * self._state.tenants.wait_bias[sequence.tenant]

    def _queued_s(self, sequence: Sequence) -> float:
        """The tenant's own backlog at its share of the device, and a turn of everyone else who waits.

        At most everyone's backlog. While slots are free only the prompts ahead stand in the way, not what
        they will generate.
        """
        state = self._state
        tenants = state.tenants
        tenant = sequence.tenant
        if state.line.count < state.table.num_free:
            own_s, all_s = tenants.waiting_prompt_s[tenant], state.queue_prompt_s
        else:
            own_s, all_s = tenants.waiting_s[tenant], state.queue_s
        if all_s <= 0.0:
            return 0.0
        others = state.line.num_tenants - (tenants.num_waiting[tenant] > 0)
        turn_s = others * min(all_s / state.line.count, sequence.work_s)
        return min(all_s, own_s / tenants.share(tenant) + turn_s)


def _param_of(sequences: list[Sequence]) -> str:
    """What of a request made so many of them."""
    return "n" if any(sequence.request.choice for sequence in sequences) else "prompt"


def _check_ids(ids: tuple[int, ...], vocab_size: int, param: str) -> None:
    if not are_below(ids, vocab_size):
        raise InvalidInput(f"{param} holds an id outside the vocabulary of {vocab_size}", param=param)
