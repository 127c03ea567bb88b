"""A stream as chunks of headrace.proto. Pure: a chunk is a function of its record, of the stream's dialect and of how many
tokens came before.

Text, ids and finish are those of server-sent events; ids are always told.
"""

from collections.abc import Iterable, Sequence

from headrace.gateway.dialects.chat import ChatDialect
from headrace.gateway.dialects.completion import CompletionDialect
from headrace.gateway.dialects.envelope import Heading, Wants
from headrace.gateway.dialects.logprobs import finite
from headrace.gateway.errors import type_of
from headrace.gateway.grpc import headrace_pb2 as pb
from headrace.streams.record import Failure, Part, Record, Score, Usage
from headrace.streams.stream import Stream


class ChunkWording:
    """`failure` is that of the end that was worded: the call ends with the status that belongs to it."""

    __slots__ = ("_heading", "_is_chat", "_num_choices", "_number", "_said", "_stream", "_wants", "failure")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        dialect = stream.dialect
        self._heading, self._wants, self._num_choices = Heading("", stream.id, 0, stream.model), Wants(), 1
        if isinstance(dialect, (ChatDialect, CompletionDialect)):
            self._heading, self._wants, self._num_choices = dialect.heading, dialect.wants, dialect.num_choices
        self._is_chat = isinstance(dialect, ChatDialect)
        # The last record that was looked at, and the tokens that all choices had said by then.
        self._number = self._said = 0
        self.failure: Failure | None = None

    def frames(self, records: Sequence[Record]) -> list[tuple[int, bytes]]:
        found = []
        for record in records:
            if record.ending is None:
                self._count_to(record.number - 1)
                chunk = self.chunk(record, self._said)
                if chunk is not None:
                    found.append((record.number, chunk.SerializeToString()))
                self._said += _num_tokens(record)
                self._number = record.number
        return found

    def end(self, record: Record, failure: Failure | None = None) -> bytes:
        self._count_to(record.number)
        ending = record.ending
        self.failure = failure = failure or (ending.failure if ending is not None else None)
        chunk = self._around(record, self._said)
        chunk.is_final = True
        if ending is not None:
            chunk.usage.CopyFrom(_usage(ending.usage))
            for stage, seconds in ending.stages.items():
                chunk.stages_ms[str(stage)] = round(seconds * 1e3, 3)
        if failure is not None:
            chunk.error.CopyFrom(error_of(failure))
        data: bytes = chunk.SerializeToString()
        return data

    def chunk(self, record: Record, global_seq: int) -> pb.PredictChunk | None:
        """None where the record says nothing to a client. `global_seq`: tokens that were said before it."""
        choices = list(self._choices(record))
        if not choices and not record.is_opening:
            return None
        chunk = self._around(record, global_seq)
        chunk.choices.extend(choices)
        if self._wants.running_usage and record.usage is not None:
            chunk.usage.CopyFrom(_usage(record.usage))
        return chunk

    def _around(self, record: Record, global_seq: int) -> pb.PredictChunk:
        heading = self._heading
        return pb.PredictChunk(
            request_id=heading.request_id,
            chunk_seq=record.number,
            token_index=record.parts[0].index if record.parts else 0,
            global_seq=global_seq,
            batch_id=record.step,
            latency_ms=round(record.age_s * 1e3, 3),
            model=heading.model,
            system_fingerprint=heading.fingerprint,
        )

    def _choices(self, record: Record) -> Iterable[pb.Choice]:
        by_choice: dict[int, list[Part]] = {}
        if record.is_opening and self._wants.opening:
            by_choice = {index: [] for index in range(self._num_choices)}
        for part in record.parts:
            by_choice.setdefault(part.choice, []).append(part)
        for index, parts in by_choice.items():
            choice = self._choice(index, parts)
            if record.is_opening and self._wants.opening:
                choice.text = self._wants.opening + choice.text
            if choice.ByteSize() > pb.Choice(index=index).ByteSize():
                yield choice

    def _choice(self, index: int, parts: Sequence[Part]) -> pb.Choice:
        wants = self._wants
        prompt = [part for part in parts if part.is_prompt]
        spoken = [part for part in parts if not part.is_prompt]
        choice = pb.Choice(
            index=index,
            text="".join([part.text for part in (spoken if self._is_chat else parts)]),
            token_ids=[token for part in spoken for token in part.ids],
        )
        finish = next((part.finish for part in reversed(spoken) if part.finish is not None), None)
        # A choice that failed has no reason of its own: the stream's error follows.
        if finish is not None and finish != "error":
            choice.finish_reason = "function_call" if finish == "tool_calls" and wants.legacy_calls else finish
        choice.tool_calls.extend(
            [
                pb.ToolCall(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
                for part in spoken
                for call in part.calls
                if call.name or call.arguments
            ]
        )
        if wants.logprobs:
            choice.logprobs.extend(
                [_logprob(score) for part in (parts if wants.echo else spoken) for score in part.scores]
            )
        if prompt and wants.token_ids:
            choice.prompt_token_ids.extend([token for part in prompt for token in part.ids])
        if prompt and wants.prompt_logprobs:
            choice.prompt_logprobs.extend([_logprob(score) for part in prompt for score in part.scores])
        return choice

    def _count_to(self, number: int) -> None:
        """A reader may begin anywhere."""
        if number != self._number:
            self._said = sum(map(_num_tokens, self._stream.records[:number]))
            self._number = number


def error_of(failure: Failure) -> pb.Error:
    return pb.Error(
        code=failure.code,
        message=failure.message,
        type=type_of(failure.status),
        param=failure.param,
        status=failure.status,
        retry_after_s=failure.retry_after_s,
    )


def _num_tokens(record: Record) -> int:
    return sum([len(part.ids) for part in record.parts if not part.is_prompt])


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
    )


def _logprob(score: Score) -> pb.Logprob:
    return pb.Logprob(
        id=score.id,
        token=score.data,
        logprob=None if score.logprob is None else finite(score.logprob),
        top=[pb.Alternative(id=top.id, token=top.data, logprob=finite(top.logprob)) for top in score.top],
    )
