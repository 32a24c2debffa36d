"""The observer that turns an attempt's events into metrics and spans, for Prometheus or OpenTelemetry.

A separate thread reads the run's records and the ranks' heartbeats, and exports the metrics. The attempt's thread only
notes numbers in memory, and the ranks are separate processes, so no step and no commit waits for a scrape or a
receiver.
"""

import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from holdfast.attempt.observers import AttemptView, CheckpointVerdict, Observer
from holdfast.config import RunConfig
from holdfast.config.metrics import MetricsTarget, read_metrics_target
from holdfast.errors import HoldfastError
from holdfast.extensions.metrics.books import Books
from holdfast.extensions.metrics.exporters import Exporter, check_library, make_exporter
from holdfast.extensions.metrics.lag import Lag
from holdfast.extensions.metrics.readings import Readings
from holdfast.extensions.metrics.spans import SpanRecord
from holdfast.extensions.metrics.table import METRICS
from holdfast.journal import Commit, Journal, seconds_of
from holdfast.memory.priority import Priority
from holdfast.rank.messages import Progress
from holdfast.store import open_store

log = logging.getLogger(__name__)

# The interval, in seconds, at which the ranks' heartbeats are read.
EVERY_S = 0.5
# The longest wait for the exporter when a run is complete, and when an attempt is stopped.
COMPLETE_WITHIN_S = 61.0
STOPPED_WITHIN_S = 3.0

# The series that are exported as 0 before their first event, so that Prometheus sees that event as an increase.
BEGUN: list[tuple[str, tuple[str, ...]]] = [
    *((metric.name, ()) for metric in METRICS.values() if metric.kind == "counter" and not metric.labels),
    *(("holdfast.commits", (reason,)) for reason in ("chunk", "preempted", "adopted")),
    *(("holdfast.rank.restarts", (reason,)) for reason in ("rank_crashed", "rank_hung")),
    *(("holdfast.verdicts", ("gate", result)) for result in ("passed", "refused", "damaged")),
    *(("holdfast.verdicts", (judge, result)) for judge in ("rehearsal", "death") for result in ("passed", "refused")),
]

T = TypeVar("T")


def make_measuring(config: RunConfig) -> list[Observer]:
    """Return the observer for ``log.metrics``, in a list.

    Raises:
        ConfigError: the library that the observer needs is not installed.
    """
    assert config.log.metrics is not None
    target = read_metrics_target(config.log.metrics)
    check_library(target)
    return [Measuring(config, target)]


