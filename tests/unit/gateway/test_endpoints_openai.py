"""The official client against the application, without a socket: a worker says what each story puts into its mouth."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import httpx2
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from headrace.accounts.keys import KeyRing
from headrace.core.config import GatewayConfig
from headrace.core.event import Outcome
from headrace.core.request import Tier
from headrace.gateway.app import build_app
from headrace.gateway.dialects.completion import CompletionDialect
from headrace.gateway.schemas.replies import CompletionReply
from headrace.streams.record import Record
from headrace.telemetry.metrics import Metrics
from headrace.text.limited import LimitedPool
from tests.unit.gateway.stub import KEY, METRICS_KEY, TENANTS, turns
from tests.unit.serving.scripted import ScriptedRig, ScriptedWorker

T = TypeVar("T")
USER: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "strict": True, "parameters": {"type": "object", "additionalProperties": False}},
}


@pytest.fixture(scope="module")
def pool() -> Iterator[LimitedPool]:
    with LimitedPool() as pool:
        yield pool


class World:
    """One application over one scripted worker."""

    def __init__(self, pool: LimitedPool) -> None:
        self.rig = ScriptedRig(pool, aliases=("nick",))
        metrics = Metrics(["m"], [tenant.name for tenant in TENANTS])
        self.app = build_app(self.rig.service, KeyRing(TENANTS), GatewayConfig(), metrics, self.rig.clock)
        transport = httpx2.ASGITransport(app=cast(Any, self.app))
        self.http = httpx2.AsyncClient(transport=transport, base_url="http://localhost")
        self.client = self.as_tenant(KEY)

    @property
    def worker(self) -> ScriptedWorker:
        return self.rig.worker

    def as_tenant(self, key: str) -> AsyncOpenAI:
        return AsyncOpenAI(api_key=key, base_url="http://localhost/v1", http_client=self.http, max_retries=0)

    async def during(self, call: Awaitable[T], say: Callable[[ScriptedWorker], object], *, sequences: int = 1) -> T:
        """Make the call; when the worker has its sequences, say this."""
        task = asyncio.ensure_future(call)
        while len(self.rig.worker.requests) < sequences or self.rig.service.num_open == 0:
            assert not task.done(), task.result()
            await asyncio.sleep(0.001)
        say(self.rig.worker)
        return await task

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = await self.http.post(path, json=body, headers={"authorization": f"Bearer {KEY}"})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


def play(pool: LimitedPool, story: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        world = World(pool)
        try:
            await asyncio.wait_for(story(world), 60)
            assert world.rig.service.num_open == 0
        finally:
            await world.http.aclose()
            world.rig.model.close()

    asyncio.run(run())


def test_a_chat_in_one_piece(pool: LimitedPool) -> None:
    async def story(world: World) -> None:
        call = world.client.chat.completions.create(model="m", messages=USER, seed=7, extra_body={"top_k": 5})
        reply = await world.during(call, lambda worker: worker.say(b"Hello", end="stop"))
        assert reply.choices[0].message.content == "Hello" and reply.choices[0].finish_reason == "stop"
        assert reply.usage is not None and reply.usage.completion_tokens == 6
        assert reply.id.startswith("chatcmpl-") and reply.system_fingerprint == "fp" and reply.created > 1_700_000_000
        request = world.worker.requests[0]
        assert (request.sampling.seed, request.sampling.top_k, request.tier) == (7, 5, Tier.PLUS)
        assert "<|im_start|>user\nhi<|im_end|>" in world.rig.prompt()

    play(pool, story)


@pytest.mark.parametrize("chosen", [None, "my-story", "req_mine", "chatcmpl-mine"])
@pytest.mark.parametrize("is_chat", [True, False])
def test_a_request_is_explained_by_its_own_id_and_by_that_of_its_reply_to_its_tenant_alone(
    pool: LimitedPool, chosen: str | None, is_chat: bool
) -> None:
    async def story(world: World) -> None:
        fields: Any = {"model": "m", "extra_headers": {} if chosen is None else {"x-request-id": chosen}}
        call: Any = world.client.completions.create(prompt="x", **fields)
        if is_chat:
            call.close()
            call = world.client.chat.completions.create(messages=USER, **fields)
        reply = await world.during(call, lambda worker: worker.say(b"Hello", end="stop"))
        for key, found in ((KEY, True), (METRICS_KEY, False)):
            for id in (reply._request_id, reply.id):
                path, headers = f"/v1/requests/{id}/explain", {"authorization": f"Bearer {key}"}
                answer = await world.http.get(path, headers=headers)
                assert answer.status_code == (200 if found else 404)
                if found:
                    assert answer.json()["request_id"] == reply._request_id == (chosen or reply._request_id)
                else:
                    none = await world.http.get("/v1/requests/none/explain", headers=headers)
                    assert answer.json() == none.json()

    play(pool, story)


def test_an_explanation_is_told_to_the_microsecond(pool: LimitedPool) -> None:
    async def story(world: World) -> None:
        def late(worker: ScriptedWorker) -> None:
            world.rig.clock.time_s += 1 / 3
            worker.say(b"Hello", end="stop")

        call = world.client.chat.completions.create(model="m", messages=USER)
        reply = await world.during(call, late)
        headers = {"authorization": f"Bearer {KEY}"}
        told = (await world.http.get(f"/v1/requests/{reply.id}/explain", headers=headers)).json()
        assert told["total_s"] == told["ttft_s"] == 0.333333 and 0.333333 in told["stages"].values()

    play(pool, story)


def test_a_whole_answer_that_is_cut_off_says_that_it_was_being_decoded(pool: LimitedPool) -> None:
    async def story(world: World) -> None:
        def cut(worker: ScriptedWorker) -> None:
            worker.say(b"x")
            world.rig.clock.time_s += 30.0
            world.app.close_streams()

        async def part() -> None:
            """The worker says that it is over when the answer is out."""
            while not world.worker.aborts:
                await asyncio.sleep(0.001)
            await turns(100)
            world.worker.end(0, Outcome.ABORTED, "overloaded")

        parting = asyncio.create_task(part())
        headers = {"authorization": f"Bearer {KEY}"}
        call = world.http.post("/v1/chat/completions", json={"model": "m", "messages": USER}, headers=headers)
        answer = await world.during(call, cut)
        await parting
        assert answer.status_code == 503
        assert "decode;dur=30000.000" in answer.headers["server-timing"]
        assert "transfer;dur=0.000" in answer.headers["server-timing"]

    play(pool, story)


def test_a_chat_in_a_stream_with_usage(pool: LimitedPool) -> None:
    async def story(world: World) -> None:
        call = world.client.chat.completions.create(
            model="m", messages=USER, stream=True, n=2, stream_options={"include_usage": True}
        )

        def say(worker: ScriptedWorker) -> None:
            for token in b"ab":
                worker.step({0: token, 1: token + 2})
            worker.step({0: ord("!"), 1: ord("?")}, "length")

        chunks = [chunk async for chunk in await world.during(call, say, sequences=2)]
        texts = ["", ""]
        for chunk in chunks:
            assert chunk.system_fingerprint == "fp"
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == ["ab!", "cd?"]
        assert [choice.delta.role for choice in chunks[0].choices] == ["assistant"] * 2
        assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6
        assert all(chunk.usage is None for chunk in chunks[:-1])

    play(pool, story)


def test_a_tool_call_streamed_and_put_together_by_the_client(pool: LimitedPool) -> None:
    async def story(world: World) -> None:
        said = b'<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
        call = world.client.chat.completions.create(model="m", messages=USER, tools=[TOOL], stream=True)
        stream = await world.during(call, lambda worker: worker.say(said, end="stop"))
        name = arguments = ""
        finish = None
        async for chunk in stream:
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
                for delta in choice.delta.tool_calls or ():
                    assert delta.function is not None
                    name += delta.function.name or ""
                    arguments += delta.function.arguments or ""
        assert (name, arguments, finish) == ("look", '{"at": 1}', "tool_calls")

    play(pool, story)


class Cat(BaseModel):
    name: str
    lives: int


def test_the_client_s_own_parsing_of_streams_and_structures(pool: LimitedPool) -> None:
    async def story(world: World) -> None:
        said = b'{"name": "Tom", "lives": 9}'
        call = world.client.chat.completions.parse(model="m", messages=USER, response_format=Cat)
        parsed = await world.during(call, lambda worker: worker.say(said, end="stop"))
        assert parsed.choices[0].message.parsed == Cat(name="Tom", lives=9)
        grammar = world.worker.grammars[0]
        assert grammar is not None and grammar.kind == "json_schema" and "lives" in grammar.source

        async def gather() -> Any:
            async with world.client.chat.completions.stream(model="m", messages=USER, tools=[TOOL], n=2) as stream:
                return await stream.get_final_completion()

        def say(worker: ScriptedWorker) -> None:
            worker.say(b"Well", 1)
            worker.say(b'<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>', 2, end="stop")
            worker.say(b" then", 1, end="stop")

        final = await world.during(gather(), say, sequences=3)
        first, second = final.choices
        assert (first.message.role, first.message.content, first.finish_reason) == ("assistant", "Well then", "stop")
        assert second.message.tool_calls[0].function.arguments == '{"at": 1}'
        assert second.message.role == "assistant" and second.finish_reason == "tool_calls"

    play(pool, story)


def test_completions_of_two_prompts_with_an_echo(pool: LimitedPool) -> None:
    async def story(world: World) -> None:
        call = world.client.completions.create(model="m", prompt=["ab", "cd"], echo=True, max_tokens=1)

        def say(worker: ScriptedWorker) -> None:
            worker.step({1: ord("y")}, "length")
            worker.step({0: ord("x")}, "length")

        reply = await world.during(call, say, sequences=2)
        assert [(choice.index, choice.text) for choice in reply.choices] == [(0, "abx"), (1, "cdy")]
        assert reply.id.startswith("cmpl-") and reply.usage is not None and reply.usage.completion_tokens == 2

    play(pool, story)


def test_what_is_refused_names_the_field_and_runs_nothing(pool: LimitedPool) -> None:
    async def story(world: World) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await world.client.chat.completions.create(model="m", messages=USER, temperature=3)
        assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError) as missing:
            await world.client.completions.create(model="other", prompt="x")
        assert missing.value.code == "model_not_found" and "m" in missing.value.message
        headers = {"x-headrace-deadline-ms": "soon"}
        with pytest.raises(openai.BadRequestError) as late:
            await world.client.chat.completions.create(model="m", messages=USER, extra_headers=headers)
        assert late.value.param == "x-headrace-deadline-ms"
        assert not world.worker.requests

    play(pool, story)


def test_a_stream_that_breaks_is_an_error_for_the_client(pool: LimitedPool) -> None:
    async def story(world: World) -> None:
        call = world.client.chat.completions.create(model="m", messages=USER, stream=True)

        def say(worker: ScriptedWorker) -> None:
            worker.say(b"Hel")
            worker.end(0, Outcome.FAILED, "row_failed", "A row failed.")

        stream = await world.during(call, say)
        said: list[str] = []

        async def read() -> None:
            async for chunk in stream:
                said.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError):
            await read()
        assert "".join(said) == "Hel"

    play(pool, story)


def test_priority_lowers_a_tier_and_never_raises_it(pool: LimitedPool) -> None:
    async def story(world: World) -> None:
        wanted = [(KEY, "batch", Tier.BATCH), (KEY, "enterprise", Tier.PLUS), (METRICS_KEY, "enterprise", Tier.FREE)]
        for place, (key, priority, _) in enumerate(wanted):
            call = world.as_tenant(key).chat.completions.create(
                model="m", messages=USER, extra_body={"priority": priority, "tenant": "first"}
            )
            await world.during(call, partial(ScriptedWorker.say, data=b"x", key=place, end="stop"), sequences=place + 1)
        assert [request.tier for request in world.worker.requests.values()] == [tier for _, _, tier in wanted]

    play(pool, story)


def test_who_is_refused_is_counted_under_the_model_that_was_asked_for(pool: LimitedPool) -> None:
    async def story(world: World) -> None:
        headers = {"authorization": f"Bearer {KEY}"}

        async def refused(path: str, model: str, **body: Any) -> int:
            return (await world.http.post(path, json={"model": model, **body}, headers=headers)).status_code

        world.worker.is_ready = False
        assert await refused("/v1/chat/completions", "m", messages=USER) == 503
        assert await refused("/v1/chat/completions", "nick", messages=USER) == 503
        assert await refused("/v1/chat/completions", "another", messages=USER) == 404
        assert await refused("/v1/completions", "nick", prompt="a" * 5000) == 400
        assert await refused("/detokenize", "nick", tokens=[9999]) == 400
        text = (await world.http.get("/metrics", headers={"authorization": f"Bearer {METRICS_KEY}"})).text
        lines = [line for line in text.splitlines() if line.startswith("headrace_requests_total{")]
        counted = 'headrace_requests_total{{model="{}",route="{}",status="{}",tenant="first"}} {}'
        assert sorted(lines) == [
            counted.format("", "/v1/chat/completions", "4xx", 1.0),
            counted.format("m", "/detokenize", "4xx", 1.0),
            counted.format("m", "/v1/chat/completions", "5xx", 2.0),
            counted.format("m", "/v1/completions", "4xx", 1.0),
        ]
        # How soon they were sent away is no figure of the model's.
        assert 'headrace_request_seconds_count{model="m"' not in text

    play(pool, story)


def test_the_service_s_refusals_blame_the_client_s_field(pool: LimitedPool) -> None:
    async def story(world: World) -> None:
        async def blame(path: str, **body: Any) -> str:
            fields = {"model": "m", "messages": USER, "prompt": "x"} | body
            answer = await world.http.post(path, json=fields, headers={"authorization": f"Bearer {KEY}"})
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            found: str = error["param"]
            assert not error["message"].startswith(("stop_ids", "allowed_ids")), error
            return found

        chat, text = "/v1/chat/completions", "/v1/completions"
        assert await blame(chat, stop_token_ids=[10**6]) == "stop_token_ids"
        assert await blame(chat, allowed_token_ids=[10**6]) == "allowed_token_ids"
        ends = {"allowed_token_ids": [28], "stop_token_ids": [28], "min_tokens": 2}
        assert await blame(text, **ends) == await blame(chat, **ends) == "allowed_token_ids"
        assert await blame(chat, guided_regex="(") == "guided_regex"
        assert await blame(chat, response_format={"type": "regex", "regex": "("}) == "response_format.regex"
        assert await blame(chat, messages=[{"role": "user", "content": "x" * 5000}]) == "messages"
        assert await blame(text, prompt="x" * 5000) == "prompt"
        assert await blame(text, prompt="x" * 5000, truncate_prompt_tokens=4096) == "prompt"
        assert await blame(chat, n=100, logprobs=True, top_logprobs=20) == "logprobs"
        assert await blame(text, prompt="x" * 4000, n=100, prompt_logprobs=20) == "prompt_logprobs"
        assert not world.worker.requests

    play(pool, story)


def test_models_and_their_tokenisers(pool: LimitedPool) -> None:
    async def story(world: World) -> None:
        (model,) = (await world.client.models.list()).data
        assert (model.id, model.object) == ("m", "model")
        assert (await world.client.models.retrieve("m")).model_dump()["max_model_len"] == 4096
        with pytest.raises(openai.NotFoundError):
            await world.client.models.retrieve("other/one")
        found = await world.post("/tokenize", prompt="ab", return_token_strs=True)
        assert (found["tokens"], found["count"], found["max_model_len"]) == ([97, 98], 2, 4096)
        assert found["token_strs"] == ["a", "b"]
        chat = await world.post("/tokenize", model="m", messages=USER)
        assert chat["count"] > 4
        assert (await world.post("/detokenize", tokens=[97, 98])) == {"prompt": "ab"}
        refused = await world.http.post(
            "/detokenize", json={"tokens": [97, 10**6]}, headers={"authorization": f"Bearer {KEY}"}
        )
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tokens[1]"
        info = (await world.http.get("/tokenizer_info", headers={"authorization": f"Bearer {KEY}"})).json()
        assert info["model"] == "m" and info["has_chat_template"] and "<|im_end|>" in info["special_tokens"]

    play(pool, story)


def test_what_is_only_counted_is_bounded_as_well(pool: LimitedPool) -> None:
    async def story(world: World) -> None:
        async def refusal(path: str, **body: Any) -> str:
            answer = await world.http.post(path, json=body, headers={"authorization": f"Bearer {KEY}"})
            assert answer.status_code == 400, answer.text
            found: str = answer.json()["error"]["param"]
            return found

        most = 4 * 4096
        found = await world.post("/tokenize", prompt="ab" * (most // 2), return_token_strs=True)
        assert found["count"] == len(found["token_strs"]) == most
        assert await refusal("/tokenize", prompt="a" * (most + 1)) == "prompt"
        assert await refusal("/tokenize", prompt="a" * (1 << 20), add_special_tokens=False) == "prompt"
        assert await refusal("/tokenize", messages=[{"role": "user", "content": "a" * most}]) == "prompt"
        assert len((await world.post("/detokenize", tokens=[97] * most))["prompt"]) == most
        assert await refusal("/detokenize", tokens=[97] * (most + 1)) == "tokens"

    play(pool, story)


def test_only_the_end_of_a_long_prompt_is_read_where_only_that_is_wanted(pool: LimitedPool) -> None:
    async def story(world: World) -> None:
        text = "".join(chr(97 + place % 26) for place in range(1 << 20))
        call = world.client.completions.create(
            model="m", prompt=text, echo=True, extra_body={"truncate_prompt_tokens": 30}
        )
        reply = await world.during(call, lambda worker: worker.say(b"!", end="length"))
        assert world.rig.prompt() == text[-30:] and reply.choices[0].text == text[-30:] + "!"

    play(pool, story)


def test_a_prompt_is_cut_to_what_the_context_takes_beside_the_reply(pool: LimitedPool) -> None:
    async def story(world: World) -> None:
        text = "".join(chr(97 + place % 26) for place in range(5000))
        fits = {"truncate_prompt_tokens": -1}
        prompts: list[str | list[int]] = [text, [ord(letter) for letter in text], "short"]
        for place, prompt in enumerate(prompts):
            call = world.client.completions.create(model="m", prompt=prompt, max_tokens=96, extra_body=fits)
            await world.during(call, partial(ScriptedWorker.say, data=b"x", key=place, end="stop"), sequences=place + 1)
        assert [world.rig.prompt(key) for key in range(3)] == [text[-4000:], text[-4000:], "short"]
        chat = world.client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": text}], extra_body=fits
        )
        await world.during(chat, partial(ScriptedWorker.say, data=b"x", key=3, end="stop"), sequences=4)
        assert len(world.worker.requests[3].prompt_ids) == 4095

    play(pool, story)


def test_a_large_reply_is_worded_beside_the_loop(pool: LimitedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    word = CompletionDialect.reply

    def noted(self: CompletionDialect, records: Sequence[Record]) -> CompletionReply:
        threads.append(threading.get_ident())
        return word(self, records)

    async def story(world: World) -> None:
        for place, size in enumerate((4, 1000)):
            call = world.client.completions.create(model="m", prompt=[97] * size, echo=True, logprobs=2)
            say = partial(ScriptedWorker.say, data=b"!", key=place, end="length")
            reply = await world.during(call, say, sequences=place + 1)
            assert reply.choices[0].text == "a" * size + "!"
        small, large = threads
        assert small == threading.get_ident() and large != small

    monkeypatch.setattr(CompletionDialect, "reply", noted)
    play(pool, story)
