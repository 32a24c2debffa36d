"""One process life of a run: claim it, find where to go on, train chunks, commit them, stop in time.

Single-threaded: the ranks are processes of their own, and they are ordered to train the next chunk before the last one
is committed, so that a commit costs no training time.
"""

import contextlib
import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import checkpoint, errors, faults, retention
from holdfast.checkpoint import Saved
from holdfast.config import RunConfig
from holdfast.errors import NameTaken, NoProgress, NoVerifiedCheckpoint, RankDied, RecipeFailed
from holdfast.fingerprint import fingerprint, validate_fingerprint
from holdfast.journal import Commit, Journal, now
from holdfast.launch import Ranks
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
        head: the commit that the run continues from; None before the first.
        watch: called with the ranks' progress events, see `holdfast.training.train`.
        description: what the ranks built; see `holdfast.rank.describe`.
    """

    def __init__(self, config: RunConfig, number: int | None = None) -> None:
        self.config = config
        self.journal = Journal(open_store(config.store), config.run)
        self.number = number or self.journal.attempts() + 1
        self.head: Commit | None = None
        self.watch: Watch = lambda event: None
        self._is_claimed = False
        self._uncommitted: list[Saved] = []
        self._ordered_stop = 0
        self._next_number = 1
        self._last_failure: tuple[int, object] | None = None
        self._ranks: Ranks | None = None
        self._pruned: retention.PruneReport | None = None
        self.description: dict[str, Any] = {}
        self._start_ranks()
        self.fingerprint = fingerprint(self.identity)

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
        return Chunk(self._next_number + len(self._uncommitted), self.step, stop)

    # ---- open: where to go on

    def open(self) -> None:
        """The run is ours, and the ranks hold the state of the last verified checkpoint, which is ``head``.

        A run that is complete, and verifies, is not claimed.

        Raises:
            ConfigDrift: the run exists with other settings.
            NoVerifiedCheckpoint: it has committed, and nothing of that can be verified.
            Superseded: the attempt's number is taken.
        """
        if self.journal.exists():
            self.journal.read_run()  # refuses a later format
        newest = self.journal.newest()
        if newest is not None:
            saved_config = self.journal.read_config(newest.config_fingerprint) or {}
            validate_fingerprint(self.identity, newest.config_fingerprint, saved_config.get("identity"))
            if newest.step >= self.total_steps and not checkpoint.verify(self.journal.store, newest):
                self.head = newest
                self._renew_latest(newest)
                return
        why = self._why(newest)
        self.journal.begin(self.config.recipe)
        environment = {"sources": self.description["sources"], **self.description["environment"]}
        self.journal.claim_attempt(self.number, why, platform.node(), os.getpid(), environment)
        self._is_claimed = True
        self.journal.record_config(
            self.fingerprint, {"identity": self.identity, "config": self.config.model_dump(mode="json")}
        )
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
        """Adopt what was saved and not committed, then walk back to the newest checkpoint that verifies."""
        self._uncommitted.clear()
        while True:
            self.head = next(self.journal.candidates(self.number), None)
            self._next_number = self.journal.newest_number() + 1
            if self._adopt():
                continue
            if self.head is None or self._restore(self.head):
                break
        if self.head is None and self.journal.has_committed():
            raise self._nothing_verified()
        if self.head is not None:
            self._renew_latest(self.head)

    def _adopt(self) -> bool:
        """Whether a checkpoint that dead ranks had left was committed."""
        parent = self.head.checkpoint_sha256 if self.head else ""
        first = self.head.number + 1 if self.head else 1
        given_up = {self.journal.path_of(number) for number in range(first, self._next_number)}
        for saved in checkpoint.find_orphans(self.journal.store, parent, self.fingerprint, given_up):
            log.info("adopting %s (step %d), which a dead attempt had saved", saved.path, saved.step)
            with contextlib.suppress(NameTaken):  # it had still been alive, and committed by itself
                self._publish(saved, "adopted")
            return True
        return False

    def _restore(self, commit: Commit) -> bool:
        """Whether the ranks now hold the commit's state; if it is damaged it is quarantined."""
        assert self._ranks is not None
        self._ranks.order("restore", commit=commit.model_dump())
        event = self._ranks.next_event()
        if event["event"] == "restored":
            return True
        self.journal.quarantine(commit.number, str(errors.from_json(event)), self.number)
        return False

    def _nothing_verified(self) -> NoVerifiedCheckpoint:
        reasons = [f"  {line}" for line in self.journal.quarantine_reasons()]
        return NoVerifiedCheckpoint(
            "\n".join([f"run {self.config.run!r} has committed, but no checkpoint of it can be verified:", *reasons]),
            hint="put back a copy of its folder, or train under another name (--set run=...)",
        )

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
                self._publish(saved, why)
            except NameTaken:
                return self._follow_the_earlier()
        self._uncommitted.pop(0)
        assert self.head is not None
        return self.head

    def _follow_the_earlier(self) -> Commit:
        """The run goes on from an earlier attempt's last commit; what was trained beside it doesn't count."""
        self.close()  # the ranks hold a state that no commit names; the next chunk starts new ones
        self._uncommitted.clear()
        self.head = self.journal.newest()
        assert self.head is not None
        self._next_number = self.journal.newest_number() + 1
        log.warning("attempt %d had committed %s meanwhile; continuing from it", self.head.attempt, self.head.path)
        return self.head

    def _publish(self, saved: Saved, why: str) -> Commit:
        number = self._next_number
        metadata = saved.metadata
        commit = Commit(
            number=number,
            parent=self.head.number if self.head else 0,
            attempt=self.number,
            step=saved.step,
            epoch=metadata.epoch,
            path=saved.path,
            files=saved.files,
            checkpoint_sha256=metadata.checkpoint_sha256,
            previous_checkpoint_sha256=metadata.previous_checkpoint_sha256,
            previous_record_sha256=self.journal.record_sha256(number - 1),
            config_fingerprint=metadata.config_fingerprint,
            why=why,
            created_at=now(),
        )
        metrics = self.journal.store.read(f"{saved.path}/{checkpoint.METRICS}")
        self.journal.publish_commit(commit, metrics, latest_fields(commit, metadata))
        self.head = commit
        self._next_number = number + 1
        return commit

    def _renew_latest(self, commit: Commit) -> None:
        """latest.json names the commit, whose checkpoint was verified just now; a kill may have left it behind."""
        if self.journal.latest_number() == commit.number:
            return
        metadata = checkpoint.read_metadata(self.journal.store, commit.path)
        if metadata is not None:
            self.journal.publish_latest(latest_fields(commit, metadata))

    def prune(self) -> retention.PruneReport:
        """The run has the checkpoints that its retention keeps, and no others."""
        self._pruned = retention.prune(self.journal, self.config.retention, self.steps_per_epoch)
        return self._pruned

    @property
    def retention_report(self) -> retention.PruneReport:
        """The last prune's; where nothing was pruned in this attempt, what a prune would do."""
        return self._pruned or retention.plan(self.journal, self.config.retention, self.steps_per_epoch)

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


def latest_fields(commit: Commit, metadata: checkpoint.Metadata) -> dict[str, Any]:
    """What latest.json says of a commit."""
    return {
        "epoch": commit.epoch,
        "path": commit.path,
        "created_at": commit.created_at,
        "model_params": metadata.model_params,
        "optimizer_steps_total": commit.step,
        "scheduler_type": metadata.scheduler_type,
        "checkpoint_sha256": commit.checkpoint_sha256,
        "commit": commit.number,
        "attempt": commit.attempt,
        "config_fingerprint": commit.config_fingerprint,
    }
