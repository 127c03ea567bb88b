"""A local service over the fake runner, whose vocabulary is the 256 bytes and an end."""

from collections.abc import Iterator
from contextlib import contextmanager

from headrace.core.clock import SystemClock
from headrace.core.config import EngineConfig
from headrace.engine.loop import Engine
from headrace.runner.fake import FakeRunner
from headrace.serving.local import LocalService
from headrace.serving.model_text import ModelText
from headrace.text.lexicon import Lexicon
from headrace.text.limited import LimitedPool
from headrace.text.matchers import Matchers
from headrace.text.tokenizer import Tokenizer
from tests.unit.text.small_vocabularies import byte_level

TOKENIZER = Tokenizer(byte_level("gpt-2"))
END = TOKENIZER.special_ids["<|end|>"]
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>{% endfor %}assistant: "


class LocalRig:
    def __init__(self, pool: LimitedPool, matchers: Matchers, config: EngineConfig) -> None:
        self.runner = FakeRunner(config)
        self.engine = Engine(config, self.runner, matchers)
        self.service = LocalService(
            self.engine,
            ModelText.build(
                "m",
                byte_level("gpt-2", chat_template=TEMPLATE),
                pool,
                context_len=config.context_len,
                vocab_size=config.vocab_size,
                eos_ids=config.eos_ids,
            ),
            clock=SystemClock(),
            version="m@1",
            block_size=config.block_size,
            matchers=matchers,
            seeds=lambda: 7,
        )


@contextmanager
def local_rig(*, slots: int = 4, blocks: int = 64, max_queue_s: float = 30.0) -> Iterator[LocalRig]:
    config = EngineConfig(
        slots=slots,
        blocks=blocks,
        block_size=4,
        context_len=128,
        vocab_size=TOKENIZER.vocab_size,
        eos_ids=(END,),
        max_step_tokens=64,
        max_queue_s=max_queue_s,
    )
    matchers = Matchers(Lexicon(TOKENIZER, config.vocab_size, config.eos_ids))
    with LimitedPool() as pool:
        try:
            yield LocalRig(pool, matchers, config)
        finally:
            matchers.close()
