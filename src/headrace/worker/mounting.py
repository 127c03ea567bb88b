"""A model brought into this process for a worker: the fake, or a checkpoint on its device, and its matchers.

Owns what must be closed with it. Whether it computes soundly and how fast is found out afterwards.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from headrace.core.config import EngineConfig, ModelConfig, TenantConfig
from headrace.core.ports import Runner
from headrace.runner.fake import FakeRunner
from headrace.runner.faults import Faults
from headrace.text.byte_vocabulary import byte_vocabulary
from headrace.text.lexicon import Lexicon
from headrace.text.matchers import Matchers
from headrace.text.tokenizer import Tokenizer
from headrace.weights.checkpoint import open_checkpoint
from headrace.worker.assembly import LoadSettings, load_weights
from headrace.worker.warmup import SCENES, Scenes

# Part done, from 0 to 1, and a few words.
Report = Callable[[float, str], None]


class MountedModel:
    """`is_measured`: the configuration's profile is the truth, and no steps need be timed; else `scenes` say which.
    `device_id` names the accelerator as its driver does; empty where it runs on none."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        matchers: Matchers | None = None,
        version: str = "",
        fingerprint: str = "",
        dtype: str = "",
        is_measured: bool = False,
        scenes: Scenes = SCENES,
        device_id: str = "",
    ) -> None:
        self.runner = runner
        self.config = config
        self.matchers = matchers
        self.version = version
        self.fingerprint = fingerprint
        self.dtype = dtype
        self.is_measured = is_measured
        self.scenes = scenes
        self.device_id = device_id
        self.closing = ExitStack()
        self.closing.callback(runner.close)
        if matchers is not None:
            self.closing.callback(matchers.close)

    def close(self) -> None:
        self.closing.close()


Mount = Callable[[Report], MountedModel]


def mount_fake(model: ModelConfig, tenants: tuple[TenantConfig, ...], report: Report) -> MountedModel:
    fake = model.fake
    vocabulary = byte_vocabulary(fake.vocab_size)
    config = EngineConfig(
        slots=fake.slots,
        blocks=fake.blocks,
        context_len=fake.context_len,
        vocab_size=fake.vocab_size,
        eos_ids=() if vocabulary.eos_id is None else (vocabulary.eos_id,),
        max_step_tokens=max(EngineConfig().max_step_tokens, fake.slots),
        profile=fake.profile,
        tenants=tenants,
    )
    runner = FakeRunner(
        config,
        profile=fake.profile,
        depth=fake.depth,
        sleep=fake.sleep,
        eos_probability=fake.eos_probability,
        faults=None if fake.lethal_id is None else Faults(lethal_id=fake.lethal_id),
    )
    report(0.5, "building the vocabulary")
    name = f"fake-{fake.vocab_size}"
    made = _lexicon(Tokenizer(vocabulary), config.vocab_size, config.eos_ids)
    return MountedModel(
        runner,
        config,
        matchers=None if made is None else Matchers(made),
        version=name,
        fingerprint=name,
        dtype="fake",
        is_measured=True,
    )


def mount_torch(
    path: Path, model: ModelConfig, tenants: tuple[TenantConfig, ...], report: Report, index: int = 0
) -> MountedModel:
    """Raises InvalidModel for files that are no model, ModelTooLarge when it does not fit. Replica `index` takes the card
    of that number, where there are several."""
    from msgspec.structs import replace

    settings = LoadSettings(
        device=model.device,
        dtype=model.dtype,
        deterministic=model.deterministic,
        slots=model.slots,
        context_len=model.context_len,
        kv_tokens=model.kv_tokens,
        threads=model.threads,
        card=index,
    )
    checkpoint = open_checkpoint(path)
    making: list[Future[Lexicon | None]] = []

    def lexicon() -> Lexicon | None:
        return _lexicon(Tokenizer(checkpoint.vocabulary), checkpoint.shape.vocab_size, checkpoint.shape.eos_ids)

    try:
        with ThreadPoolExecutor(1, "lexicon") as beside:

            def progress(done: int, total: int) -> None:
                report(done / max(total, 1), path.stem)
                # Not before: it holds Python's lock, and those who read weights would wait. A card may compile still.
                if done >= total and not making:
                    making.append(beside.submit(lexicon))

            loaded = load_weights(checkpoint, settings, progress)
            made = making[0].result() if making else lexicon()
        mounted = MountedModel(
            loaded.runner,
            replace(loaded.config, tenants=tenants),
            matchers=None if made is None else Matchers(made),
            version=loaded.runner.fingerprint,
            fingerprint=loaded.runner.fingerprint,
            dtype=loaded.dtype,
            scenes=loaded.scenes,
            device_id=loaded.device_id,
        )
    except BaseException:
        checkpoint.close()
        raise
    mounted.closing.callback(checkpoint.close)
    return mounted


def _lexicon(tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> Lexicon | None:
    """Where text can be held to a form at all."""
    if not eos_ids or not tokenizer.can_stream:
        return None
    return Lexicon(tokenizer, vocab_size, eos_ids)
