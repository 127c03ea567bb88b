"""Live progress of a load on stderr: one line that changes on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.cli.load.outcome import State

if TYPE_CHECKING:
    from types import TracebackType

    from headrace.cli.load.drive import Driver

_QUIET_S = 5.0
_RECENT = 200


class LiveProgress:
    """A context: the line is gone when the load is over."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._told_s = -_QUIET_S
        self._seen = (0.0, 0)

    def __enter__(self) -> LiveProgress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, label: str, driver: Driver) -> None:
        elapsed_s = driver.elapsed_s
        if self._console.is_terminal:
            self._live.update(self._line(driver, label), refresh=True)
        elif not 0.0 <= elapsed_s - self._told_s < _QUIET_S:
            self._told_s = elapsed_s
            # Into a file, a line is a line.
            self._console.print(self._line(driver, label), highlight=False, soft_wrap=True)

    def _line(self, driver: Driver, label: str) -> Any:
        from rich.text import Text

        elapsed_s, pieces = driver.elapsed_s, driver.pieces
        since_s, before = self._seen if self._seen[0] < elapsed_s and self._seen[1] <= pieces else (0.0, 0)
        self._seen = (elapsed_s, pieces)
        recent = driver.outcomes[-_RECENT:]
        first = _median("TTFT", [outcome.ttft_s for outcome in recent])
        whole = _median("whole replies after", [outcome.e2e_s for outcome in recent if outcome.state is State.FINISHED])
        latency = first or whole or "no token yet"
        warming = ", not counted yet" if driver.is_warming else ""
        return Text(
            f"{label}{warming}: {elapsed_s:,.1f} s · {len(driver.outcomes):,} sent · {driver.in_flight:,} in flight · "
            f"{driver.ended:,} over · {driver.bad:,} bad · {(pieces - before) / (elapsed_s - since_s):,.0f} pieces/s · {latency}"
        )


def _median(what: str, seconds: list[float | None]) -> str:
    """Of those that are known; empty where none is."""
    known = sorted(each for each in seconds if each is not None)
    return f"{what} {1e3 * known[len(known) // 2]:,.1f} ms" if known else ""
