"""Observers that tell a scheduler what a kill of the run would cost now: in a file, or as the pod's annotations.

::

    [log]
    observers = ["holdfast.attempt.published:KillCostFile", "holdfast.attempt.published:KillCostAnnotations"]

`holdfast.ledger.kill_cost.KillCost` describes the published numbers.
"""

import contextlib
import contextvars
import logging
import os
import threading
import time
import urllib.error
from pathlib import Path

from holdfast.attempt.observers import AttemptView, Observer
from holdfast.journal import Commit
from holdfast.ledger.history import read_costs
from holdfast.ledger.interval import RECENT_COMMITS, Cost, cost_of
from holdfast.ledger.kill_cost import KillCost
from holdfast.machine.pod import PodApi
from holdfast.rank.messages import Progress

log = logging.getLogger(__name__)

FILE = "kill-cost.json"
# The shortest intervals, in seconds, at which the file and the annotations are updated. After a commit they are updated
# at once.
FILE_EVERY_S, ANNOTATE_EVERY_S = 1.0, 10.0
PREFIX = "kill-cost.holdfast/"


class KillCostObserver(Observer):
    """Base of the observers that publish the cost of a kill, after each commit and at intervals between two commits."""

    every_s = FILE_EVERY_S

    def __init__(self) -> None:
        self._costs: list[Cost] = []
        self._committed_step = self._step = 0
        self._published_at = -float("inf")

    def publish(self, attempt: AttemptView, cost: KillCost) -> None:
        """Publish the numbers. This must not block, because the attempt's own thread calls it."""
        raise NotImplementedError

    def opened(self, attempt: AttemptView) -> None:
        self._costs = read_costs(attempt.journal)
        self._committed_step = self._step = attempt.step
        self._publish(attempt)

    def progressed(self, attempt: AttemptView, progress: Progress) -> None:
        self._step = progress.step
        if time.monotonic() - self._published_at >= self.every_s:
            self._publish(attempt, progress.steps_per_s)

    def committed(self, attempt: AttemptView, commit: Commit) -> None:
        if commit.why != "adopted" and (cost := cost_of(commit, commit.step - self._committed_step)):
            self._costs = [*self._costs, cost][-RECENT_COMMITS:]
        self._committed_step = commit.step
        self._step = max(self._step, commit.step)  # the ranks may already be ahead of the committed step
        self._publish(attempt)

    def _publish(self, attempt: AttemptView, speed: float = 0.0) -> None:
        self._published_at = time.monotonic()
        cost = KillCost.of(
            attempt.config.run, attempt.number, attempt.head, self._step, costs=self._costs, gpus=count_gpus(attempt),
            next_commit_step=attempt.next_commit_step, now=time.time(), speed=speed,
        )  # fmt: skip
        self.publish(attempt, cost)


def count_gpus(attempt: AttemptView) -> int:
    """Return the number of GPUs that an attempt uses: one for each rank, or 0 on CPUs.

    If the number of nodes is a range, its largest number counts.
    """
    if attempt.built is None or not attempt.built.device.startswith("cuda"):
        return 0
    compute = attempt.config.compute
    return compute.rank_count * compute.node_range[1]


class KillCostFile(KillCostObserver):
    """Keeps ``kill-cost.json`` in the run's folder in ``log.folder`` up to date, and removes it when the attempt ends.

    A reader always sees a complete file, because each version replaces the previous version atomically.
    """

    def publish(self, attempt: AttemptView, cost: KillCost) -> None:
        path = self._find(attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_name(f".{path.name}.{os.getpid()}")
        made.write_text(cost.model_dump_json(indent=1) + "\n", "utf-8")
        made.replace(path)

    def ended(self, attempt: AttemptView) -> None:
        self._find(attempt).unlink(missing_ok=True)

    def _find(self, attempt: AttemptView) -> Path:
        return Path(attempt.config.log.folder) / attempt.config.run / FILE


class KillCostAnnotations(KillCostObserver):
    """Keeps annotations of the attempt's own pod, ``kill-cost.holdfast/...``, up to date through the API of Kubernetes.

    A thread sends the newest numbers, and the attempt doesn't wait for it. If the API refuses or doesn't answer, the
    thread logs one warning.
    """

    every_s = ANNOTATE_EVERY_S

    def __init__(self, api: PodApi | str | None = None) -> None:
        """
        Args:
            api: the API, or a text that says why it can't be used; by default the API that this pod's environment
                names.
        """
        super().__init__()
        self._api = PodApi.find() if api is None else api
        self._newest: dict[str, str | None] = {}
        self._news, self._ends = threading.Event(), threading.Event()
        self._has_warned = False
        # The thread runs in this thread's context, so that Prefect shows its warnings with the attempt's flow run.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="annotations", daemon=True)

    def publish(self, attempt: AttemptView, cost: KillCost) -> None:
        self._newest = spell_annotations(cost)
        self._news.set()
        if self._thread.ident is None:  # not started in __init__, because nothing ends the thread if no attempt is made
            self._thread.start()

    def ended(self, attempt: AttemptView) -> None:
        self._ends.set()
        self._news.set()

    def _run(self) -> None:
        """Send the newest annotations until the attempt has ended. This is the thread's body."""
        if isinstance(self._api, str):
            self._warn(f"{self._api}; the pod's manifest has to set it")
            return
        while not self._ends.is_set():
            self._news.wait()
            self._news.clear()
            if self._ends.is_set() or not self._send(self._api):
                return
            self._ends.wait(self.every_s)

    def _send(self, api: PodApi) -> bool:
        """Send the newest annotations. Return False if later annotations can't be sent either."""
        try:
            api.annotate(self._newest)
        except urllib.error.HTTPError as error:
            with contextlib.closing(error):
                self._warn(f"{error.code} {error.reason}")
            return error.code >= 500 or error.code == 429
        except OSError as error:
            self._warn(str(error))
        return True

    def _warn(self, problem: str) -> None:
        if not self._has_warned and not self._ends.is_set():
            log.warning("the pod's annotations can't be written: %s; the run continues", problem)
        self._has_warned = True


def spell_annotations(cost: KillCost) -> dict[str, str | None]:
    """Return the annotations of a pod: a text for each number, and None for each unknown number."""
    known = cost.model_dump()
    return {PREFIX + name.replace("_", "-"): None if value is None else str(value) for name, value in known.items()}
