"""The explanation of spikes while a run trains (``on_spike = "skip"``), and the skip of a step with bad data.

A spike is a step whose loss or gradient norm is far above that of the steps before. To explain a spike, one process
beside the ranks, ``python -m holdfast.proof.explaining``, trains the step again. The attempt trains on meanwhile, and
waits for the process only when the run has no more steps to train. A pin keeps retention from deleting the checkpoints
before the spike. If this attempt dies, the next attempt finds the pins and explains the spike.
"""

import contextlib
import contextvars
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from holdfast.attempt.observers import AttemptView, Observer
from holdfast.attempt.skipping import skip_steps
from holdfast.config import RunConfig
from holdfast.config.steps import Steps
from holdfast.errors import ConfigError, HoldfastError, OutOfMemory
from holdfast.journal import Commit, Journal
from holdfast.journal.pins import list_unexplained, unpin_before
from holdfast.journal.signature import load_signing_key
from holdfast.journal.skips import list_skips
from holdfast.machine.processes import find_free_memory, measure_memory
from holdfast.memory.priority import Priority
from holdfast.rank.process import Process, spell_module_path, start_process
from holdfast.store import open_store

log = logging.getLogger(__name__)

EXPLAINING_MODULE = "holdfast.proof.explaining"
# The beginning of the reason of a skip list that a run has written by itself.
RUN_ITSELF = "the run itself: "
# The most skip lists that a run writes by itself. A run with more bad batches needs a person.
MOST_LISTS = 8
# The memory that the process and its ranks may need on CPUs, as a multiple of the running ranks' memory.
ROOM = 1.5
# The longest wait for explanations after the run's last step: a process that hangs must not keep a machine.
COMPLETE_WITHIN_S = 600.0
# The longest wait for the process to end by itself when the attempt ends.
STOPPED_WITHIN_S = 3.0


class SpikeAnswer(BaseModel):
    """The answer of the process: one line of JSON on its standard output.

    Attributes:
        cause: see `holdfast.proof.explanation.Explanation`; empty if the step can't be explained.
        text: the cause for a person, or why no cause was found.
    """

    cause: Literal["bits", "data", "dynamics", "none", "unknown", ""]
    text: str


