"""A pydantic-ai agent over this server: a tool that is called, and output of a type.

Neither the fake nor a model of 135M decides well by itself when to call what. Output of a type makes every turn a
forced call or a constrained reply, and that is what is tested.
"""

import asyncio
from typing import Literal, TypeVar

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ModelMessage, ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from tests.api.live_server import LiveServer

T = TypeVar("T")


class Answer(BaseModel):
    city: Literal["Paris", "Rome", "Oslo"]
    sunny: bool


SETTINGS = ModelSettings(max_tokens=1500, temperature=0.0, parallel_tool_calls=False)


def model_of(server: LiveServer) -> OpenAIChatModel:
    return OpenAIChatModel("default", provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key=server.key))


def ask(server: LiveServer, agent: Agent[object, Answer], **settings: int) -> tuple[Answer, list[ModelMessage]]:
    async def run() -> tuple[Answer, list[ModelMessage]]:
        # Its connections belong to a loop, so each has a model of its own.
        async with model_of(server) as model:
            wanted = ModelSettings(**{**SETTINGS, **settings})
            result = await agent.run("Which city is sunny?", model=model, model_settings=wanted)
        return result.output, result.all_messages()

    return asyncio.run(run())


def parts_of(messages: list[ModelMessage], kind: type[T]) -> list[T]:
    return [part for message in messages for part in message.parts if isinstance(part, kind)]


def test_output_of_a_type_comes_as_a_forced_call(fake_server: LiveServer) -> None:
    agent = Agent(output_type=ToolOutput(Answer, name="answer"))
    found, messages = ask(fake_server, agent)
    assert isinstance(found, Answer)
    (call,) = parts_of(messages, ToolCallPart)
    assert call.tool_name == "answer" and Answer.model_validate(call.args_as_dict()) == found


def test_output_of_a_type_comes_as_a_constrained_reply(fake_server: LiveServer) -> None:
    found, messages = ask(fake_server, Agent(output_type=NativeOutput(Answer)))
    assert isinstance(found, Answer) and len(messages) == 2 and not parts_of(messages, ToolCallPart)


def test_an_agent_calls_its_tool_and_goes_on_with_what_it_said(fake_server: LiveServer) -> None:
    agent = Agent(output_type=ToolOutput(Answer, name="Answer"))
    asked: list[str] = []

    @agent.tool_plain  # type: ignore[untyped-decorator]
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        asked.append(city)
        return f"sunny in {city}"

    # In each turn the fake must call one of the two, and it takes `weather` in about one of ten: the seed decides.
    for seed in range(60):
        found, messages = ask(fake_server, agent, seed=seed)
        if asked:
            break
    assert asked and isinstance(found, Answer)
    assert [part.tool_name for part in parts_of(messages, ToolCallPart)] == ["weather"] * len(asked) + ["Answer"]
    returned = [part.content for part in parts_of(messages, ToolReturnPart) if part.tool_name == "weather"]
    assert returned == [f"sunny in {city}" for city in asked]
