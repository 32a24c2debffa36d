"""One process life of a run: claim the run, find the commit to continue from, train and commit chunks, stop in time.

This code is single-threaded. The ranks are separate processes, and get the order to train the next chunk before the
previous chunk is committed, so that a commit costs no training time. `holdfast.attempt.life.live` calls the methods of
`Attempt` in the right order.
"""

import contextlib
import enum
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NoReturn

from holdfast import checkpoint
from holdfast.attempt.admission import check_drained, check_machine
from holdfast.attempt.commits import Proposal, Publish, publish_commit
from holdfast.attempt.failures import Failures
from holdfast.attempt.line import Line
from holdfast.attempt.lineage import Past, describe_job, judge_drift, judge_environment, judge_self_test
from holdfast.attempt.observers import AttemptView, CheckpointVerdict, Observer, Observers, judge_restore
from holdfast.attempt.opening import (
    Known,
    TrustedKeys,
    apply_skips,
    await_completed,
    describe_beginning,
    describe_ready,
    has_other_skips,
    load_keys,
)
from holdfast.attempt.pipeline import Chunk, Pipeline
from holdfast.attempt.ranks import AttemptRanks, Uncommitted
from holdfast.attempt.rehearsal import Rehearsals
from holdfast.attempt.upkeep import Upkeep
from holdfast.checkpoint import Saved, open_near
from holdfast.config import RunConfig
from holdfast.errors import (
    ConfigError,
    FolderTaken,
    HoldfastError,
    NameTaken,
    OutOfMemory,
    ParentQuarantined,
    RankDied,
    RankHung,
    RecipeBroken,
    RecipeFailed,
    StateError,
    Unhealthy,
)
from holdfast.journal import Commit, Journal
from holdfast.journal.endings import Ending
from holdfast.ledger.durations import LEAST_MARGIN_S, MARGIN_S, Durations
from holdfast.ledger.history import CostHistory
from holdfast.ledger.interval import FIRST_STEPS
from holdfast.machine import faults
from holdfast.machine.gpus.checks import explain_ranks, settle_ranks
from holdfast.machine.preemption import Notice
from holdfast.rank.messages import Progress, Rehearsed, SavedAside, Shadowed
from holdfast.store import open_store

log = logging.getLogger(__name__)

# The longest wait for the code after a user's loop. That code may save a large model, or evaluate for a long time. The
# wait is bounded, because a hang must not occupy a machine forever.
FINISH_WITHIN_S = 3600.0


class Stopping(enum.IntEnum):
    """The stages in which an attempt stops, in their order.

    An attempt goes back from TOLD to TRAINING only when new ranks replace its ranks, because nobody has told the new
    ranks to stop.
    """

    TRAINING = 0
    """The ranks train on."""
    TOLD = 1
    """The ranks were told to save at the last safe moment, and to end."""
    STOPPED = 2
    """The attempt trains nothing more, but still commits saved checkpoints."""


