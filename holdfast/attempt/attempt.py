"""One process life of a run: claim it, find where to go on, train chunks, commit them, stop in time.

Single-threaded: the ranks are processes of their own, and they are ordered to train the next chunk before the last one
is committed, so that a commit costs no training time.
"""

import contextlib
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast import checkpoint, faults, launch, retention
from holdfast.attempt.hooks import Hooks, Proposal, call_each
from holdfast.attempt.line import Line
from holdfast.attempt.lineage import (
    check_same,
    choose_gate,
    describe_present,
    explain_unfit,
    find_ancestor,
    judge_drift,
    judge_environment,
)
from holdfast.checkpoint import Saved
from holdfast.config import RunConfig
from holdfast.errors import (
    HoldfastError,
    NameTaken,
    NoProgress,
    OutOfMemory,
    RankDied,
    RecipeFailed,
    StateError,
    Unhealthy,
)
from holdfast.interval import FIRST_STEPS, History
from holdfast.journal import Commit, Journal, PruneReport
from holdfast.launch import Ranks, problem_in
from holdfast.preemption import Notice
from holdfast.signature import load_signing_key, load_trusted_key
from holdfast.store import open_store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chunk:
    """The steps ``(start, stop]``; its number is that of the commit it is to become."""

    number: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"chunk {self.number}: steps {self.start}-{self.stop}"


Watch = Callable[[dict[str, Any]], None]

# Why commits were made whose attempt left upkeep to the next one.
LEFT_UPKEEP = {"preempted", "adopted"}


