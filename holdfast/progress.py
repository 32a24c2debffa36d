"""What a person sees while a run trains: a live bar on a terminal, plain lines elsewhere."""

import logging
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from holdfast.attempt import Attempt
from holdfast.terminal import printable

PLAIN_LINE_EVERY_S = 30.0

log = logging.getLogger(__name__)

# One console for lines and bar, so that lines are printed above the bar and not through it.
console = Console(stderr=True, highlight=False, soft_wrap=True)


class ConsoleLines(logging.Handler):
    """Log records as plain lines on the console that the bar is on."""

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else None
        mark = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        console.print(mark + printable(record.getMessage()), style=style, markup=False)


def log_plain_lines() -> None:
    """The engine's lines are on the terminal; Prefect's own go to its server alone."""
    lines = logging.getLogger("holdfast")
    lines.setLevel(logging.INFO)
    lines.addHandler(ConsoleLines())
    lines.propagate = False
    logging.getLogger("prefect").propagate = False


class ProgressView:
    """Shows an attempt's progress events while the block lasts."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._units = attempt.description["samples_per_step"] * attempt.description["sample_size"]
        self._unit = attempt.description["unit"]
        self._last_line = time.monotonic()
        self._bar = Progress(
            BarColumn(bar_width=24),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        total, step = attempt.total_steps, attempt.step
        self._task = self._bar.add_task("", total=total, completed=step, numbers="")

    def __enter__(self) -> Self:
        self._before = self._attempt.watch
        self._attempt.watch = self.show
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._attempt.watch = self._before
        self._bar.stop()

    def show(self, event: dict[str, Any]) -> None:
        """Show a progress event of the ranks, and pass it on to what watched them before."""
        self._before(event)
        if event["event"] != "progress":
            return
        numbers = f"loss {event['loss']:.4f}  {event['steps_per_s'] * self._units:,.0f} {self._unit}/s"
        self._bar.update(self._task, completed=event["step"], numbers=numbers)
        if not console.is_terminal and time.monotonic() - self._last_line > PLAIN_LINE_EVERY_S:
            log.info("step %d of %d: %s", event["step"], self._attempt.total_steps, numbers)
            self._last_line = time.monotonic()
