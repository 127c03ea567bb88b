"""Who finds workers for voices that have none, as `serving.lives` sees them. Owns no state."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from headrace.serving.life import Life
from headrace.serving.voice import Voice


class Rescue(Protocol):
    """Who finds another worker for voices that lost theirs: `serving.recovery`."""

    def judge(self, replica: str, lost: Mapping[Life, Sequence[Voice]]) -> Collection[Life]:
        """A worker died, and these were there. Which of them have to end for it."""

    def displace(self, life: Life, voices: Sequence[Voice], *, after_s: float = 0.0) -> None:
        """Voices that go on elsewhere, at the next `look` that is not before `after_s`."""

    def forget(self, life: Life) -> None: ...

    def heard(self) -> None:
        """Voices have heard a frame."""

    def look(self) -> None:
        """Place what can be placed."""


class Seeker(Protocol):
    """Who finds the workers of lives that another gateway had: `serving.revival`."""

    def refused(self, voice: Voice) -> bool:
        """A worker does not have it. Whether another is asked."""

    def forget(self, voices: Sequence[Voice]) -> None:
        """They are found, or lost, or over: nobody looks for them any more."""