class Explaining(Observer):
    """An observer that explains each spike, and skips its step if the data is the cause; see ``on_spike``.

    Raises:
        ConfigError: the run accepts only signed skip lists, and can't sign its own.
    """

    def __init__(self, config: RunConfig) -> None:
        self._is_on = config.on_spike == "skip"
        if self._is_on and config.resume.trusted_keys and not config.signing_key:
            raise ConfigError(
                'on_spike = "skip" can\'t sign a skip list, and resume.trusted_keys refuses a list without signature',
                hint='set signing_key, or on_spike = "ask"',
            )
        self._config = config
        self._view: AttemptView | None = None
        self._news: queue.SimpleQueue[int] = queue.SimpleQueue()
        # The numbers of the commits with unexplained spikes. 0 stands for all commits that earlier attempts have left.
        self._open: list[int] = []
        self._process: Process | None = None
        self._ends, self._is_crowded = threading.Event(), False
        self._is_given_up = False
        # Run the new thread in a copy of this thread's context, so that Prefect shows its warnings with the
        # attempt's flow run.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="explaining", daemon=True)

    # ---- events, in the attempt's thread

    def opened(self, attempt: AttemptView) -> None:
        if not attempt.journal.has_attempt(attempt.number):  # an attempt of a complete run claims nothing
            return
        if self._is_on:
            self._add(attempt, 0)
        else:
            for number in list_unexplained(attempt.journal):
                unpin_before(attempt.journal, number)

    def committed(self, attempt: AttemptView, commit: Commit) -> None:
        if self._is_on and commit.spikes:
            self._add(attempt, commit.number)

    def failed(self, attempt: AttemptView, error: HoldfastError) -> None:
        if isinstance(error, OutOfMemory):
            self._is_crowded = True
            self._tell_to_end()

    def ended(self, attempt: AttemptView) -> None:
        if self._thread.ident is None:
            return
        self._ends.set()
        self._tell_to_end()
        self._news.put(0)
        self._thread.join(STOPPED_WITHIN_S)
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)  # the ranks of the killed process end by themselves
        for number in filter(None, [*self._open] if self._is_given_up else ()):
            log.warning("commit %d has a spike that is not explained, because the run is complete", number)
            unpin_before(attempt.journal, number)

    def _add(self, attempt: AttemptView, number: int) -> None:
        self._view, self._is_given_up = attempt, False
        self._open.append(number)
        self._news.put(number)
        if self._thread.ident is None:  # not in __init__: without an attempt, nothing would end the thread
            self._thread.start()

    def _tell_to_end(self) -> None:
        """Close the standard input of the process, which tells it to end."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    @property
    def is_awaited(self) -> bool:
        """Return whether a spike is still to be explained, so that the run may yet go back and isn't complete."""
        return bool(self._open) and not self._is_given_up

    def await_answers(self, is_told: Callable[[], bool]) -> bool:
        """Wait until all spikes are explained, at most `COMPLETE_WITHIN_S` seconds.

        Args:
            is_told: returns whether the attempt was told to end; then the wait ends.

        Returns:
            whether ``on_spike`` is "skip", so that an explanation may have skipped a step.
        """
        if any(self._open):
            log.info("all steps are trained; waiting for the explanation of a spike, after which the run may go back")
        deadline = time.monotonic() + COMPLETE_WITHIN_S
        while self._open and self._thread.is_alive() and time.monotonic() < deadline and not is_told():
            self._thread.join(0.1)
        self._is_given_up = bool(self._open) and not is_told()
        return self._is_on

    # ---- the thread

    def _run(self) -> None:
        """Explain the spikes of one commit after the other until the attempt ends."""
        Priority().lower()
        while True:
            number = self._news.get()
            if self._ends.is_set():
                return
            try:
                self._explain(number)
            except Exception as error:  # an explanation must not end a run
                log.warning("a spike of commit %d is not explained: %s", number, error or repr(error))
            if self._ends.is_set():
                return
            self._open.remove(number)

    def _explain(self, number: int) -> None:
        """Explain a commit's spikes, step by step, until a skip has quarantined the commit. Then unpin the checkpoints.

        If the attempt ends meanwhile, the pins stay, so that the next attempt explains the commit.

        Args:
            number: the commit's number; with 0, queue the commits that earlier attempts haven't explained.
        """
        journal = Journal(open_store(self._config.store), self._config.run)
        if not number:
            for left in list_unexplained(journal):
                if left in self._open:  # queued when this attempt adopted it
                    continue
                self._open.append(left)
                self._news.put(left)
            return
        commit = journal.find_commit(number)
        for step in dict.fromkeys(spike.step for spike in commit.spikes) if commit else ():
            if not journal.is_quarantined(number) and _may_skip(journal, step):
                answer = self._ask(journal.store.url, step)
                if self._ends.is_set():
                    return
                self._act(journal, number, step, answer)
        unpin_before(journal, number)

    def _ask(self, url: str, step: int) -> SpikeAnswer:
        """Start the process that explains a step, and return its answer."""
        if not self._has_room():
            return SpikeAnswer(cause="", text="this machine has no memory for a second set of ranks")
        path = Path(self._config.log.folder).absolute() / self._config.run / "explaining.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", EXPLAINING_MODULE, url, str(step), self._config.recipe]
        self._is_crowded = False
        with path.open("ab") as output:
            self._process = start_process(command, os.environ | {"PYTHONPATH": spell_module_path()}, output)
        if self._ends.is_set():
            self._tell_to_end()
        with self._process.stdout as lines:
            line = lines.readline()
        code = self._process.wait()
        self._tell_to_end()
        try:
            return SpikeAnswer.model_validate_json(line)
        except ValidationError:
            crowded = "the run's ranks ran out of memory during the explanation"
            died = f"the process that explains it ended with exit code {code}, and {path} has its output"
            return SpikeAnswer(cause="", text=crowded if self._is_crowded else died)

    def _has_room(self) -> bool:
        """Return whether the memory has room for a second set of ranks; True on a GPU, where only a try shows that."""
        view = self._view
        if view is None or view.built is None or view.built.device != "cpu":
            return True
        return ROOM * measure_memory(beat.pid for beat in view.read_beats().values()) < find_free_memory()

    def _act(self, journal: Journal, number: int, step: int, answer: SpikeAnswer) -> None:
        """Log the answer about a step, and skip the step if its data is the cause."""
        url = journal.store.url
        if answer.cause == "bits":
            log.warning(
                "step %d is not skipped: trained again, it gives other bits, so this machine or the program has "
                "computed wrongly; to find out, on another machine: holdfast audit %s --commit %d", step, url, number,
            )  # fmt: skip
            return
        if answer.cause != "data":
            log.warning("step %d is not skipped: %s; to see more: holdfast explain %s %d", step, answer.text, url, step)
            return
        key = load_signing_key(self._config.signing_key) if self._config.signing_key else None
        try:
            skip_steps(journal, Steps.parse(str(step)), key, reason=f"{RUN_ITSELF}{answer.text}")
        except HoldfastError as error:
            log.warning("step %d is not skipped, although its data is the cause of its spike: %s", step, error)
            return
        log.warning(
            "step %d is skipped: %s; the run goes back to before the step, and continues without its batch; to undo "
            "that: holdfast skip %s %d --off", step, answer.text, url, step,
        )  # fmt: skip


def _may_skip(journal: Journal, step: int) -> bool:
    """Return whether a run may skip a step by itself: no skip list has named the step, and `MOST_LISTS` isn't reached.

    A step that was skipped and then trained again isn't skipped once more, because a person decided that.
    """
    records = list_skips(journal)
    if any(step in Steps.parse(record.changed) for record in records):
        return False
    if sum(record.reason.startswith(RUN_ITSELF) for record in records) < MOST_LISTS:
        return True
    log.warning(
        "step %d is not skipped: the run has skipped steps by itself %d times, the most that it may", step, MOST_LISTS
    )
    return False