class Attempt:
    """One attempt at a run. `open` starts its ranks and claims the run; `close` or `end` ends the ranks.

    Making one starts nothing, so that whoever makes it owns it before there is anything to end.

    Attributes:
        hooks: called for every commit.
        line: the run's commits, once it is open.
        watch: called with the ranks' progress events, see `holdfast.training.train`.
        notice: that this machine goes away, if it does.
        description: what the ranks built; see `holdfast.rank.serving.describe`.
    """

    def __init__(self, config: RunConfig, number: int | None = None, hooks: Hooks | None = None) -> None:
        self.config = config
        self.hooks = hooks or Hooks()
        self.journal = Journal(open_store(config.store), config.run)
        self.number = number or self.journal.attempts() + 1
        self.watch: Watch = lambda event: None
        self.notice: Notice | None = None
        self._is_claimed = False
        self._is_stopped = False
        self._is_told = False
        self._has_read_back = False
        self._uncommitted: list[Saved] = []
        self._ordered_stops: list[int] = []
        self._last_failure: tuple[int, object] | None = None
        self._ranks: Ranks | None = None
        self._history: History | None = None  # of an automatic chunk length
        self._pruned: PruneReport | None = None
        self.description: dict[str, Any] = {}
        self._owes_upkeep = False
        self._restored = 0  # the commit that the ranks were restored from, and so verified
        self._line: Line | None = None

    @property
    def line(self) -> Line:
        assert self._line is not None, "the attempt was never opened"
        return self._line

    def close(self) -> None:
        """End this attempt's ranks."""
        if self._ranks is not None:
            self._ranks.end()
            self._ranks = None
        self._ordered_stops = []

    # ---- what is trained

    @property
    def head(self) -> Commit | None:
        """The commit that the run continues from; None before the first."""
        return self._line.head if self._line else None

    @property
    def steps_per_epoch(self) -> int:
        return int(self.description["steps_per_epoch"])

    @property
    def total_steps(self) -> int:
        return self.config.epochs * self.steps_per_epoch

    @property
    def step(self) -> int:
        """The last step that is safe on the store, committed or about to be."""
        if self._uncommitted:
            return self._uncommitted[-1].step
        return self.head.step if self.head else 0

    @property
    def is_complete(self) -> bool:
        return self.step >= self.total_steps

    @property
    def is_stopping(self) -> bool:
        """Whether this process was told to end."""
        return self._is_stopped or self._is_told

    def next_chunk(self) -> Chunk | None:
        """What is to be trained next; None if nothing is, or there is no time left for it."""
        if self.is_complete or self._is_stopped:
            return None
        return Chunk(self.line.next_number + len(self._uncommitted), self.step, self._stop_after(self.step))

    def _stop_after(self, step: int) -> int:
        """Where the chunk stops that begins with a step: where the ranks were told to, or its own length further."""
        ordered = next((stop for stop in self._ordered_stops if stop > step), 0)
        if ordered:
            return ordered
        auto_steps = self._history.choose_steps() if self._history else FIRST_STEPS
        return self.config.next_stop(step, self.steps_per_epoch, auto_steps)

    # ---- open: where to go on

    def open(self) -> None:
        """Claim the run and restore the last verified checkpoint into the ranks; ``head`` is its commit.

        A run that is complete, and verifies, is not claimed. Whatever is raised, no rank is left.

        Raises:
            ConfigDrift: the run exists with other settings, or other code.
            DeterminismError: equal bits aren't promised here, and the configuration refuses that.
            GateTripped: what is resumed is twice in a row not what was saved.
            NoVerifiedCheckpoint: it has committed, and nothing of that can be verified.
            Superseded: the attempt's number is taken.
        """
        try:
            self._build()
            self._continue()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        """Start the ranks, and describe what they built."""
        config = self.config
        signing_key = load_signing_key(config.signing_key) if config.signing_key else None
        trusted_keys = [load_trusted_key(source) for source in config.resume.trusted_keys]
        self._newest = self.journal.newest()
        self._start_ranks(self._newest)
        self._ancestor = find_ancestor(self.journal, config.store, config.init_from, self._newest)
        self._present = describe_present(config, self.description, self._ancestor)
        self.fingerprint = self._present.fingerprint
        self._line = Line(
            self.journal,
            self.number,
            self.fingerprint,
            self.steps_per_epoch,
            signing_key=signing_key,
            trusted_keys=trusted_keys,
            commit_adopted=self._commit_adopted,
        )

    def _continue(self) -> None:
        """Claim the run and restore its head, unless it is complete."""
        newest, present = self._newest, self._present
        lineage: dict[str, Any] = {}
        if newest is not None:
            lineage["drift"] = judge_drift(self.journal, newest, present, self.config)
            is_last = newest.step >= self.total_steps and not self.line.find_break(newest)
            if is_last and not checkpoint.verify(self.journal.store, newest):
                self.line.check_trusted(newest)
                self.line.head = newest
                self.line.renew_latest()
                return
            lineage["environment"] = asdict(judge_environment(self.journal, newest, present, self.config.resume))
            lineage["continues"] = {"commit": newest.number, "checkpoint_sha256": newest.checkpoint_sha256}
        if self._ancestor:
            lineage["ancestor"] = {name: value for name, value in self._ancestor.items() if name != "record"}
        why = self._why(newest)
        self.journal.begin(self.config.recipe)  # refuses a later format
        lineage = {name: value for name, value in lineage.items() if value}
        self.journal.claim_attempt(self.number, why, platform.node(), os.getpid(), present.environment, lineage)
        self._is_claimed = True
        self._record_lost_attempts()
        self.journal.record_config(self.fingerprint, present.identity, self.config.model_dump(mode="json"))
        self._history = History(self.journal, self.number) if self.config.chunk.auto else None
        self._resume()
        self._owes_upkeep |= self.head is not None and self.head.why in LEFT_UPKEEP
        log.info("%s", self._what())
        log.info("attempt %d (%s): %s", self.number, why, self._where_from())
        if self.config.determinism.mode == "fast":
            log.warning('determinism.mode = "fast": the same steps may give other bits each time; nothing is promised')

    def _why(self, newest: Commit | None) -> str:
        if self.journal.attempts() == 0:
            return "fresh"
        last = self.journal.read_ending(self.number - 1)
        if (newest is not None and newest.why == "preempted") or (last is not None and last.reason == "preempted"):
            return "preempted"
        epochs = self.journal.read_epochs()
        if newest is not None and epochs is not None and newest.step >= epochs * self.steps_per_epoch:
            return "extended"
        return "continued"

    def _record_lost_attempts(self) -> None:
        number = self.number - 1
        while number and self.journal.read_ending(number) is None and self.journal.has_attempt(number):
            self.journal.end_attempt(number, "vanished", f"it had not ended when attempt {self.number} began")
            number -= 1

    def _what(self) -> str:
        built = self.description
        samples = f"{built['data']['samples']:,} samples" if "samples" in built["data"] else "a stream"
        return (
            f"run {self.config.run}: {built['model_params']:,} parameters, {samples}, "
            f"{self.config.epochs} epochs of {self.steps_per_epoch} steps, on {built['device']}"
        )

    def _where_from(self) -> str:
        if self.head is None:
            return f"begins with step 0 of {self.total_steps}"
        return f"continues from {self.head.path}, step {self.head.step} of {self.total_steps}"

    def _start_ranks(self, newest: Commit | None) -> None:
        self._restart_s = 0.0
        self._ranks = launch.start(*_rank_arguments(self.config, self.number, newest))
        self._is_told = False
        try:
            self.description = self._ranks.expect("ready")
        except BaseException:
            self.close()
            raise

    def _check_ranks(self) -> None:
        """Raise if new ranks have built something else than this attempt's first ones: code may have been edited.

        Raises:
            ConfigDrift: they have, and it is not accepted.
        """
        present = describe_present(self.config, self.description, self._ancestor)
        check_same(self._present, present, self.config.resume.accept_drift)
        self._present = present

    def _resume(self) -> None:
        """The ranks hold the state of the head; nothing that was saved is left uncommitted."""
        self._uncommitted.clear()
        self.line.resume(self._restore)
        if self.head is None and self._ancestor:
            self._begin_from_ancestor()

    def _restore(self, commit: Commit) -> HoldfastError | None:
        """The ranks now hold the commit's state; or how it is damaged, or what has tripped the gate."""
        assert self._ranks is not None
        gate = choose_gate(self.journal, commit, self._present, self.config.resume)
        try:
            event = self._ranks.restore(commit, gate)
        except StateError as error:
            raise explain_unfit(error, self.journal, commit, self._present, self.config.resume) from error
        if problem := problem_in(event):
            return problem
        log.info("restored: %s", event["summary"])
        for name in event["taken_over"]:
            log.info("the changed %s is in force from step %d on", name, event["step"])
        self._restored = commit.number
        if event["note"]:
            log.warning("%s; settings or code were changed, so that it only goes on record", event["note"])
        return None

    def _begin_from_ancestor(self) -> None:
        assert self._ranks is not None
        found = self._ancestor
        if problem := problem_in(self._ranks.begin(found)):
            raise problem
        content_id = found["checkpoint_sha256"][:12]
        log.info("begins with the weights of run %s, commit %d (%s)", found["run"], found["commit"], content_id)

    # ---- train and commit

    def train_chunk(self, chunk: Chunk) -> Saved | None:
        """The chunk is trained, and its checkpoint is durable; it doesn't count yet.

        Ranks that died are started anew from the last verified checkpoint. If that turns out to be the chunk's own,
        saved before they died, it is adopted: there is nothing left to do, and None is returned.

        Raises:
            RankDied, RecipeFailed, Unhealthy: the ranks ended; calling again may help.
            NoProgress: it failed in the same step as before, and nothing was committed in between.
        """
        try:
            if self._ranks is None:
                self._start_ranks(self.head)
                self._check_ranks()
                self._resume()
            if self.step >= chunk.stop:
                return None
            saved = self._await_saved(chunk.stop)
        except (RankDied, RecipeFailed, Unhealthy, OutOfMemory) as error:
            self.close()
            if self._is_told and isinstance(error, RankDied):
                self._is_stopped = True
                if error.data.get("is_silent"):  # otherwise they ended in time, and had nothing to save any more
                    log.warning("no checkpoint was durable in time for the notice; what was committed before stays")
                return None
            if self._history and isinstance(error, RankDied):
                self._history.note_death()
            raise self._is_repeated(error) or error from error.__cause__
        if self._history:
            self._history.note_saved(saved, saved.step - self.step)
        self._uncommitted.append(saved)
        self._ordered_stops = [stop for stop in self._ordered_stops if stop > saved.step]
        self._is_stopped = self._is_told and saved.step < chunk.stop
        faults.reach("chunk-reported")
        return saved

    def _await_saved(self, stop: int) -> Saved:
        assert self._ranks is not None
        self._restart_s = self._restart_s or time.monotonic() - self._ranks.began
        self._order_steps(stop)
        if stop < self.total_steps and not self._is_told:
            self._order_steps(self._stop_after(stop))  # which is trained while this chunk is saved and committed
        if self._owes_upkeep and self.notice is None:
            self._owes_upkeep = False
            call_each(self.hooks.upkeep, self)
        while True:
            self._pass_on_notice()
            event = self._ranks.next_event(self.notice.left_s() if self.notice else None)
            if event["event"] == "saved":
                return Saved.model_validate(event | {"restart_s": self._restart_s})
            self.watch(event)

    def _order_steps(self, stop: int) -> None:
        assert self._ranks is not None
        if stop not in self._ordered_stops:
            self._ranks.train(stop, self.fingerprint)
            self._ordered_stops.append(stop)

    def _is_repeated(self, error: HoldfastError) -> NoProgress | None:
        failure = (self.step, error.data.get("step"))
        is_repeated = not isinstance(error, RankDied) and failure == self._last_failure
        self._last_failure = failure
        if not is_repeated:
            return None
        return NoProgress(
            f"twice in a row, with no step committed in between: {error}",
            hint=error.hint,
            step=self.step,
            reason=error.reason,
        )

    def commit(self, saved: Saved) -> Commit:
        """Commit a checkpoint: its record is published, latest.json names it, and the hooks are called.

        Calling it again, after a signal has interrupted it, finishes it. While the attempt stops, upkeep is left to the
        next one.

        Raises:
            Superseded: a later attempt owns the run; nothing was changed.
        """
        assert saved == self._uncommitted[0], "chunks are committed in the order of training"
        try:
            self._commit(saved, "preempted" if self._is_stopped else "chunk")
        except NameTaken:
            # The ranks hold a state that no commit names; the next chunk starts new ones.
            self.close()
            self._uncommitted.clear()
            return self.line.follow()
        self._uncommitted.pop(0)
        if not self.is_stopping:
            call_each(self.hooks.upkeep, self)
        assert self.head is not None
        return self.head

    def _commit(self, saved: Saved, why: str) -> Commit:
        """Commit by the hooks: the one path of every commit."""
        commit = self.hooks.commit(self, Proposal(saved, why, lambda: self._publish(saved, why)))
        call_each(self.hooks.notify, self)
        return commit

    def _publish(self, saved: Saved, why: str) -> Commit:
        if self.head is not None and self.head.path == saved.path:
            return self.head  # an interrupted call got so far
        return self.line.commit(saved, why)

    def _commit_adopted(self, saved: Saved) -> None:
        self._commit(saved, "adopted")
        self._owes_upkeep = True  # not before the ranks are restored, and so have verified it

    def read_back(self) -> bool:
        """The newest commit's stored bytes are what was hashed, if it is one that is read back; whether it was.

        Otherwise it is in quarantine, and the next chunk begins at the checkpoint before.

        Raises:
            Superseded: a later attempt owns the run, and judges for itself.
        """
        commit, every = self.head, self.config.parity.every
        if commit is None or not every or (self._has_read_back and commit.number % every):
            return False
        if commit.number == self._restored:
            return False  # its bytes were hashed when the ranks were restored from it
        self._has_read_back = True
        if damaged := checkpoint.verify(self.journal.store, commit, is_urgent=False):
            reason = f"read back after its commit: {'; '.join(map(str, damaged))}"
            self.journal.quarantine(commit.number, reason, self.number)
            self.close()
            self._uncommitted.clear()
            self.line.head = next(self.journal.candidates(self.number), None)
        return True

    def prune(self) -> PruneReport | None:
        """The run has the checkpoints that its retention keeps, and no others.

        Raises:
            Superseded: a later attempt owns the run, perhaps with another policy.
        """
        self.journal.check_fence(self.number)
        first = self._pruned is None  # then also of what earlier attempts have left
        self._pruned = retention.prune(self.journal, self.config.retention, self.steps_per_epoch, collect=first)
        return self._pruned

    def read_retention_report(self) -> PruneReport | None:
        """The last prune's; where nothing was pruned in this attempt, what a prune would do, if it could."""
        if self._pruned is not None:
            return self._pruned
        try:
            return retention.prune(self.journal, self.config.retention, self.steps_per_epoch, dry_run=True)
        except HoldfastError as error:
            log.warning("%s", error)
            return None

    # ---- stop

    def notify(self, notice: Notice) -> None:
        """This machine goes away: what is trained is saved in the last moment that is safe, and `next_chunk` ends.

        May be called from any thread, while chunks are trained.
        """
        log.warning("%s", notice)
        ranks = self._ranks
        if notice.is_advice:
            if ranks is not None:
                ranks.order("save")
            return
        self.notice = notice
        if ranks is not None:
            ranks.tell({"event": "notice"})

    def signal_ranks(self, number: int) -> None:
        """Send all ranks a signal, for a drill."""
        if self._ranks is not None:
            self._ranks.signal(number)

    def _pass_on_notice(self) -> None:
        if self.notice is not None and not self._is_told:
            assert self._ranks is not None
            self._ranks.stop(None if self.notice.is_at_once else self.notice.left_s())
            self._is_told = True

    def stop(self) -> None:
        """Save and commit what is trained, after the step in hand, as far as the time allows, and end the ranks."""
        self._is_stopped = True
        deadline = time.monotonic() + self.config.resume.stop_within_s
        if self._ranks is not None and self._is_claimed:
            self._ranks.stop()
            try:
                while True:
                    event = self._ranks.next_event(max(0.0, deadline - time.monotonic()))
                    if event["event"] == "saved":
                        self._uncommitted.append(Saved.model_validate(event))
            except RankDied:
                pass  # they have ended, as they were told to
            except Unhealthy as error:
                log.warning("%s", error)
        self.close()
        while self._uncommitted:
            self.commit(self._uncommitted[0])
        if self._is_claimed:
            log.info("stopped after step %d, which is saved and committed; the same command continues", self.step)

    def end(self, reason: str, message: str = "") -> None:
        """End the ranks, and record how the attempt ended, if it had claimed the run."""
        self.close()
        if self._is_claimed:
            try:
                self.journal.end_attempt(self.number, reason, message, self.head.step if self.head else 0)
            except HoldfastError as error:
                log.warning("how the attempt ended is not on record: %s", error)


@contextlib.contextmanager
def started_ahead(config: RunConfig) -> Iterator[None]:
    """Start the ranks of the run's next attempt; if it is opened inside the block, it takes them over.

    For a caller that has something else to wait for until then. Ranks that nothing took over end with the block.

    Raises:
        HoldfastError: the run's folder can't be read, or the ranks' output can't be written.
    """
    journal = Journal(open_store(config.store), config.run)
    with launch.started_ahead(*_rank_arguments(config, journal.attempts() + 1, journal.newest())):
        yield


def _rank_arguments(config: RunConfig, number: int, newest: Commit | None) -> tuple[RunConfig, Path, int]:
    """What an attempt's ranks are started with; see `launch.Ranks`."""
    path = Path(config.log.folder) / config.run / f"attempt-{number:08d}.log"
    return config, path, newest.number if newest else 0
