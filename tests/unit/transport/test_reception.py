import random
import tracemalloc
from typing import Any

import msgspec
import pytest

from headrace.core.config import TenantConfig
from headrace.core.messages import (
    Ack,
    Attach,
    AttachPart,
    Frame,
    FromGateway,
    FromWorker,
    Goodbye,
    GrammarText,
    Hello,
    Submit,
    SubmitPart,
    Tenants,
)
from headrace.core.ports import Link
from headrace.core.request import Request
from headrace.transport.reception import Guest, Reception

ATTACH = Attach((AttachPart(1, "t", "r", 2, 30),))
SUBMIT = Submit((SubmitPart((1, 2), Request("r", "t", tuple(range(0, 70_000, 700))), GrammarText("json")),))


class Nowhere:
    peer = "nowhere"
    pending_bytes = 0
    is_open = True

    def send(self, message: Any) -> None: ...

    post = send

    def close(self) -> None: ...


class Keeper:
    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.reasons: list[str] = []

    def received(self, message: Any) -> None:
        self.messages.append(message)

    def closed(self, why: str) -> None:
        self.reasons.append(why)
        raise RuntimeError("a receiver that fails at the end")


def guest_of(incoming: Any = FromGateway) -> tuple[Guest, Keeper]:
    keeper = Keeper()

    def make(link: Link) -> Keeper:
        return keeper

    guest = Reception(make, incoming).greet(Nowhere())
    assert isinstance(guest, Guest)
    return guest, keeper


def test_the_messages_of_the_protocol_pass() -> None:
    for incoming, messages in (
        (FromGateway, [Hello(1, "g"), SUBMIT, ATTACH, Ack(2**40), Tenants((TenantConfig("a"),)), Goodbye()]),
        (FromWorker, [Frame(1, 2, b"12345678", ended=())]),
    ):
        guest, keeper = guest_of(incoming)
        assert [guest.deliver(msgspec.msgpack.encode(message)) for message in messages] == [""] * len(messages)
        assert keeper.messages == messages


def test_no_bytes_raise_and_none_reach_a_receiver_untyped() -> None:
    luck = random.Random(3)
    guest, keeper = guest_of()
    good = [msgspec.msgpack.encode(message) for message in (SUBMIT, Hello(1, "g"), Tenants((TenantConfig("a"),)))]
    reasons = []
    for _ in range(5_000):
        body = bytearray(luck.choice(good))
        for _ in range(luck.randrange(1, 6)):
            body[luck.randrange(len(body))] = luck.randrange(256)
        del body[luck.choice((len(body), luck.randrange(len(body)))) :]
        reasons.append(guest.deliver(bytes(body)))
    assert sum(map(bool, reasons)) > 2_000
    assert all(isinstance(message, FromGateway) for message in keeper.messages)


@pytest.mark.parametrize("header", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_a_length_inside_a_message_allocates_nothing(header: bytes) -> None:
    body = msgspec.msgpack.encode(Submit((SubmitPart((1,), Request("r", "t", ())),)))
    at = body.index(b"prompt_ids") + len("prompt_ids")
    guest, _ = guest_of()
    tracemalloc.start()
    try:
        assert guest.deliver(body[:at] + header + body[at + 1 :])
        assert guest.deliver(body[:at] + header)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_deep_nesting_is_refused() -> None:
    guest, _ = guest_of()
    assert guest.deliver(b"\x81\xa4type" + b"\x91" * 1_000_000)
    assert guest.deliver(b"\x82\xa4type\xa3ack\xa1x" + b"\x91" * 1_000_000)


def test_a_reason_quotes_nothing_of_the_message() -> None:
    guest, _ = guest_of()
    why = guest.deliver(msgspec.msgpack.encode({"type": "secret"}))
    assert why and "secret" not in why


def test_the_end_is_told_once_even_to_one_who_fails() -> None:
    guest, keeper = guest_of()
    guest.tell_closed("one")
    guest.tell_closed("two")
    assert keeper.reasons == ["one"]
