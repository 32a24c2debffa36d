"""One process life of a run: claim it, find where to go on, train chunks, commit them, stop in time.

Single-threaded: the ranks are processes of their own, and they are ordered to train the next chunk before the last one
is committed, so that a commit costs no training time.
"""

import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import checkpoint, errors, faults, retention
from holdfast.attempt.line import Line
from holdfast.checkpoint import Saved
from holdfast.config import RunConfig
from holdfast.errors import CheckpointDamaged, HoldfastError, NameTaken, NoProgress, RankDied, RecipeFailed
from holdfast.fingerprint import fingerprint, validate_fingerprint
from holdfast.journal import Commit, Journal, PruneReport
from holdfast.launch import Ranks
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


class Attempt:
    """One attempt at a run. Making it starts the ranks; `open` then claims the run.

    Attributes:
        line: the run's commits.
        watch: called with the ranks' progress events, see `holdfast.training.train`.
        description: what the ranks built; see `holdfast.rank.describe`.
    """

    def __init__(self, config: RunConfig, number: int | None = None) -> None:
        self.config = config
        self.journal = Journal(open_store(config.store), config.run)
        self.number = number or self.journal.attempts() + 1
        self.watch: Watch = lambda event: None
        self._is_claimed = False
        self._uncommitted: list[Saved] = []
        self._ordered_stop = 0
        self._last_failure: tuple[int, object] | None = None
        self._ranks: Ranks | None = None
        self._pruned: PruneReport | None = None
        self.description: dict[str, Any] = {}
        signing_key = load_signing_key(config.signing_key) if config.signing_key else None
        trusted_keys = [load_trusted_key(source) for source in config.resume.trusted_keys]
        self._start_ranks()
        self.fingerprint = fingerprint(self.identity)
        self.line = Line(
            self.journal,
            self.number,
            self.fingerprint,
            self.steps_per_epoch,
            signing_key=signing_key,
            trusted_keys=trusted_keys,
        )

    def close(self) -> None:
        """No rank of this attempt is left."""
        if self._ranks is not None:
            self._ranks.end()
            self._ranks = None

    # ---- what is trained

    @property
    def identity(self) -> dict[str, Any]:
        """What the fingerprint is computed from: the configuration's part, and what only the recipe knew."""
        data = {"sha256": self.description["data_sha256"], "samples": self.description["samples"]}
        return self.config.identity | {"settings": self.description["settings"], "data": data}

    @property
    def head(self) -> Commit | None:
        """The commit that the run continues from; None before the first."""
        return self.line.head

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

    def next_chunk(self) -> Chunk | None:
        """What is to be trained next; None if nothing is."""
        if self.is_complete:
            return None
        stop = self.config.chunk.next_stop(self.step, self.steps_per_epoch, self.total_steps)
        return Chunk(self.line.next_number + len(self._uncommitted), self.step, stop)

    # ---- open: where to go on

    def open(self) -> None:
        """The run is ours, and the ranks hold the state of the last verified checkpoint, which is ``head``.

        A run that is complete, and verifies, is not claimed.

        Raises:
            ConfigDrift: the run exists with other settings.
            NoVerifiedCheckpoint: it has committed, and nothing of that can be verified.
            Superseded: the attempt's number is taken.
        """
        newest = self.journal.newest()
        if newest is not None:
            saved_config = self.journal.read_config(newest.config_fingerprint)
            validate_fingerprint(
                self.identity, newest.config_fingerprint, saved_config.identity if saved_config else None
            )
            if newest.step >= self.total_steps and not checkpoint.verify(self.journal.store, newest):
                self.line.check_trusted(newest)
                self.line.head = newest
                self.line.renew_latest()
                return
        why = self._why(newest)
        self.journal.begin(self.config.recipe)  # refuses a later format
        environment = {"sources": self.description["sources"], **self.description["environment"]}
        self.journal.claim_attempt(self.number, why, platform.node(), os.getpid(), environment)
        self._is_claimed = True
        self.journal.record_config(self.fingerprint, self.identity, self.config.model_dump(mode="json"))
        self._resume()
        log.info("%s", self._what())
        log.info("attempt %d (%s): %s", self.number, why, self._where_from())

    def _why(self, newest: Commit | None) -> str:
        if self.journal.attempts() == 0:
            return "fresh"
        if newest is not None and newest.why == "preempted":
            return "preempted"
        epochs = self.journal.read_epochs()
        if newest is not None and epochs is not None and newest.step >= epochs * self.steps_per_epoch:
            return "extended"
        return "continued"

    def _what(self) -> str:
        built = self.description
        return (
            f"run {self.config.run}: {built['model_params']:,} parameters, {built['samples']:,} samples, "
            f"{self.config.epochs} epochs of {self.steps_per_epoch} steps, on {built['device']}"
        )

    def _where_from(self) -> str:
        if self.head is None:
            return f"begins with step 0 of {self.total_steps}"
        return f"continues from {self.head.path}, step {self.head.step} of {self.total_steps}"

    def _start_ranks(self) -> None:
        path = Path(self.config.log.folder) / self.config.run / f"attempt-{self.number:08d}.log"
        self._ranks = Ranks(self.config, path)
        self._ordered_stop = 0
        try:
            self.description = self._ranks.expect("ready")
        except BaseException:
            self.close()
            raise

    def _resume(self) -> None:
        """The ranks hold the state of the head; nothing that was saved is left uncommitted."""
        self._uncommitted.clear()
        self.line.resume(self._restore)

    def _restore(self, commit: Commit) -> CheckpointDamaged | None:
        """The ranks now hold the commit's state; or how it is damaged."""
        assert self._ranks is not None
        self._ranks.order("restore", commit=commit.model_dump())
        event = self._ranks.next_event()
        return None if event["event"] == "restored" else CheckpointDamaged(errors.from_json(event).message)

    # ---- train and commit

    def train_chunk(self, chunk: Chunk) -> Saved | None:
        """The chunk is trained, and its checkpoint is durable; it doesn't count yet.

        Ranks that died are started anew from the last verified checkpoint. If that turns out to be the chunk's own,
        saved before they died, it is adopted: there is nothing left to do, and None is returned.

        Raises:
            RankDied, RecipeFailed: the ranks ended; calling again may help.
            NoProgress: the recipe raised in the same step as before, and nothing was committed in between.
        """
        try:
            if self._ranks is None:
                self._start_ranks()
                self._resume()
            if self.step >= chunk.stop:
                return None
            saved = self._await_saved(chunk.stop)
        except (RankDied, RecipeFailed) as error:
            self.close()
            raise self._is_repeated(error) or error from error.__cause__
        self._uncommitted.append(saved)
        following = self.next_chunk()
        if following is not None:
            self._order_steps(following.stop)
        faults.reach("chunk-reported")
        return saved

    def _order_steps(self, stop: int) -> None:
        assert self._ranks is not None
        last = self._uncommitted[-1].metadata if self._uncommitted else self.head
        parent = last.checkpoint_sha256 if last else ""
        self._ranks.order("train", stop=stop, parent=parent, fingerprint=self.fingerprint)
        self._ordered_stop = stop

    def _await_saved(self, stop: int) -> Saved:
        assert self._ranks is not None
        if self._ordered_stop != stop:
            self._order_steps(stop)
        while True:
            event = self._ranks.next_event()
            if event["event"] == "saved":
                return Saved.model_validate(event)
            self.watch(event)

    def _is_repeated(self, error: RankDied | RecipeFailed) -> NoProgress | None:
        failure = (self.step, error.data.get("step"))
        is_repeated = isinstance(error, RecipeFailed) and failure == self._last_failure
        self._last_failure = failure
        if not is_repeated:
            return None
        return NoProgress(
            f"twice in a row, with no step committed in between: {error}", hint=error.hint, step=self.step
        )

    def commit(self, saved: Saved, why: str = "chunk") -> Commit:
        """The checkpoint counts: its commit is on record, and latest.json names it.

        Doing it again, after a signal has interrupted it, finishes it.

        Raises:
            Superseded: a later attempt owns the run; nothing was changed.
        """
        assert saved == self._uncommitted[0], "chunks are committed in the order of training"
        if self.head is None or self.head.path != saved.path:
            try:
                self.line.commit(saved, why)
            except NameTaken:
                # The ranks hold a state that no commit names; the next chunk starts new ones.
                self.close()
                self._uncommitted.clear()
                return self.line.follow()
        self._uncommitted.pop(0)
        assert self.head is not None
        return self.head

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

    def stop(self) -> None:
        """The step in hand is done, saved and committed, or the time is up; no rank is left."""
        deadline = time.monotonic() + self.config.resume.stop_within_s
        if self._ranks is not None and self._is_claimed:
            self._ranks.order("stop")
            try:
                while True:
                    event = self._ranks.next_event(max(0.0, deadline - time.monotonic()))
                    if event["event"] == "saved":
                        self._uncommitted.append(Saved.model_validate(event))
            except RankDied:
                pass  # they have ended, as they were told to
        self.close()
        while self._uncommitted:
            self.commit(self._uncommitted[0], "preempted")
        if self._is_claimed:
            log.info("stopped after step %d, which is saved and committed; the same command continues", self.step)
