"""POST /tokenize and /detokenize, GET /tokenizer_info: the text side of a model, without generating."""

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


async def tokenize(exchange: Exchange, service: Service) -> None:
    """The ids that a prompt or a conversation would have. `add_special_tokens` false leaves out what the model expects
    around a bare text."""
    body = await exchange.parse(TokenizeBody)
    model = _model(service, body.model)
    ids = await service.tokenize(model.name, tokenize_ask(body), framed=body.add_special_tokens is not False)
    names = None
    if body.return_token_strs:
        names = [model.tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
    await exchange.reply(TokenizeReply(ids, len(ids), service.card(model).context_len, names))


async def detokenize(exchange: Exchange, service: Service) -> None:
    """The text of token ids, without control tokens."""
    body = await exchange.parse(DetokenizeBody)
    model = _model(service, body.model)
    size = model.tokenizer.vocab_size
    for place, token in enumerate(body.tokens):
        if token >= size:
            raise InvalidInput(f"tokens[{place}] is outside the vocabulary of {size} tokens", param=f"tokens[{place}]")
    await exchange.reply(DetokenizeReply(await service.detokenize(model.name, body.tokens)))


async def tokenizer_info(exchange: Exchange, service: Service) -> None:
    """What is known of a model's tokeniser; `?model=` names one, else it is the first."""
    model = _model(service, exchange.query.get("model"))
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


def _model(service: Service, name: str | None) -> ModelText:
    if name is not None:
        return service.model(name)
    cards = service.models()
    if not cards:
        raise ModelNotFound("No model is served here.", param="model")
    return service.model(cards[0].name)


ROUTES = (
    Route("POST", "/tokenize", Access.KEY, tokenize, "Text to token ids", body=TokenizeBody, reply=TokenizeReply),
    Route(
        "POST", "/detokenize", Access.KEY, detokenize, "Token ids to text", body=DetokenizeBody, reply=DetokenizeReply
    ),
    Route("GET", "/tokenizer_info", Access.KEY, tokenizer_info, "What a tokeniser is", reply=TokenizerReply),
)
