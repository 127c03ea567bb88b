"""What the supervisor tells the gateway and hears from it. Owns the two records."""

from enum import StrEnum

from msgspec import Struct

from headrace.core.config import Config

REPORT_S = 1.0


class Orders(Struct, frozen=True):
    """All that a gateway is told, as a file in the run folder. `sources` are the models' files, `addresses` where
    their workers listen, both by the model's name. `secret` salts what one run remembers of prompts. `version` is larger
    each time they are written."""

    config: Config
    sources: dict[str, str]
    addresses: dict[str, tuple[str, ...]]
    secret: bytes = b""
    version: int = 0


class Step(StrEnum):
    """SERVING: every worker was found ready, once."""

    LISTENING = "listening"
    SERVING = "serving"


class Report(Struct, frozen=True):
    """One line of JSON on a gateway's stdout: how far it is, and the version of the orders that it follows. It is said
    when anything changes and every REPORT_S, so that none is missed for long. `note` is for a person."""

    step: Step
    version: int = 0
    note: str = ""
    # Every worker is ready, as this gateway sees it now.
    is_whole: bool = False
