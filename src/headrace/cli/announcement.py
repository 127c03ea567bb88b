"""What a person reads while a server starts and when it is up. Owns the words; knows no process."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence

from msgspec import Struct

from headrace.cli.chat_client import USUAL_URL, parse_url
from headrace.cli.keys import CLIENT_VARIABLE, LocalKey, is_this_machine
from headrace.core.config import GatewayConfig, ModelConfig
from headrace.core.messages import Beat, WorkerCard, WorkerState
from headrace.core.ports import Clock

_EVERY_S = 2.0
_QUESTION = "Why is the sky blue?"
# A fake model would go on to the end of its context.
_MOST_TOKENS = 300
_ALL_INTERFACES = ("0.0.0.0", "::")


class ServedModel(Struct, frozen=True):
    name: str
    aliases: tuple[str, ...]
    workers: int
    context_len: int
    dtype: str


class Address(Struct, frozen=True):
    """Where a server can be reached from this machine."""

    url: str
    cacert: str | None = None
    # Host and port; None where gRPC is off.
    grpc: str | None = None


class LoadingLines:
    """A line when a worker's state changes, and now and then while it loads."""

    def __init__(self, tell: Callable[[str], None], clock: Clock) -> None:
        self._tell = tell
        self._clock = clock
        self._last: dict[str, tuple[WorkerState, int, float]] = {}

    def heard(self, name: str, beat: Beat) -> None:
        percent, now_s = round(100 * beat.progress), self._clock.now_s()
        state, shown, at_s = self._last.get(name, (None, -1, 0.0))
        if beat.state is state and (percent == shown or now_s - at_s < _EVERY_S):
            return
        self._last[name] = (beat.state, percent, now_s)
        if beat.state is state and beat.state is WorkerState.READY:
            return
        done = f" {percent} %" if beat.state is WorkerState.LOADING and percent else ""
        self._tell(f"{name}: {beat.state}{done}{': ' if beat.note else ''}{beat.note}")


def reachable_at(gateway: GatewayConfig, port: int) -> Address:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(gateway.host, gateway.host)
    scheme = "http" if gateway.tls_cert is None else "https"
    name = f"[{host}]" if ":" in host else host
    grpc = f"{name}:{gateway.grpc_port}" if gateway.grpc_port else None
    return Address(f"{scheme}://{name}:{port}", gateway.tls_cert, grpc)


def served_models(models: Sequence[ModelConfig], cards: Sequence[WorkerCard]) -> list[ServedModel]:
    rows = []
    for model in models:
        own = [card for card in cards if card.model == model.name]
        context_len = min((card.context_len for card in own), default=0)
        dtype = next((card.dtype for card in own if card.dtype), model.runner)
        rows.append(ServedModel(model.name, model.aliases, len(own), context_len, dtype))
    return rows


def curl_line(address: Address, key: LocalKey, model: str) -> str:
    """To copy into a shell: it streams an answer, and does not show the key."""
    message = {"role": "user", "content": _QUESTION}
    asked = {"model": model, "stream": True, "temperature": 0.2, "max_tokens": _MOST_TOKENS, "messages": [message]}
    words = ["curl", "-N", *_trust(address), f"{address.url}/v1/chat/completions"]
    key_header = f'"Authorization: Bearer {key.place}"'
    return " ".join(
        [*words, "-H", key_header, "-H", "'Content-Type: application/json'", "-d", shlex.quote(json.dumps(asked))]
    )


def chat_line(address: Address, key: LocalKey, command: str = "headrace") -> str:
    """To copy into a shell as well; what `headrace chat` takes for granted is left out. `command` is what this was called
    by."""
    given = [] if is_this_machine(parse_url(address.url)[1]) else [f'{CLIENT_VARIABLE}="{key.place}"']
    where = [] if address.url == USUAL_URL else ["--url", address.url]
    return " ".join([*given, shlex.quote(command), "chat", *where, *_trust(address)])


def _trust(address: Address) -> list[str]:
    return [] if address.cacert is None else ["--cacert", shlex.quote(address.cacert)]


def exposure(gateway: GatewayConfig) -> str | None:
    """What whoever opens a server to a network should know."""
    if gateway.host not in _ALL_INTERFACES or gateway.tls_cert is not None:
        return None
    return "listens on all interfaces in plain HTTP: keys and texts can be read on the way (--tls-cert, --tls-key)"


def ready_lines(
    address: Address,
    key: LocalKey,
    models: Sequence[ServedModel],
    seconds: float,
    *,
    show_key: bool,
    command: str = "headrace",
) -> list[str]:
    """`show_key` where only a person reads: the page's address then brings the key along."""
    lines = [f"headrace is ready at {address.url} after {seconds:.1f} s", ""]
    for number, model in enumerate(models):
        also = f" (also {', '.join(model.aliases)})" if model.aliases else ""
        about = f"{model.dtype}, {model.context_len:,} tokens of context, {model.workers} worker"
        lines.append(f"  {'' if number else 'models':<8}{model.name}{also}: {about}{'s' if model.workers > 1 else ''}")
    lines.append(f"  {'key':<8}{key.path or key.place}")
    page = f"{address.url}/{f'#key={key.key}' if show_key else ''}"
    lines.append(f"  {'chat':<8}{page}  or: {chat_line(address, key, command)}")
    lines.append(f"  {'docs':<8}{address.url}/docs")
    if address.grpc is not None:
        lines.append(f"  {'grpc':<8}{address.grpc}")
    return [*lines, "", curl_line(address, key, models[0].name), ""]
