"""What a server says of itself before the load, and what is said where it does not answer."""

import asyncio

import pytest

from headrace.cli.load.facts import ask_facts
from headrace.cli.load.http import Pool
from headrace.core.errors import InvalidInput
from tests.unit.cli.load.stub import Ask, serving


@pytest.mark.parametrize(
    ("status", "body", "param", "said"),
    [
        (401, {"error": {"message": "No."}}, "--key", "the server refuses the key: give one"),
        (403, {"error": {"message": "Not to that Host."}}, "--url", "the server refuses to answer: Not to that Host."),
        (403, ["?"], "--url", "the server refuses to answer"),
        (
            404,
            {"error": {"code": "model_not_found", "message": "the model 'm' is not served here"}},
            "--model",
            "the model 'm' is not served here",
        ),
    ],
)
def test_who_is_refused_hears_why(status: int, body: object, param: str, said: str) -> None:
    async def refuse(ask: Ask) -> None:
        ask.whole(body, status)

    async def story() -> None:
        async with serving(refuse) as server:
            pool = Pool(asyncio.get_running_loop(), server.endpoint)
            await pool.start()
            with pytest.raises(InvalidInput) as refused:
                await ask_facts(pool, server.endpoint, "sk-wrong-0123456789", "")
            assert refused.value.param == param and refused.value.message.startswith(said)
            await pool.close()

    asyncio.run(story())
