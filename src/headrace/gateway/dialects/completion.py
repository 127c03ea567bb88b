"""Text completions, streamed and whole. Owns what of a record goes into a choice of text.

One event per record, as in chat. What is told of a prompt (an echo, its log-probabilities) comes before the reply.
"""

from collections.abc import Sequence
from itertools import chain

from msgspec import UNSET

from headrace.gateway.dialects.envelope import Enveloped, encode_json, usage_reply
from headrace.gateway.dialects.logprobs import CompletionScores, prompt_logprobs
from headrace.gateway.errors import StreamFailed
from headrace.gateway.schemas.replies import CompletionChoice, CompletionLogprobs, CompletionReply
from headrace.streams.record import Failure, Part, Record, Usage


class CompletionDialect(Enveloped, frozen=True):
    kind = "text_completion"
    around = (b',"text":', b',"logprobs":null,"finish_reason":null}')

    def frame(self, record: Record) -> bytes:
        parts = record.parts
        if self.is_plain and len(parts) == 1 and record.ending is None:
            part = parts[0]
            if part.finish is None and not part.is_prompt:
                return self.envelope.text(record.number, part.choice, part.text)
        data = self._chunk(record)
        return data if record.ending is None else data + self.envelope.ending(record, record.ending)

    def reply(self, records: Sequence[Record]) -> CompletionReply:
        """The whole body, from all records of a stream that ended well."""
        said: list[list[Part]] = [[] for _ in range(self.num_choices)]
        usage = Usage()
        for record in records:
            for part in record.parts:
                said[part.choice].append(part)
            if record.ending is not None:
                usage = record.ending.usage
        heading = self.heading
        return CompletionReply(
            id=heading.id,
            created=heading.created,
            model=heading.model,
            choices=[self._whole_choice(index, parts) for index, parts in enumerate(said)],
            usage=usage_reply(usage),
            system_fingerprint=heading.fingerprint or None,
        )

    def _chunk(self, record: Record) -> bytes:
        by_choice: dict[int, list[Part]] = {}
        for part in record.parts:
            if self._speaks(part):
                by_choice.setdefault(part.choice, []).append(part)
        if not by_choice:
            return b""
        choices = [encode_json(self._choice(index, parts)) for index, parts in by_choice.items()]
        return self.envelope.chunk(record, b",".join(choices))

    def _speaks(self, part: Part) -> bool:
        """It has something that this client is told."""
        wants = self.wants
        return bool(
            part.text
            or part.finish is not None
            or (part.scores and (wants.prompt_logprobs if part.is_prompt else wants.logprobs))
            or (part.scores and wants.echo and wants.logprobs)
            or (wants.token_ids and part.ids)
        )

    def _whole_choice(self, index: int, parts: Sequence[Part]) -> CompletionChoice:
        if not any(part.finish not in (None, "error") for part in parts):
            raise StreamFailed(Failure("internal_error", "A choice of this request failed."))
        return self._choice(index, parts)

    def _choice(self, index: int, parts: Sequence[Part]) -> CompletionChoice:
        wants = self.wants
        prompt = [part for part in parts if part.is_prompt]
        spoken = [part for part in parts if not part.is_prompt]
        finish = next((part.finish for part in reversed(parts) if part.finish is not None), None)
        return CompletionChoice(
            index=index,
            text="".join([part.text for part in parts]),
            logprobs=self._logprobs(parts if wants.echo else spoken) if wants.logprobs else None,
            finish_reason=None if finish == "error" else finish,
            token_ids=[token for part in spoken for token in part.ids] if wants.token_ids else UNSET,
            prompt_token_ids=[token for part in prompt for token in part.ids] if wants.token_ids and prompt else UNSET,
            prompt_logprobs=prompt_logprobs(chain.from_iterable(part.scores for part in prompt))
            if wants.prompt_logprobs and prompt
            else UNSET,
        )

    def _logprobs(self, parts: Sequence[Part]) -> CompletionLogprobs:
        gathered = CompletionScores()
        for part in parts:
            gathered.add(part)
        return gathered.found