class Measuring(Observer):
    """Notes an attempt's numbers and spans, and exports them."""

    def __init__(self, config: RunConfig, target: MetricsTarget) -> None:
        self._target = target
        self._began = time.time()
        self._readings = Readings({"run": config.run})
        for name, labels in BEGUN:
            self._readings.put(name, 0, *labels)
        self._books = Books(Journal(open_store(config.store), config.run), self._readings)
        self._is_open = self._is_complete = self._is_left = self._has_warned = self._has_sent_dead = False
        self._spans: queue.SimpleQueue[SpanRecord] = queue.SimpleQueue()
        self._view: AttemptView | None = None
        self._reported: tuple[int, float] | None = None  # the last reported step, and its time
        self._committed_at: float | None = None
        self._ends = threading.Event()
        # The thread runs in this thread's context, so that Prefect shows its warnings with the attempt's flow run.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="metrics", daemon=True)

    # ---- events, in the attempt's thread

    def opened(self, attempt: AttemptView) -> None:
        self._see(attempt)
        self._reported = None
        if attempt.head is not None:
            self._note_commit_age(attempt.head)
            self._readings.put("holdfast.commit.interval", attempt.head.train_s + attempt.head.stall_s)
        self._is_open = True

    def progressed(self, attempt: AttemptView, progress: Progress) -> None:
        self._see(attempt)
        now, readings = time.monotonic(), self._readings
        step_s = 1 / progress.steps_per_s if progress.steps_per_s else 0.0
        if self._reported is not None and progress.step > self._reported[0]:
            step_s = (now - self._reported[1]) / (progress.step - self._reported[0])
        self._reported = progress.step, now
        readings.put("holdfast.step", progress.step)
        if not step_s or attempt.built is None:
            return
        built = attempt.built
        samples_per_s = built.samples_per_step / step_s
        readings.put("holdfast.step.duration", step_s)
        readings.put("holdfast.throughput", samples_per_s * built.sample_size, built.unit)
        peak_flops = attempt.config.log.peak_flops
        if built.flops_per_sample and peak_flops:
            peak_flops *= attempt.config.compute.rank_count
            readings.put("holdfast.mfu", samples_per_s * built.flops_per_sample / peak_flops)

    def committed(self, attempt: AttemptView, commit: Commit) -> None:
        self._see(attempt)
        now, readings = time.time(), self._readings
        readings.put("holdfast.step", max(commit.step, self._reported[0] if self._reported else 0))
        readings.add("holdfast.commits", 1, commit.why)
        readings.add("holdfast.checkpoint", commit.size_bytes)
        readings.put("holdfast.commit.interval", now - self._committed_at if self._committed_at else commit.train_s)
        self._committed_at = now
        self._note_commit_age(commit)
        self._books.add(commit)
        if not commit.trained_at:
            return
        trained = seconds_of(commit.trained_at)
        for name, spent_s in (("train", commit.train_s), ("stall", commit.stall_s), ("save", commit.save_s)):
            readings.add(f"holdfast.{name}", spent_s)
        # skip an adopted checkpoint: the time for which it waited for a new attempt is no delay of its commit
        if commit.why != "adopted":
            readings.add("holdfast.durable", max(now - trained, 0.0))
        self._spans.put(_describe_chunk(commit, trained, now))

    def judged(self, attempt: AttemptView, verdict: CheckpointVerdict) -> None:
        self._see(attempt)
        self._readings.add("holdfast.verdicts", 1, verdict.judge, verdict.result)
        if verdict.judge == "gate":
            now = time.time()
            self._readings.add("holdfast.restore", verdict.took_s)
            attributes: dict[str, str | int] = {"holdfast.commit": verdict.commit, "holdfast.verdict": verdict.result}
            self._spans.put(SpanRecord("restore", now - verdict.took_s, now, attributes))

    def failed(self, attempt: AttemptView, error: HoldfastError) -> None:
        self._see(attempt)
        self._readings.add("holdfast.rank.restarts", 1, error.reason)

    def ended(self, attempt: AttemptView) -> None:
        if self._thread.ident is None:
            return
        self._see(attempt)
        self._is_complete = attempt.head is not None and attempt.is_complete
        self._ends.set()
        self._thread.join(COMPLETE_WITHIN_S if self._is_complete else STOPPED_WITHIN_S)
        self._is_left = True

    def _see(self, attempt: AttemptView) -> None:
        """Note the numbers that every event has. At the first event, start the thread."""
        self._view = attempt
        readings = self._readings
        if attempt.built is not None:
            readings.put("holdfast.run.steps", attempt.total_steps)
            is_complete = attempt.head is not None and attempt.head.step >= attempt.total_steps
            readings.put("holdfast.run.complete", int(is_complete))
        if self._thread.ident is None:  # not started in __init__, because nothing ends the thread if no attempt is made
            readings.put("holdfast.attempt", attempt.number)
            readings.put("holdfast.step", attempt.step)
            readings.follow("holdfast.attempt.age", lambda: time.time() - self._began)
            self._thread.start()

    def _note_commit_age(self, commit: Commit) -> None:
        committed = seconds_of(commit.created_at)
        self._readings.follow("holdfast.commit.age", lambda: max(time.time() - committed, 0.0))

    # ---- the thread

    def _run(self) -> None:
        """Export until the attempt has ended."""
        Priority().lower()
        try:
            self._export()
        except Exception as error:  # metrics must not end a run
            # The export also fails if the process ends while this thread still works ("cannot schedule new
            # futures after shutdown"). Don't warn of that.
            if not self._is_left:
                log.warning(
                    "the export of metrics has ended (log.metrics): %s; the run continues", error or repr(error)
                )

    def _export(self) -> None:
        view = self._view
        assert view is not None
        record = self._try(lambda: view.journal.find_attempt(view.number))
        key = record.writer if record else ""
        exporter = make_exporter(self._target, self._readings, view.number, self._began, key)
        lag = Lag(self._readings)
        has_ended = False
        while not has_ended:
            self._tend(exporter, lag)
            has_ended = self._ends.wait(EVERY_S)
        attributes = self._describe_end(view.number)
        self._tend(exporter, lag)
        exporter.close(time.time(), attributes, is_complete=self._is_complete)

    def _tend(self, exporter: Exporter, lag: Lag) -> None:
        exporter.tend()
        view = self._view
        assert view is not None
        lag.look(view.read_beats())
        if self._is_open:
            self._try(self._books.update)
            if not self._has_sent_dead:
                for dead in self._books.find_dead(view.number):
                    exporter.add_dead(dead)
                self._has_sent_dead = self._books.is_read
        while not self._spans.empty():
            exporter.add(self._spans.get())

    def _describe_end(self, number: int) -> dict[str, str | int | float]:
        """Read and count the attempt's recorded ending, and return the attributes of the attempt's span."""
        assert self._view is not None
        attributes: dict[str, str | int | float] = {"holdfast.step": self._view.step}
        ending = self._try(lambda: self._books.end(number))
        if ending is not None:
            attributes |= {"holdfast.reason": ending.reason, "holdfast.message": ending.message}
        return attributes

    def _try(self, read: Callable[[], T]) -> T | None:
        """Return the result of a call that reads the run's records; None if they can't be read now."""
        try:
            return read()
        except HoldfastError as error:
            if not self._has_warned:
                log.warning("metrics from the run's records are missing (log.metrics): %s; the run continues", error)
            self._has_warned = True
        return None


def _describe_chunk(commit: Commit, trained: float, now: float) -> SpanRecord:
    """Return the span of a chunk, from its first step until its commit, with the save as a child span.

    Args:
        trained: when the chunk's last step ended, in seconds since 1970.
    """
    attributes: dict[str, str | int | float] = {
        "holdfast.commit": commit.number,
        "holdfast.step": commit.step,
        "holdfast.reason": commit.why,
        "holdfast.checkpoint_sha256": commit.checkpoint_sha256,
    }
    size = {"holdfast.size_bytes": commit.size_bytes, "holdfast.stall_s": commit.stall_s}
    save = SpanRecord("save", trained, trained + commit.save_s, size)
    return SpanRecord("chunk", trained - commit.train_s, max(now, save.ended), attributes, (save,))
