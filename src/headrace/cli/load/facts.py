"""What a server says of itself before a load: models, ids, how many tokens a word is. Asks; decides nothing."""

from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Struct

from headrace.cli.load.check import Vocabulary
from headrace.cli.load.http import Endpoint, Pool, fetch
from headrace.cli.load.wording import WORDS
from headrace.core.errors import HeadraceError, InvalidInput


class Facts(Struct, frozen=True):
    """`vocabulary` is None where the server does not say."""

    model: str
    vocabulary: Vocabulary | None
    tokens_per_word: float


async def is_ready(pool: Pool, endpoint: Endpoint, timeout_s: float) -> bool:
    """Not while nobody listens or answers, or the server says that it starts. One that knows no /ready is."""
    try:
        status, _ = await fetch(pool, endpoint.head("GET", "/ready", None), timeout_s)
    except HeadraceError as error:
        # Who is not vouched for now will not be later.
        return "SSL" in error.message
    return status != 503


async def ask_facts(pool: Pool, endpoint: Endpoint, key: str | None, model: str) -> Facts:
    """Raises HeadraceError when nobody answers, and InvalidInput when the server refuses the key, the name it was asked by,
    or the model's."""
    status, body = await fetch(pool, endpoint.head("GET", "/v1/models", key))
    if status == 401:
        raise InvalidInput("the server refuses the key: give one with --key or HEADRACE_API_KEY", param="--key")
    if status == 403:
        error = _object(body).get("error")
        why = str(error.get("message", ""))[:200] if isinstance(error, dict) else ""
        raise InvalidInput(f"the server refuses to answer{': ' if why else ''}{why}", param="--url")
    listed = _object(body).get("data") or []
    cards = [card for card in listed if isinstance(card, dict)]
    card = next((card for card in cards if card.get("id") == model), cards[0] if cards else {})
    name = model or str(card.get("id", "default"))
    vocabulary = _vocabulary(await _info(pool, endpoint, key, name)) or _vocabulary(card.get("meta") or card)
    return Facts(name, vocabulary, await _word_size(pool, endpoint, key, name))


async def _info(pool: Pool, endpoint: Endpoint, key: str | None, model: str) -> dict[str, Any]:
    status, body = await fetch(pool, endpoint.head("GET", f"/tokenizer_info?model={quote(model)}", key))
    told = _object(body)
    error = told.get("error")
    if status == 404 and isinstance(error, dict) and error.get("code") == "model_not_found":
        raise InvalidInput(str(error.get("message", "the model is not served"))[:500], param="--model")
    return told if status == 200 else {}


async def _word_size(pool: Pool, endpoint: Endpoint, key: str | None, model: str) -> float:
    """Measured on common words; where the server cannot say, a word counts as a token."""
    body = msgspec.json.encode({"model": model, "prompt": WORDS, "add_special_tokens": False})
    status, reply = await fetch(pool, endpoint.head("POST", "/tokenize", key, len(body)) + body)
    count = _object(reply).get("count") if status == 200 else None
    return max(0.1, count / len(WORDS.split())) if isinstance(count, int) else 1.0


def _vocabulary(said: object) -> Vocabulary | None:
    if not isinstance(said, dict) or not isinstance(said.get("vocab_size"), int):
        return None
    eos: object = None
    for name in ("eos_ids", "eos_token_ids", "eos_token_id", "eos_id"):
        eos = said.get(name) if eos is None else eos
    ids = [eos] if isinstance(eos, int) else eos if isinstance(eos, list) else []
    chance = said.get("eos_probability")
    return Vocabulary(
        size=said["vocab_size"],
        eos_ids=tuple(one for one in ids if isinstance(one, int)),
        eos_probability=float(chance) if isinstance(chance, int | float) else 0.0,
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return {}
    return found if isinstance(found, dict) else {}


def need_vocabulary(facts: Facts) -> Vocabulary:
    if facts.vocabulary is None:
        raise HeadraceError("the server does not say how many ids it has: give --vocab-size (and --eos)")
    return facts.vocabulary
