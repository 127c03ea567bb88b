"""What a model's files advise for sampling. Owns the record; whether it is followed is decided elsewhere."""

from msgspec import Struct


class GenerationDefaults(Struct, frozen=True):
    """None where the files are silent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
