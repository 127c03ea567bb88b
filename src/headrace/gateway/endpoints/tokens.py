"""POST /tokenize and /detokenize, GET /tokenizer_info: the text side of a model, without generating."""

import msgspec

from headrace.core.errors import InvalidInput, ModelNotFound
from headrace.gateway.exchange import Exchange
from headrace.gateway.routes import Access, Route
from headrace.gateway.schemas.tokens import (
    DetokenizeBody,
    DetokenizeReply,
    TokenizeBody,
    TokenizeReply,
    TokenizerReply,
    tokenize_ask,
)
from headrace.serving.model_text import ModelText
from headrace.serving.service import Service
from headrace.text.tokenizer import Tokenizer

# More are worded in a thread.
LARGE_TOKENS = 2048


async def tokenize(exchange: Exchange, service: Service) -> None:
    """The ids that a prompt or a conversation would have, of up to four contexts. `add_special_tokens` false leaves out
    what the model expects around a bare text."""
    body = await exchange.parse(TokenizeBody)
    model = _model(exchange, service, body.model)
    ids = await service.tokenize(model.name, tokenize_ask(body), framed=body.add_special_tokens is not False)
    names = model.tokenizer if body.return_token_strs else None
    most = service.card(model).context_len
    if len(ids) > LARGE_TOKENS:
        await exchange.reply(await exchange.context.beside(_told, ids, most, names))
    else:
        await exchange.reply(_told(ids, most, names))


async def detokenize(exchange: Exchange, service: Service) -> None:
    """The text of token ids, without control tokens."""
    body = await exchange.parse(DetokenizeBody)
    model = _model(exchange, service, body.model)
    most, size = model.most_told_tokens, model.tokenizer.vocab_size
    if len(body.tokens) > most:
        raise InvalidInput(f"tokens must hold at most {most} ids", param="tokens")
    if body.tokens and max(body.tokens) >= size:
        place = next(place for place, token in enumerate(body.tokens) if token >= size)
        raise InvalidInput(f"tokens[{place}] is outside the vocabulary of {size} tokens", param=f"tokens[{place}]")
    if len(body.tokens) > LARGE_TOKENS:
        text = await exchange.context.beside(model.tokenizer.decode, body.tokens)
    else:
        text = model.tokenizer.decode(body.tokens)
    await exchange.reply(DetokenizeReply(text))


async def tokenizer_info(exchange: Exchange, service: Service) -> None:
    """What is known of a model's tokeniser; `?model=` names one, else it is the first."""
    model = _model(exchange, service, exchange.query.get("model"))
    tokenizer = model.tokenizer
    await exchange.reply(
        TokenizerReply(
            model=model.name,
            hash=tokenizer.hash,
            vocab_size=tokenizer.vocab_size,
            max_model_len=service.card(model).context_len,
            eos_token_ids=list(model.eos_ids),
            special_tokens=tokenizer.special_ids,
            has_chat_template=model.template is not None,
            tool_syntax=model.syntax,
        )
    )


def _told(ids: list[int], most: int, names: Tokenizer | None) -> bytes:
    strings = None if names is None else [names.token_bytes(token).decode(errors="replace") for token in ids]
    return msgspec.json.encode(TokenizeReply(ids, len(ids), most, strings))


def _model(exchange: Exchange, service: Service, name: str | None) -> ModelText:
    if name is None:
        cards = service.models()
        if not cards:
            raise ModelNotFound("No model is served here.", param="model")
        name = cards[0].name
    model = service.model(name)
    exchange.model = model.name
    return model


ROUTES = (
    Route("POST", "/tokenize", Access.KEY, tokenize, "Text to token ids", body=TokenizeBody, reply=TokenizeReply),
    Route(
        "POST", "/detokenize", Access.KEY, detokenize, "Token ids to text", body=DetokenizeBody, reply=DetokenizeReply
    ),
    Route("GET", "/tokenizer_info", Access.KEY, tokenizer_info, "What a tokeniser is", reply=TokenizerReply),
)
