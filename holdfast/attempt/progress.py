"""A training run's output for a person: a live progress bar on a terminal, plain lines elsewhere."""

import contextlib
import logging
import sys
import time

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from holdfast.attempt.observers import AttemptView, Observer
from holdfast.journal import Commit
from holdfast.rank.messages import Progress
from holdfast.terminal import printable, stamp
from holdfast.terminal.bar import Bar, open_console

PLAIN_LINE_EVERY_S = 30.0

log = logging.getLogger(__name__)

# Lines and bar share one console, so that rich prints lines above the bar.
console = open_console(soft_wrap=True)


class ConsoleLines(logging.Handler):
    """A log handler that prints plain lines on the console of the bar.

    In a Slurm job each line begins with its time, because a job that is queued again appends to the same file.
    """

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else None
        mark = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        mark = stamp(sys.stderr, record.created) + mark
        with contextlib.suppress(OSError):  # a closed terminal must not end the run
            console.print(mark + printable(record.getMessage()), style=style, markup=False)


def log_plain_lines() -> None:
    """Print the engine's log on the terminal. After this call Prefect's own log goes only to Prefect's server."""
    lines = logging.getLogger("holdfast")
    lines.setLevel(logging.INFO)
    lines.addHandler(ConsoleLines())
    lines.propagate = False
    logging.getLogger("prefect").propagate = False


class ProgressView(Observer):
    """An observer that shows progress: a live bar on a terminal; elsewhere a plain line every 30 seconds."""

    def __init__(self) -> None:
        self._last_line = time.monotonic()
        self._bar = Bar(
            BarColumn(bar_width=24),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
        )
        self._task = self._bar.add_task("", numbers="")

    def opened(self, attempt: AttemptView) -> None:
        self._bar.update(self._task, total=attempt.total_steps, completed=attempt.step)
        self._bar.start()

    def progressed(self, attempt: AttemptView, progress: Progress) -> None:
        built = attempt.built
        assert built is not None, "no step without a recipe"
        units_per_s = progress.steps_per_s * built.samples_per_step * built.sample_size
        numbers = f"{progress.loss_text}{units_per_s:,.0f} {built.unit}/s"
        self._bar.update(self._task, completed=progress.step, numbers=numbers)
        if not console.is_terminal and time.monotonic() - self._last_line > PLAIN_LINE_EVERY_S:
            log.info("step %d of %d: %s", progress.step, attempt.total_steps, numbers)
            self._last_line = time.monotonic()

    def ended(self, attempt: AttemptView) -> None:
        self._bar.stop()


class CommitLines(Observer):
    """An observer that logs each commit as one plain line."""

    def committed(self, attempt: AttemptView, commit: Commit) -> None:
        parent = attempt.journal.read_parent(commit)
        start = parent.step if parent else 0
        names = {"avg_loss": "loss"}
        numbers = "".join(
            f"{names.get(name, name)} {value:.4f}  "
            for name, value in commit.shown_metrics.items()
            if value is not None
        )
        size_mb, content_id = commit.size_bytes / 1e6, commit.checkpoint_sha256[:12]
        log.info(
            "chunk %d: steps %d-%d  %s%s  %.1f MB  %s",
            commit.number, start, commit.step, numbers, commit.path, size_mb, content_id,
        )  # fmt: skip
