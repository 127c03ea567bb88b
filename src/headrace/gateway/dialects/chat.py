"""Chat completions, streamed and whole. Owns what of a record goes into a delta, and into a message.

One event per record, whatever number of choices spoke in it: so an event's id is all that a client needs to go on
from it. The first event names the role of every choice.
"""

from collections.abc import Sequence
from itertools import chain

from msgspec import UNSET, UnsetType

from headrace.gateway.dialects.envelope import Enveloped, encode_json, usage_reply
from headrace.gateway.dialects.logprobs import chat_logprobs, prompt_logprobs
from headrace.gateway.errors import StreamFailed
from headrace.gateway.schemas.replies import (
    CallChunk,
    CallReply,
    ChatChoice,
    ChatChunkChoice,
    ChatReply,
    Delta,
    FunctionDelta,
    FunctionReply,
    MessageReply,
)
from headrace.streams.record import CallDelta, Failure, Part, Record, Usage

_ROLE = "assistant"


class ChatDialect(Enveloped, frozen=True):
    kind = "chat.completion.chunk"
    around = (b',"delta":{"content":', b'},"logprobs":null,"finish_reason":null}')

    def frame(self, record: Record) -> bytes:
        parts = record.parts
        if self.is_plain and len(parts) == 1 and record.ending is None and record.number - record.merged > 1:
            part = parts[0]
            if part.finish is None and not part.calls and not part.is_prompt:
                return self.envelope.text(record.number, part.choice, part.text)
        data = self._chunk(record)
        return data if record.ending is None else data + self.envelope.ending(record, record.ending)

    def reply(self, records: Sequence[Record]) -> ChatReply:
        """The whole body, from all records of a stream that ended well."""
        heading, wants = self.heading, self.wants
        said: list[list[Part]] = [[] for _ in range(self.num_choices)]
        prompt: list[Part] = []
        usage = Usage()
        for record in records:
            for part in record.parts:
                if not part.is_prompt:
                    said[part.choice].append(part)
                elif part.choice == 0:
                    prompt.append(part)
            if record.ending is not None:
                usage = record.ending.usage
        return ChatReply(
            id=heading.id,
            created=heading.created,
            model=heading.model,
            choices=[self._choice(index, parts) for index, parts in enumerate(said)],
            usage=usage_reply(usage),
            system_fingerprint=heading.fingerprint or None,
            service_tier=UNSET if heading.service_tier is None else heading.service_tier,
            prompt_logprobs=prompt_logprobs(chain.from_iterable(part.scores for part in prompt))
            if wants.prompt_logprobs
            else UNSET,
            prompt_token_ids=[token for part in prompt for token in part.ids] if wants.token_ids else UNSET,
        )

    def _chunk(self, record: Record) -> bytes:
        by_choice = {part.choice: part for part in record.parts if not part.is_prompt}
        choices: list[ChatChunkChoice] = []
        if record.is_opening and (record.parts or record.ending is None):
            choices = [
                self._chunk_choice(by_choice.get(index, Part(index)), is_first=True)
                for index in range(self.num_choices)
            ]
        else:
            choices = [self._chunk_choice(part, is_first=False) for part in by_choice.values() if self._speaks(part)]
        if not choices:
            return b""
        extra = b""
        if self.wants.token_ids:
            ids = [token for part in record.parts if part.is_prompt and part.choice == 0 for token in part.ids]
            extra = b',"prompt_token_ids":' + encode_json(ids) if ids else b""
        return self.envelope.chunk(record, b",".join(map(encode_json, choices)), extra)

    def _speaks(self, part: Part) -> bool:
        """It has something that this client is told."""
        wants = self.wants
        return bool(
            part.text
            or part.finish is not None
            or any(call.name or call.arguments for call in part.calls)
            or (wants.logprobs and part.scores)
            or (wants.token_ids and part.ids)
        )

    def _chunk_choice(self, part: Part, *, is_first: bool) -> ChatChunkChoice:
        wants = self.wants
        calls, function_call = self._call_chunks(part.calls)
        content: str | UnsetType | None = part.text or UNSET
        if is_first:
            content = wants.opening + part.text
            if not content and part.calls:
                content = None
        return ChatChunkChoice(
            index=part.choice,
            delta=Delta(
                role=_ROLE if is_first else UNSET, content=content, tool_calls=calls, function_call=function_call
            ),
            logprobs=chat_logprobs(part.scores) if wants.logprobs and part.scores else None,
            finish_reason=self._finish(part.finish),
            token_ids=list(part.ids) if wants.token_ids else UNSET,
        )

    def _call_chunks(self, calls: Sequence[CallDelta]) -> tuple[list[CallChunk] | UnsetType, FunctionDelta | UnsetType]:
        told = [call for call in calls if call.name or call.arguments]
        if not told:
            return UNSET, UNSET
        if not self.wants.legacy_calls:
            return [_call_chunk(call) for call in told], UNSET
        # The old form has one call and no index: what is beyond the first is not told.
        first = [call for call in told if call.index == 0]
        return UNSET, FunctionDelta(
            name="".join([call.name for call in first]) or UNSET,
            arguments="".join([call.arguments for call in first]),
        ) if first else UNSET

    def _finish(self, finish: str | None) -> str | None:
        """A choice that failed has no reason of its own: the stream's error follows."""
        if finish == "error":
            return None
        return "function_call" if finish == "tool_calls" and self.wants.legacy_calls else finish

    def _choice(self, index: int, parts: Sequence[Part]) -> ChatChoice:
        wants = self.wants
        finish = "error"
        texts: list[str] = []
        deltas: list[CallDelta] = []
        for part in parts:
            texts.append(part.text)
            deltas += part.calls
            if part.finish is not None:
                finish = part.finish
        if finish == "error":
            raise StreamFailed(Failure("internal_error", "A choice of this request failed."))
        calls = _whole_calls(deltas) if deltas else []
        if finish == "tool_calls" and not calls:
            finish = "stop"
        text = wants.opening + (_with_broken("".join(texts), parts[0].offset, deltas) if deltas else "".join(texts))
        content = None if calls and not text else text
        if wants.legacy_calls:
            message = MessageReply(content=content, function_call=calls[0].function if calls else UNSET)
        else:
            message = MessageReply(content=content, tool_calls=calls or UNSET)
        return ChatChoice(
            index=index,
            message=message,
            finish_reason=self._finish(finish) or finish,
            logprobs=chat_logprobs(chain.from_iterable(part.scores for part in parts)) if wants.logprobs else None,
            token_ids=[token for part in parts for token in part.ids] if wants.token_ids else UNSET,
        )


def _call_chunk(call: CallDelta) -> CallChunk:
    """A call is named once; a name may come without arguments, and then they are an empty text."""
    if not call.name:
        return CallChunk(index=call.index, function=FunctionDelta(arguments=call.arguments))
    return CallChunk(
        index=call.index,
        id=call.id,
        type="function",
        function=FunctionDelta(name=call.name, arguments=call.arguments),
    )


def _with_broken(text: str, before: int, deltas: Sequence[CallDelta]) -> str:
    """The text of a choice, from the character `before` on, and, where they were written, its calls that stopped being ones."""
    pieces, told = [], 0
    for delta in deltas:
        if delta.broken_text:
            place = delta.place - before
            pieces += [text[told:place], delta.broken_text]
            told = place
    return "".join([*pieces, text[told:]])


def _whole_calls(deltas: Sequence[CallDelta]) -> list[CallReply]:
    """Calls by index, without those that stopped being one."""
    by_index: dict[int, list[CallDelta]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return [
        CallReply(
            "".join([delta.id for delta in found]),
            FunctionReply("".join([delta.name for delta in found]), "".join([delta.arguments for delta in found])),
        )
        for _, found in sorted(by_index.items())
        if not any(delta.broken_text for delta in found)
    ]
