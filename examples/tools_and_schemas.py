"""A tool call and a reply in a given shape, with OpenAI's client (pip install openai) and a server of this machine.

HEADRACE_API_KEY=$(cat "${HEADRACE_HOME:-$HOME/.local/share/headrace}/key") python examples/tools_and_schemas.py [URL]
"""

import os
import sys

from openai import APIConnectionError, APIStatusError, OpenAI

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city now.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main(url: str) -> None:
    key = os.environ.get("HEADRACE_API_KEY")  # noqa: TID251
    if not key:
        sys.exit("set HEADRACE_API_KEY to a key of the server")
    client = OpenAI(base_url=f"{url.rstrip('/').removesuffix('/v1')}/v1", api_key=key)
    try:
        show(client)
    except APIConnectionError:
        sys.exit(f"nobody answers at {url}")
    except APIStatusError as error:
        sys.exit(error.message)


def show(client: OpenAI) -> None:

    # "required" holds the model to a call whose arguments fit the schema; "auto" leaves it the choice.
    asked = client.chat.completions.create(
        model="default",
        temperature=0.2,
        tools=[WEATHER],
        tool_choice="required",
        messages=[{"role": "user", "content": "What is the weather in Paris, in celsius?"}],
    )
    for call in asked.choices[0].message.tool_calls or []:
        sys.stdout.write(f"{call.function.name}({call.function.arguments})\n")

    shaped = client.chat.completions.create(
        model="default",
        temperature=0.2,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        messages=[{"role": "user", "content": "Describe a person as JSON."}],
    )
    sys.stdout.write(f"{shaped.choices[0].message.content}\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080")
