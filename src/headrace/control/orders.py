"""What the supervisor tells the gateway and hears from it. Owns the two records."""

from enum import StrEnum

from msgspec import Struct

from headrace.core.config import Config


class Orders(Struct, frozen=True):
    """All that a gateway is told, as a file in the run folder. `sources` are the models' files, `addresses` where
    their workers listen, both by the model's name. `secret` salts what one run remembers of prompts."""

    config: Config
    sources: dict[str, str]
    addresses: dict[str, tuple[str, ...]]
    secret: bytes = b""


class Step(StrEnum):
    """SERVING is said once, when every worker was found ready."""

    LISTENING = "listening"
    SERVING = "serving"
    RELOADED = "reloaded"


class Report(Struct, frozen=True):
    """One line of JSON on a gateway's stdout. `note` is for a person."""

    step: Step
    note: str = ""