class Attempt:
    """One attempt at a run. `open` starts its ranks and claims the run; `close` or `end` ends the ranks.

    The constructor starts nothing, so that its caller owns the attempt before there are processes to end.

    Attributes:
        ranks: the attempt's ranks.
        upkeep: reads back and prunes checkpoints after a commit; set once the ranks are built.
        notice: the notice that this machine will be taken away; None if there is none.
    """

    def __init__(
        self,
        config: RunConfig,
        number: int | None = None,
        observers: Sequence[Observer] = (),
        publish: Publish | None = None,
    ) -> None:
        """
        Args:
            number: the attempt's number; the next free number if None.
            publish: the function that publishes each commit, which has to call `publish_commit`; if None,
                `publish_commit` itself.
        """
        self.journal = Journal(open_store(config.store), config.run)
        self.number = number or self.journal.next_attempt()
        self.notice: Notice | None = None
        self.ranks = AttemptRanks(config, self.journal, self.number)
        self.rehearsals = Rehearsals(self.journal, self.number, self.ranks, self._tell_verdict, self._has_notice)
        self._is_fresh = False  # whether the ranks have restored the head and trained nothing yet
        self._observers = Observers(observers)
        self._publish: Publish = publish or publish_commit
        self._pipeline = Pipeline(self._choose_stop)
        self._stopping = Stopping.TRAINING
        self._is_on_record = False  # whether the attempt's ending is recorded
        self._reason = ""  # why the attempt began; empty before it has claimed the run
        self._failures = Failures()
        self._commits = Durations(unknown_s=MARGIN_S, least_s=LEAST_MARGIN_S)
        self._history: CostHistory | None = None  # None unless the chunk length is automatic
        self._chunk_s = 0.0  # how many seconds the last chunk's steps took
        self._line: Line | None = None

    @property
    def config(self) -> RunConfig:
        """The run's configuration, with its skip list; the number of ranks is settled when the ranks are started."""
        return self.ranks.config

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the settings with which the ranks train."""
        return self.line.config_fingerprint

    @property
    def _takes_all_gpus(self) -> bool:
        return self.ranks.given.compute.ranks == "all"

    def _has_notice(self) -> bool:
        return self.notice is not None

    @property
    def _is_claimed(self) -> bool:
        return bool(self._reason)

    @property
    def line(self) -> Line:
        assert self._line is not None, "the attempt was never opened"
        return self._line

    # ---- the steps to train

    @property
    def head(self) -> Commit | None:
        """The commit that the run continues from; None before the first commit."""
        return self._line.head if self._line else None

    @property
    def steps_per_epoch(self) -> int:
        return self.ranks.built.steps_per_epoch

    @property
    def total_steps(self) -> int:
        return self.config.epochs * self.steps_per_epoch

    @property
    def step(self) -> int:
        """The newest step whose checkpoint is durable, committed or not."""
        if self._pipeline.uncommitted:
            return self._pipeline.uncommitted[-1].step
        return self.head.step if self.head else 0

    @property
    def is_complete(self) -> bool:
        return self.step >= self.total_steps

    @property
    def is_stopping(self) -> bool:
        """Return whether a signal or a notice has told the attempt to end."""
        return self._stopping > Stopping.TRAINING

    def next_chunk(self) -> Chunk | None:
        """Return the steps to train next; None if the run is complete or the attempt stops.

        If the run is complete, first do the upkeep that an earlier commit still waits for. If the upkeep finds a
        damaged checkpoint, its steps are trained again.
        """
        if self.is_complete and not self.is_stopping:
            self._do_owed_upkeep()  # if the last checkpoint is damaged, the upkeep goes back to an earlier one
        if self.is_complete or self._stopping is Stopping.STOPPED:
            return None
        number = self.line.next_number + len(self._pipeline.uncommitted)
        return Chunk(number, self.step, self._pipeline.stop_after(self.step))

    def _choose_stop(self, step: int) -> int:
        auto_steps = self._history.choose_steps() if self._history else FIRST_STEPS
        return self.config.next_stop(step, self.steps_per_epoch, auto_steps)

    # ---- open: find the commit to continue from

    def open(self) -> None:
        """Claim the run and restore the last verified checkpoint into the ranks; ``head`` is its commit.

        If the run is complete and its last checkpoint verifies, restore nothing. Then claim the run only if the last
        attempt hasn't recorded that it completed the run. On any error, end the ranks. If ranks died, you can call this
        method again: new ranks continue where the first call stopped.

        Raises:
            ConfigDrift: the run exists with different settings, or other code.
            DeterminismError: bit-exactness isn't promised on this machine, and the configuration requires it.
            GateTripped: the gate refuses the restored state; see `Line.resume`.
            NoVerifiedCheckpoint: the run has committed, and none of its checkpoints can be verified.
            RankDied, OutOfMemory: the ranks ended; calling again may help.
            NoProgress: memory ran out twice.
            MachineRefused: an extension or a drain file refuses this machine; or an error of the extension.
            RunHeld: the run is held.
            Superseded: the attempt's number is taken.
        """
        try:
            with self.journal.fenced(self.number):
                if self._is_claimed:
                    self._start_again()
                    self._begin()
                elif self._claim(self._build()):
                    self._begin()
                else:
                    self.close()  # the ranks hold no state, and no step is left to train
        except (RankDied, OutOfMemory) as error:
            self.close()
            raise self._note_failure(error) from error.__cause__
        except BaseException:
            self.close()
            raise
        self._tell("opened")

    def _build(self) -> Known:
        """Start the ranks, and make `line` and `upkeep`. Return the state of the run that the journal records."""
        check_drained(self.ranks.config.resume.drain_file)
        check_machine(self.ranks.config)
        signing_key, trusted_keys = load_keys(self.ranks.given)
        config, skip_records = self._read_skips(trusted_keys)
        if self._takes_all_gpus:
            log.info('compute.ranks = "all" is %d here', config.compute.rank_count)
        known = Known.read(self.journal)
        self.journal.check_held(known.attempts)
        try:
            self.ranks.build(known.newest)
        except ConfigError as error:
            raise (explain_ranks(error, config.compute.rank_count) if self._takes_all_gpus else error) from None
        self._line = Line(
            self.journal,
            self.number,
            self.ranks.present.fingerprint,
            self.steps_per_epoch,
            signing_key=signing_key,
            trusted_keys=trusted_keys,
            commit_adopted=self._commit_adopted,
            near=open_near(config),
        )
        self._line.skip_records = skip_records
        self.upkeep = Upkeep(self._line, self.ranks, self.fall_back, lambda: self.rehearsals.earlier.compared_from)
        return known

    def _read_skips(self, trusted_keys: TrustedKeys) -> tuple[RunConfig, list[str]]:
        """Add the run's skip list to the ranks' configuration. Return it, and the names of the list's records."""
        given, names = apply_skips(self.journal, self.ranks.given, trusted_keys)
        self.ranks.config = settle_ranks(given)
        return self.config, names

    def _claim(self, known: Known) -> bool:
        """Claim the run, unless nothing is left to do. Return whether the run still has steps to train."""
        is_end, lineage = self._judge(known)
        if is_end and (known.is_finished or self._is_being_finished(known)):
            return False
        known.refuse_unfinished_import(self.journal)
        reason = known.find_reason(self.steps_per_epoch, self.total_steps)
        self.journal.begin(self.config.recipe)  # raises an error if a later version has written the run's format
        present = self.ranks.present
        self.journal.claim_attempt(
            self.number, reason, self.ranks.host, os.getpid(), present.environment, lineage, self.ranks.began_at
        )
        self._reason = reason
        # Write the settings right after the claim: if this process were suspended in between, it could replace the
        # settings that a later attempt has written.
        self.journal.record_config(self.fingerprint, present.identity, self.config.model_dump(mode="json"))
        known.record_lost_attempts(self.journal, self.number)
        self._history = CostHistory(self.journal, self.number) if self.config.chunk.is_auto else None
        self.upkeep.is_owed = known.newest is not None  # the last attempt may not have done its upkeep
        if is_end:
            log.info(
                "attempt %d (%s): all steps are trained already; this attempt only prunes and writes reports",
                self.number,
                reason,
            )
        return not is_end

    def _is_being_finished(self, known: Known) -> bool:
        is_open = known.attempts > 0 and known.ending is None
        return is_open and await_completed(self.journal, known.attempts)

    def _judge(self, known: Known) -> tuple[bool, dict[str, Any]]:
        """Judge what changed in settings, code and environment since the newest commit.

        If that commit is at the run's last step and its checkpoint verifies, the run has reached its end: make the
        commit the head, from which the attempt continues.

        Returns:
            whether the run has reached its end, and the lineage to record for the attempt: the changes, and the commits
            that the attempt descends from.
        """
        newest, present = known.newest, self.ranks.present
        is_end, lineage = False, dict[str, Any]()
        if newest is not None:
            newest, past, lineage["drift"] = self._judge_drift(newest, known.epochs)
            if is_end := self._is_verified_end(newest):
                self.line.check_trusted(newest)
                self.line.take(newest)
                self.ranks.verified = newest.number
            else:
                judge_self_test(self.journal, self.number, past, present, self.config.compute)
                verdict = judge_environment(past, present, self.config.resume)
                lineage["environment"] = asdict(verdict)
                self.rehearsals.due.is_changed = bool(lineage["drift"]) or verdict.promise != "identical"
            lineage["continues"] = {"commit": newest.number, "checkpoint_sha256": newest.checkpoint_sha256}
        if ancestor := self.ranks.ancestor:
            lineage["ancestor"] = ancestor.describe()
        return is_end, {name: value for name, value in lineage.items() if value} | describe_job(self.config.compute)

    def _judge_drift(self, newest: Commit, epochs: int | None) -> tuple[Commit, Past, dict[str, Any]]:
        """Judge the changes of settings and code since the newest commit in which `Line.find_break` finds no break.

        `Line.resume` will quarantine the commits in which it finds a break. They may come from another run, with
        different settings and code than this run's earlier commits.

        Args:
            newest: the newest commit, which is judged if all commits have a break.

        Returns:
            the commit, its records, and the accepted changes for the lineage.
        """
        unbroken = (each for each in self.journal.candidates() if not self.line.find_break(each))
        commit = next(unbroken, newest)
        past = Past.read(self.journal, commit, self.line.read_metadata)
        return commit, past, judge_drift(past, self.ranks.present, self.config, epochs)

    def _begin(self) -> None:
        """Restore the head of a claimed run, and log where training begins."""
        self.rehearsals.sweep()
        self._resume()
        log.info("run %s: %s", self.config.run, describe_ready(self.ranks.built, self.config.epochs))
        log.info("attempt %d (%s): %s", self.number, self._reason, describe_beginning(self.head, self.total_steps))
        if self.config.determinism.mode == "fast":
            log.warning(
                'determinism.mode = "fast": the same steps may give different bits each time, so a resume may not be '
                "exact"
            )

    def _is_verified_end(self, newest: Commit) -> bool:
        is_end = newest.step >= self.total_steps and not self.line.find_break(newest)
        return is_end and not checkpoint.verify(self.journal.store, newest)

    def _resume(self) -> None:
        """Restore the head into the ranks. First adopt a checkpoint that dead ranks have saved, if there is one.

        If a skip list was written after these ranks were started, start new ranks, which follow the list. A list that
        is written later quarantines the head, and the next commit notices that.
        """
        self._pipeline.uncommitted.clear()
        self.line.resume(self._restore)
        while has_other_skips(self.journal, self.line.skip_records):
            self.ranks.end_running()
            self._start_again()
            self.line.resume(self._restore)
        self._is_fresh = True
        if self.head is None:
            self.ranks.begin_from_ancestor()

    def _restore(self, commit: Commit, aside: Uncommitted | None = None) -> HoldfastError | None:
        """Restore a commit into the ranks, and tell the observers of the verdict; see `AttemptRanks.restore`."""
        began = time.monotonic()
        try:
            if aside is None:
                error = self.ranks.restore(commit, self.line.read_metadata)
            else:
                error = self.ranks.restore(commit, aside.read_metadata, aside.folder)
        except StateError as refusal:
            self._tell_verdict(judge_restore(refusal, commit, began))
            raise
        self._tell_verdict(judge_restore(error, commit, began))
        return error

    # ---- train

    def train_chunk(self, chunk: Chunk) -> Saved | None:
        """Train a chunk; return its checkpoint, which is durable but not committed yet.

        If the ranks have died, start new ones from the last verified checkpoint. Return None in two cases: the dead
        ranks had already saved this chunk's checkpoint, which is now adopted; or the chunk had begun from a near copy
        on this machine's disk, and the checkpoint on the store is damaged.

        Raises:
            RankDied, RecipeFailed, Unhealthy, OutOfMemory: the ranks ended; calling again may help.
            NoProgress: the same step failed twice, with nothing committed in between.
            Superseded: a later attempt owns the run, and has deleted a file of this attempt.
        """
        try:
            with self.journal.fenced(self.number):
                self._abandon_rehearsal(chunk.stop)
                self._finish_rehearsal()
                if self.ranks.running is None:
                    self._renew()
                if self.step >= chunk.stop:
                    return None
                if self.notice is None:
                    self.rehearsals.earlier.compare(self.line, chunk.stop, self._renew, is_fresh=self._is_fresh)
                saved = self._await_saved(chunk.stop)
                if saved is None:
                    return None
        except (RankDied, RecipeFailed, Unhealthy, OutOfMemory) as error:
            self.close()
            if self._stopping is Stopping.TOLD and isinstance(error, RankDied):
                self._stopping = Stopping.STOPPED
                # ranks that answered had no new step to save
                if error.data.get("is_silent"):
                    log.warning(
                        "no checkpoint could be saved before the machine was due to be taken away; the run continues "
                        "from its last commit"
                    )
                return None
            raise self._note_failure(error) from error.__cause__
        self.ranks.hangs = 0
        if saved.near_problem:
            log.warning("%s", saved.near_problem)
        self.ranks.warn(saved.warnings)
        self.line.note_unkept(saved.unkept)
        if self._history:
            self._history.note_saved(saved, saved.step - self.step)
        self._pipeline.add(saved)
        if self._stopping is Stopping.TOLD and saved.step < chunk.stop:
            self._stopping = Stopping.STOPPED
        faults.reach("chunk-reported")
        return saved

    def _finish_rehearsal(self) -> None:
        """Finish a rehearsal that has begun. Afterwards the ranks have no more orders."""
        if self.rehearsals.is_begun:
            self.rehearsals.finish(self.line, self._renew)
            self._is_fresh = False
            self._pipeline.forget_orders()

    def _abandon_rehearsal(self, stop: int) -> None:
        """If a notice leaves no time for a rehearsal that has begun, abandon it: the living ranks train on.

        Args:
            stop: the last step of the chunk, at which the ranks save. If they rehearse inside the chunk, they lack the
                order for this save.
        """
        if self.notice is not None:
            if self.rehearsals.is_inside(stop):
                self._pipeline.forget_orders()
            self.rehearsals.forget()

    def _renew(self, start: Commit | Uncommitted | None = None) -> None:
        """Replace the ended ranks by new ranks, and restore the newest commit into the new ranks.

        Args:
            start: a commit, to restore the state before its steps; or a rehearsal's checkpoint. By default the newest
                commit.

        Raises:
            CheckpointDamaged, GateTripped: the checkpoint before the commit, or the rehearsal's, can't be restored.
        """
        self._start_again()
        error = None
        if start is None:
            self._resume()
        elif isinstance(start, Uncommitted):
            error = self._restore(start.commit, start) if self.head is not None else None
        elif parent := self.journal.find_parent(start):
            error = self._restore(parent)
        else:
            self.ranks.begin_from_ancestor()
        if error is not None:
            raise error

    def _start_again(self) -> None:
        if has_other_skips(self.journal, self.line.skip_records):
            self.ranks.ahead.end()  # ranks that were started early follow the previous list
            _, self.line.skip_records = self._read_skips(self.line.trusted_keys)
        self.ranks.build_again(self.head)
        self._follow_skips()
        self._forget_order_to_stop()
        self._pipeline.forget_orders()

    def _follow_skips(self) -> None:
        """Adopt the settings of the new ranks. Only a new skip list can have changed their fingerprint."""
        present = self.ranks.present
        if present.fingerprint != self.fingerprint:
            self.line.config_fingerprint = present.fingerprint
            self.journal.record_config(self.fingerprint, present.identity, self.config.model_dump(mode="json"))
            log.info("skipped steps (their batches are read, but not trained): %s", self.config.skip or "none any more")

    def _note_failure(self, error: HoldfastError) -> HoldfastError:
        """Record a failure of the ranks. Return the error to raise: this error, or `NoProgress` if it was repeated."""
        self.ranks.hangs += isinstance(error, RankHung)
        if self._history and isinstance(error, RankDied):
            self._history.note_death()
        self._tell("failed", error)
        if isinstance(error, RecipeBroken):
            error.hint = error.hint or "fix the code, then start the run again: it continues from its last commit"
        return self._failures.find_no_progress(error, self.step) or error

    def _await_saved(self, stop: int) -> Saved | None:
        ranks, began = self.ranks.own, time.monotonic()
        if self._is_fresh:  # send this before the order to train: short steps would end before a later order arrives
            self._pass_on_notice()
        self._is_fresh = False
        self.ranks.note_training()
        self._order_steps(self.step, stop)
        is_owed = self.rehearsals.earlier.is_owed
        stops = stop, self._pipeline.stop_after(stop), self.total_steps
        is_rehearsed = not is_owed and self.rehearsals.may_follow(self.line, stops, self._chunk_s)
        if not is_rehearsed and not is_owed:
            self._order_next(stop)  # the ranks train the next chunk while this chunk is committed
        self._do_owed_upkeep()
        if self.ranks.running is None:  # the upkeep found damage and ended the ranks
            return None
        while True:
            self._pass_on_notice()
            if self.notice is not None and self.rehearsals.is_inside(stop):
                self._abandon_rehearsal(stop)
                self._order_steps(self.step, stop)
            event = ranks.next_event(self.notice.left_s() if self.notice else None)
            if isinstance(event, Saved):
                self._chunk_s = event.train_s
                if slow_rank := ranks.find_slow():
                    log.warning("%s", slow_rank)
                if is_rehearsed and event.step >= stop:  # a rehearsal has already trained the whole chunk
                    self._rehearse_or_order(stop, event.train_s, (stop - self.step) / (event.train_s or 1.0))
                return event.model_copy(update={"restart_s": self.ranks.restart_s, "slow_rank": slow_rank})
            # The ranks have stopped as the notice told them, and the chunk's end was their last save. Ranks that only a
            # signal has stopped are replaced.
            if isinstance(event, Shadowed) and self._stopping is Stopping.TOLD:
                self.rehearsals.earlier.note_shadow(event)
                self._stopping = Stopping.STOPPED
                return None
            if isinstance(event, Rehearsed | SavedAside):
                self.rehearsals.note(event)
                if self.rehearsals.is_lived(stop) and self.notice is None:
                    self._finish_rehearsal()
                    return self._await_saved(stop) if self.ranks.running is not None else None
            if isinstance(event, Progress):
                self._tell("progressed", event)
                if self.rehearsals.is_start(event.step):
                    self._rehearse_inside(stop, event)
                elif is_rehearsed and event.step >= stop:
                    is_rehearsed = False
                    self._rehearse_or_order(stop, time.monotonic() - began, event.steps_per_s)
                elif is_rehearsed:
                    self.rehearsals.start_ahead(event.step, (stop, self.total_steps), event.steps_per_s)

    def _rehearse_or_order(self, stop: int, trained_s: float, steps_per_s: float) -> None:
        """After the last step of a chunk, order a rehearsal if one is due; otherwise order the next chunk."""
        if stop < self.total_steps and not self.is_stopping and self.notice is None:
            stops = self._pipeline.stop_after(stop), self.total_steps
            if self.rehearsals.begin(self.line, stop, stops, trained_s, steps_per_s):
                return
        self._order_next(stop)

    def _rehearse_inside(self, stop: int, event: Progress) -> None:
        """Order the rehearsal for which the ranks save inside a chunk; if there is no time for it, order the chunk."""
        is_stopping = self.is_stopping or self.notice is not None
        if not self.rehearsals.begin_inside(self.total_steps, event.steps_per_s, is_stopping=is_stopping):
            self.ranks.own.train(self._pipeline.stop_after(event.step), self.fingerprint)

    def _order_next(self, stop: int) -> None:
        if stop < self.total_steps and not self.is_stopping:
            self._order_steps(stop, self._pipeline.stop_after(stop))

    def _order_steps(self, start: int, stop: int) -> None:
        """Order the ranks to train the chunk ``(start, stop]``, or the steps of it before a rehearsal."""
        if self._pipeline.is_new(stop):
            earlier, step, aside = self.rehearsals.earlier, 0, ""
            if not earlier.is_owed and self.notice is None:
                # the compared steps may be few, and may end before an epoch's end
                first = max(start, earlier.reached)
                step, aside = self.rehearsals.plan(self.line, first, stop, self.total_steps, self._chunk_s)
            self.ranks.own.train(step or stop, self.fingerprint, aside=aside)

    # ---- commit

    def commit(self, saved: Saved) -> Commit | None:
        """Publish a checkpoint's commit and latest.json, tell the observers, and do the upkeep; return the head.

        Call it again to finish a call that a signal has interrupted. An attempt that is stopping leaves upkeep to the
        next attempt. If another commit uses the checkpoint's folder, the head stays, and the chunk has to be trained
        again. If the head was quarantined meanwhile, an earlier commit becomes the head.

        Raises:
            MachineRefused: the head was quarantined, and an extension now refuses this machine.
            Superseded: a later attempt owns the run; nothing was changed.
        """
        assert saved == self._pipeline.uncommitted[0], "chunks are committed in the order of training"
        try:
            reason = "preempted" if self._stopping is Stopping.STOPPED else "chunk"
            self._commit(Proposal(saved, reason, self.is_stopping))
        except NameTaken:
            # The ranks hold a state that no commit names: the next chunk needs new ranks.
            self.close()
            self._pipeline.uncommitted.clear()
            return self.line.follow()
        except (FolderTaken, ParentQuarantined) as error:
            log.warning("%s; the steps of that checkpoint are trained again", error)
            if isinstance(error, ParentQuarantined) and not self.is_stopping:
                self._go_back()
            else:
                self.fall_back()
            return self.head
        self._pipeline.uncommitted.pop(0)
        if not self.is_stopping:
            self.upkeep.do()
        return self.head

    def _commit(self, proposal: Proposal) -> None:
        """Make a commit and tell the observers.

        Every commit is made here: of a chunk, at a stop, of an adopted checkpoint.
        """
        began = time.monotonic()
        commit = self._publish(self.line, proposal)
        self._commits.add(time.monotonic() - began)
        self._tell("committed", commit)

    def _commit_adopted(self, saved: Saved) -> None:
        self._commit(Proposal(saved, "adopted", self.is_stopping))
        self.upkeep.is_owed = True  # do the upkeep later, after the restore has verified the checkpoint

    def _do_owed_upkeep(self) -> None:
        """Do the upkeep if an earlier commit still waits for it and no notice has told the attempt to end."""
        if self.upkeep.is_owed and self.notice is None:
            self.upkeep.do()

    def _tell(self, what: str, *news: object) -> None:
        """Call the method ``what`` of each `Observer` with a view of this attempt and with ``news``."""
        total, built = (self.total_steps, self.ranks.built) if self._line else (0, None)
        known = self.config, self.journal, self.number, self.head, self.step, total, built
        view = AttemptView(*known, self.ranks.read_beats)
        self._observers.tell(what, view, *news)

    def _tell_verdict(self, verdict: CheckpointVerdict) -> None:
        self._tell("judged", verdict)

    def _go_back(self) -> None:
        self.fall_back()
        check_machine(self.ranks.config)

    def fall_back(self) -> None:
        """Make the newest commit that isn't quarantined the head, and end the ranks: the next chunk starts new ones."""
        self.close()
        self._pipeline.uncommitted.clear()
        self.line.head = next(self.journal.candidates(self.number), None)

    # ---- stop

    def notify(self, notice: Notice) -> None:
        """Stop for a notice: save at the last safe moment, and train nothing more.

        If the machine is only likely to be taken away (``is_advice``), save now and train on.

        May be called from any thread while chunks are trained.
        """
        log.warning("%s", notice)
        ranks = self.ranks.running
        if notice.is_advice:
            if ranks is not None and not self.rehearsals.is_at_commit:  # ranks before a rehearsal are saving already
                ranks.save()
            return
        self.notice = notice
        if ranks is not None:
            ranks.wake()

    def _pass_on_notice(self) -> None:
        if self.notice is not None and not self.is_stopping:
            left_s = max(self.notice.left_s() - self._commits.bound_s, 0.0)
            self.ranks.own.stop(None if self.notice.is_at_once else left_s)
            self._stopping = Stopping.TOLD

    def _forget_order_to_stop(self) -> None:
        """Forget that the ranks were told to stop, so that the new ranks that replace them are told, too."""
        if self._stopping is Stopping.TOLD:
            self._stopping = Stopping.TRAINING

    def stop(self) -> None:
        """Finish the current step, save and commit within ``resume.stop_within_s``, and end the ranks."""
        self._stopping = Stopping.STOPPED
        deadline = time.monotonic() + self.config.resume.stop_within_s
        self.rehearsals.forget()
        self.ranks.put_back()
        ranks, trained, reason = self.ranks.running, 0, ""
        if left := self.rehearsals.left:
            # Nobody has compared the steps of these new ranks, so the next attempt trains the steps again.
            ranks = None
            self.rehearsals.earlier.note_shadow(Shadowed(lines=left))
        if ranks is not None and self._is_claimed:
            self._add_lost()
            ranks.stop()
            try:
                self._follow_stop(deadline)
            except RankDied as error:  # not an error if the ranks answered, because they have ended as ordered
                within_s = self.config.resume.stop_within_s
                reason = (
                    f"within resume.stop_within_s = {within_s:g} s" if error.data.get("is_silent") else f"({error})"
                )
            except Unhealthy as error:
                reason = "because a health value left its limits"
                log.warning("%s", error)
            trained = 0 if self.rehearsals.earlier.has_shadow else ranks.count_steps()
        self.close()
        self._commit_all()
        if self._is_claimed and trained > self.step:
            log.warning(
                "stopped at step %d, but steps %d-%d could not be saved %s; the same command trains these steps again",
                trained, self.step + 1, trained, reason,
            )  # fmt: skip
        elif self._is_claimed:
            log.info(
                "stopped after step %d, which is saved and committed; the same command continues the run", self.step
            )

    def _add_lost(self) -> None:
        """Add the checkpoints whose reports a signal has interrupted after they had left the queue of events.

        Without their commits, the commit of the ranks' next save would name a parent that no commit has.
        """
        for saved in [*self.ranks.own.saved]:
            if saved.step > self.step:
                self._pipeline.add(saved.model_copy(update={"restart_s": self.ranks.restart_s}))

    def _follow_stop(self, deadline: float) -> NoReturn:
        """Commit the saves of ranks that were told to stop, and keep the trail of the steps that they train afterwards.

        Args:
            deadline: on the clock of `time.monotonic`.

        Raises:
            RankDied: the ranks have ended, or reported nothing until the deadline.
            Unhealthy: the model is unhealthy, so the ranks haven't saved it.
        """
        ranks = self.ranks.own
        while True:
            event = ranks.next_event(max(0.0, deadline - time.monotonic()))
            if isinstance(event, Saved) and event.step > self.step:
                self._pipeline.add(event.model_copy(update={"restart_s": self.ranks.restart_s}))
                self._commit_all()
            elif isinstance(event, Shadowed):
                self.rehearsals.earlier.note_shadow(event)

    def _commit_all(self) -> None:
        while self._pipeline.uncommitted:
            self.commit(self._pipeline.uncommitted[0])

    def finish_stopped(self) -> bool:
        """Finish a run that was told to end in its last step, after `stop`: do its upkeep.

        Returns:
            whether the run is complete.
        """
        if not self._is_claimed or self.head is None or not self.is_complete:
            return False
        self.upkeep.do()  # if the last checkpoint is damaged, the upkeep goes back to an earlier one
        if self.is_complete:
            log.info("this was the run's last step: the run is complete")
        return self.is_complete

    def close(self) -> None:
        """End this attempt's ranks."""
        self.ranks.end()
        self.rehearsals.reset()
        self._pipeline.forget_orders()

    def _finish(self) -> None:
        """Wait while the ranks of a complete run execute the code that follows the user's own loop."""
        ranks = self.ranks.running
        if ranks is None or self.is_stopping or not self.is_complete:
            return
        try:
            ranks.finish(FINISH_WITHIN_S)
        except HoldfastError as error:
            log.warning("the run is complete, but the code after its loop failed: %s", error)

    def _await_shadow(self) -> None:
        """Wait for the steps that the ranks train after their last save, if a notice has stopped them."""
        ranks, notice = self.ranks.running, self.notice
        if ranks is None or notice is None or self._stopping is not Stopping.STOPPED:
            return
        with contextlib.suppress(HoldfastError):
            self._follow_stop(time.monotonic() + min(notice.left_s(), self.config.resume.stop_within_s))

    def end(self, ending: Ending) -> None:
        """End the ranks, and record how the attempt ended, if it had claimed the run.

        If the run is complete, write the record before the code that follows a user's loop has run, because that code
        may take long. Without the record a second command would claim the run, as if this attempt had vanished.
        """
        try:
            if ending.reason == "completed":
                self._record_ending(ending)
            self._finish()
            self._await_shadow()
        finally:  # record the ending even if a signal interrupts the wait
            self.close()
            if self._is_claimed and self.head is not None:
                self.rehearsals.earlier.end(self.head)
            self._record_ending(ending)
            self._tell("ended")

    def _record_ending(self, ending: Ending) -> None:
        if not self._is_claimed or self._is_on_record:
            return
        step = self.head.step if self.head else 0
        try:
            self.journal.end_attempt(self.number, Ending(ending.reason, ending.message, step))
            self._is_on_record = True
        except HoldfastError as error:
            log.warning("the reason why this attempt ended can't be recorded: %s", error)
