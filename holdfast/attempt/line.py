"""The commits of a run, for the attempt that owns the run: restore the newest, adopt dead ranks' checkpoints, commit.

This module needs no rank and no torch: the caller passes the function that restores a checkpoint.
"""

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from holdfast import checkpoint
from holdfast.attempt.admission import ask_adoption
from holdfast.checkpoint import Saved
from holdfast.checkpoint.copying import copy_checkpoint
from holdfast.checkpoint.near import Near
from holdfast.errors import (
    CheckpointDamaged,
    FolderTaken,
    GateTripped,
    HoldfastError,
    NameMissing,
    NameTaken,
    NoVerifiedCheckpoint,
    ParentQuarantined,
    RecordDamaged,
    StoreError,
)
from holdfast.journal import (
    Commit,
    FileRecord,
    Journal,
    Latest,
    RehearsedSteps,
    config_name,
    folder_record_name,
    now,
    record_name,
    signature_name,
)
from holdfast.journal.pins import unpin_left
from holdfast.journal.records import Spike
from holdfast.journal.spikes import QUIET, WINDOW, find_spikes, keep_watched
from holdfast.machine.host import read_hosts
from holdfast.provenance.changes import compare_identities
from holdfast.provenance.drift import is_of_ranks

# How often a checkpoint that seems damaged is read before it is quarantined. Quarantine is permanent, and the first
# read itself may have failed.
READS = 2
# The number of unhealthy checkpoints in a row after which the attempt ends. One checkpoint may be unhealthy; if the
# checkpoint before it is unhealthy too, the cause is elsewhere.
TRIPS = 2
# How many commits `find_break` checks, from the newest backwards, if latest.json is lost or names none of them.
ANCESTORS = 8
# If a rehearsal differs, how many commits are searched, from the newest backwards, for the last equal rehearsal.
ANCESTORS_SEARCHED = 1000
# The largest number of rehearsals that a commit names; among them is one of each kind, if there was one.
REHEARSALS = 8
MOST_UNKEPT = 8  # the maximum number of names in `_RehearsalVerdict.unkept`

if TYPE_CHECKING:
    from holdfast.journal.signature import SigningKey, TrustedKey

log = logging.getLogger(__name__)

Restore = Callable[[Commit], HoldfastError | None]


@dataclass(frozen=True)
class _RehearsalVerdict:
    """The results of a run's rehearsals, as a `Commit` records them.

    Attributes:
        rehearsed: the steps from which the last equal rehearsals began.
        rehearsals: the steps of these rehearsals, without rehearsals of earlier versions.
        unrehearsed_s: the seconds that training has taken since the last equal rehearsal.
        cost_s: the seconds for which training waited for a rehearsal since the last commit.
        inexact: the difference that a rehearsal found, if the run continued all the same.
        reason: why no rehearsal was made; empty if one was made or will be made.
        unproved: the numbers of the last commits that began with a resume which no rehearsal has checked.
        unkept: the names of values that steps change and no checkpoint contains, of which the run has warned.
    """

    rehearsed: tuple[int, ...] = ()
    rehearsals: tuple[RehearsedSteps, ...] = ()
    unrehearsed_s: float = 0.0
    cost_s: float = 0.0
    inexact: str = ""
    reason: str = ""
    unproved: tuple[int, ...] = ()
    unkept: tuple[str, ...] = ()

    @classmethod
    def of(cls, commit: Commit | None) -> "_RehearsalVerdict":
        """Return the results of rehearsals that a commit records."""
        if commit is None:
            return cls()
        made = tuple(commit.rehearsed), tuple(commit.rehearsals)
        told = tuple(commit.unproved), tuple(commit.unkept)
        return cls(*made, commit.unrehearsed_s, 0.0, commit.inexact, commit.not_rehearsed, *told)

    @property
    def kinds(self) -> set[str]:
        """Return the kinds of the equal rehearsals. Earlier versions rehearsed only from commits."""
        known = {each.kind for each in self.rehearsals} | (
            {"across"} if any(e.has_end for e in self.rehearsals) else set()
        )
        return known | ({"commit"} if len(self.rehearsed) > len(self.rehearsals) else set())

    def add(self, steps: RehearsedSteps, cost_s: float) -> "_RehearsalVerdict":
        """Return the results with a further equal rehearsal."""
        rehearsals = [*self.rehearsals, steps]
        while len(rehearsals) > REHEARSALS:
            kinds = [each.kind for each in rehearsals]
            del rehearsals[next(number for number, kind in enumerate(kinds) if kinds.count(kind) > 1)]
        earlier = self.rehearsed[: len(self.rehearsed) - len(self.rehearsals)]
        starts = (*earlier, *(each.start for each in rehearsals))[-REHEARSALS:]
        return _RehearsalVerdict(starts, tuple(rehearsals), cost_s=cost_s, unproved=self.unproved, unkept=self.unkept)


class Line:
    """The commits of a run, which the attempt that owns the run reads and extends.

    Attributes:
        head: the commit that the run continues from; None before the first commit.
        next_number: the number of the next commit.
        trusted_keys: a commit must be signed with one of these keys; if there are none, any commit is accepted.
        skip_records: the names of the skip list in force and of its signature; empty if the run has none.
    """

    def __init__(
        self,
        journal: Journal,
        attempt: int,
        config_fingerprint: str,
        steps_per_epoch: int,
        *,
        signing_key: "SigningKey | None" = None,
        trusted_keys: Sequence["TrustedKey"] = (),
        commit_adopted: Callable[[Saved], object] | None = None,
        near: Near | None = None,
    ) -> None:
        """
        Args:
            commit_adopted: the function that commits a checkpoint which dead ranks had saved. It has to call `commit`,
                which is the default.
            near: the near copies (checkpoints on this node's own disk), which may be adopted; None if there are none.
        """
        self.journal = journal
        self.attempt = attempt
        self.config_fingerprint = config_fingerprint
        self.steps_per_epoch = steps_per_epoch
        self.head: Commit | None = None
        self.next_number = 1
        self.skip_records: list[str] = []
        self._begun: Commit | None = None
        self._metadata: dict[str, checkpoint.Metadata] = {}  # by the checkpoint's folder; read once
        self._latest: tuple[Latest | None] | None = None  # None until latest.json is read or written
        self._has_resumed = False
        self._tripped: dict[int, GateTripped] = {}
        self._taken: set[str] = set()  # folders of checkpoints that can't be adopted
        self._signing_key = signing_key
        self.trusted_keys = trusted_keys
        # the number of the head and the rehearsals' results at the last `note_...` call
        self._noted: tuple[int, _RehearsalVerdict] | None = None
        self._watched: tuple[str, checkpoint.Lines] = "", []  # a checkpoint's folder, and the last lines of its trail
        self._near = near
        self._commit_adopted = commit_adopted or (lambda saved: self.commit(saved, "adopted"))

    def resume(self, restore: Restore) -> None:
        """Restore the newest commit that verifies, and make it ``head``. First adopt checkpoints that dead ranks saved.

        Args:
            restore: a function that loads a commit's checkpoint, and returns an error if the checkpoint is damaged or
                the gate refuses it. If the checkpoint is damaged or unhealthy, the next older commit is tried.

        Raises:
            GateTripped: a checkpoint verifies, but the program doesn't restore it exactly, or computes other results
                from it; or two checkpoints in a row are unhealthy. None of these checkpoints is quarantined.
            NoVerifiedCheckpoint: the run has committed, and none of its checkpoints can be verified.
            NotTrusted: ``trusted_keys`` is set, and none of these keys has signed the commit.
            Superseded: a later attempt owns the run.
        """
        self._begun = None
        self._tripped.clear()
        while True:
            candidates = self.journal.candidates(self.attempt)
            self.head = next((commit for commit in candidates if commit.number not in self._tripped), None)
            self.next_number = self.journal.next_number()
            if self.head is not None:
                self.check_trusted(self.head)
                if problem := self.find_break(self.head) or self.journal.find_quarantined_parent(self.head):
                    self.journal.quarantine(self.head.number, problem, self.attempt)
                    continue
                self._mend_copies(self.head)
            if self._adopt():
                continue
            if self.head is None or self._restore(self.head, restore):
                break
        self._settle_trips()
        unpin_left(self.journal)
        self._has_resumed = True
        if self.head is not None:
            self._renew_latest()
        elif self.journal.has_committed():
            raise self._nothing_verified()

    def find_break(self, commit: Commit) -> str:
        """Return how a commit's record contradicts its checkpoint or the commits before it; empty if it doesn't.

        Check the commit and its ancestors, back to the commit that latest.json names, but at most `ANCESTORS` commits.
        The rules are those of `holdfast.keeping.verification`.
        """
        latest = self._read_latest()
        for each in islice(self.journal.walk_back(commit), ANCESTORS):
            if problems := self.journal.broken_links(each):
                whose = "" if each == commit else f", and commit {commit.number} descends from it"
                return f"its record breaks the chain of commits: {'; '.join(problems)}{whose}"
            if latest and (latest.commit, latest.checkpoint_sha256) == (each.number, each.checkpoint_sha256):
                break
        with contextlib.suppress(RecordDamaged):  # restoring the commit reports this damage
            metadata = self.read_metadata(commit)
            return "; ".join(checkpoint.find_disagreements(commit, metadata)) if metadata else ""
        return ""

    def read_metadata(self, commit: Commit) -> checkpoint.Metadata | None:
        """Return the metadata of a commit's checkpoint, read once; None if it was deleted.

        Raises:
            RecordDamaged: the metadata can't be read, or isn't the file that was committed.
        """
        if commit.path not in self._metadata:
            found = checkpoint.read_committed(self.journal.store, commit)
            if found is None:
                return None
            self._metadata[commit.path] = found
        return self._metadata[commit.path]

    def commit(self, saved: Saved, reason: str) -> Commit:
        """Commit a checkpoint, and return the commit, the new ``head``. Call again to finish an interrupted call.

        Args:
            reason: ``chunk``, ``preempted``, ``adopted`` or ``imported``.

        Raises:
            CheckpointDamaged: a file of the checkpoint is missing or cut short, or its hashes contradict each other.
            FolderTaken: the checkpoint's folder belongs to another commit, or retention is deleting the folder.
            Superseded: a later attempt owns the run. If it claimed the run during this call, the commit may count.
            NameTaken: an earlier attempt has made a commit of this number; see `follow`.
        """
        with self.journal.fenced(self.attempt):
            checkpoint.check_saved(self.journal.store, saved)
            return self._commit(saved, reason)

    def _commit(self, saved: Saved, reason: str) -> Commit:
        commit = self._begun
        if commit is None or (commit.number, commit.path) != (self.next_number, saved.path):
            commit = self._describe(saved, reason)
        # a repeated call publishes the same bytes, with the same time, because the signature covers them
        self._begun = commit
        commit = self.journal.publish_commit(commit, self._sign(commit))
        for file, name in _list_copies(commit):
            self.journal.publish_copy(name, self.journal.store.read(f"{commit.path}/{file.name}"))
        self._publish_latest(commit, saved.metadata)
        self.head, self.next_number = commit, commit.number + 1
        return commit

    def _sign(self, commit: Commit) -> bytes | None:
        if self._signing_key is None:
            return None
        from holdfast.journal.signing import sign_commit  # not imported by a run that doesn't sign

        return sign_commit(self._signing_key, self.journal.run, commit)

    def _describe(self, saved: Saved, reason: str) -> Commit:
        metadata = saved.metadata
        return Commit(
            number=self.next_number,
            parent=self.head.number if self.head else 0,
            attempt=self.attempt,
            step=saved.step,
            epoch=metadata.epoch,
            path=saved.path,
            files=saved.files,
            metrics={"avg_loss": metadata.avg_loss, **(metadata.metrics if metadata.is_at_epoch_end else {})},
            checkpoint_sha256=metadata.checkpoint_sha256,
            previous_checkpoint_sha256=metadata.previous_checkpoint_sha256,
            previous_record_sha256=self.journal.record_sha256(self.next_number - 1),
            config_fingerprint=metadata.config_fingerprint,
            why=reason,
            created_at=now(),
            trained_at=metadata.trained_at,
            loss=metadata.loss,
            spikes=self._find_spikes(saved),
            is_last=metadata.is_last,
            hosts=read_hosts(metadata.environment),
            **saved.model_dump(include={"train_s", "slow_s", "stall_s", "save_s", "restart_s"}),
            slow_rank=saved.slow_rank,
            rehearsed=list(self.verdict.rehearsed),
            rehearsals=list(self.verdict.rehearsals),
            not_rehearsed=self.verdict.reason,
            unrehearsed_s=self.verdict.unrehearsed_s + saved.train_s,
            rehearse_s=self.verdict.cost_s,
            inexact=self.verdict.inexact,
            unproved=self._list_unproved(),
            unkept=list(self.verdict.unkept),
            records=self._list_records(saved),
            origin=metadata.origin,
        )

    def _list_unproved(self) -> list[int]:
        if not self.verdict.unproved:
            return []
        from holdfast.journal.audits import list_unproved  # few commits have an unproved resume

        return list_unproved(self.journal, self.verdict.unproved)

    def _find_spikes(self, saved: Saved) -> list[Spike]:
        """Return the spikes in the steps of a checkpoint; none if its trail or a trail before it can't be read."""
        with contextlib.suppress(NameMissing, RecordDamaged):
            before = self._read_before()
            lines = checkpoint.read_checkpoint_lines(self.journal.store, saved.path)
            self._watched = saved.path, keep_watched([*before, *lines])
            return find_spikes(before, lines)
        return []

    def _read_before(self) -> checkpoint.Lines:
        """Return the last lines of the trail up to the head. If this attempt made the head, they are in memory."""
        if self.head is None:
            return []
        path, lines = self._watched
        if path == self.head.path:
            return lines
        found = checkpoint.read_trail_before(self.journal, self.head, self.head.step + 1, WINDOW + QUIET)
        return keep_watched(found)

    def _list_records(self, saved: Saved) -> dict[str, str]:
        """Return the names of the records that the next commit depends on, each with its SHA-256.

        The SHA-256 is empty for the commit's folder, whose record contains nothing but the commit's path and number,
        and for signatures.
        """
        first = self.journal.first_attempt_after(self.head)
        attempts = [record_name("attempts", number) for number in range(first, self.attempt)]
        names = ["run.json", record_name("attempts", self.attempt), *filter(self.journal.hash_once, attempts)]
        names += [config_name(saved.metadata.config_fingerprint), *self.journal.settings]
        unhashed = [name for name in self.skip_records if name.startswith("signatures/")]
        unhashed += [signature_name(self.next_number, self.attempt)] if self._signing_key else []
        hashed = {name: self.journal.hash_once(name) for name in (*names, *self.skip_records) if name not in unhashed}
        return hashed | dict.fromkeys([folder_record_name(saved.path), *unhashed], "")

    # ---- rehearsals

    @property
    def verdict(self) -> "_RehearsalVerdict":
        """Return the results of the run's rehearsals so far."""
        number = self.head.number if self.head else 0
        if self._noted is not None and self._noted[0] == number:
            return self._noted[1]
        return _RehearsalVerdict.of(self.head)

    def note_rehearsal(self, steps: RehearsedSteps, cost_s: float) -> None:
        """Record, for the next commit, that a rehearsal was equal.

        Args:
            cost_s: the seconds for which training waited for the rehearsal.
        """
        assert self.head is not None
        self._noted = self.head.number, self.verdict.add(steps, self.verdict.cost_s + cost_s)

    def note_unrehearsed(self, reason: str) -> None:
        """Record why no rehearsal is made. If the run already has a rehearsal, do nothing."""
        if not self.verdict.rehearsed and self.verdict.reason != reason:
            self._noted = self.head.number if self.head else 0, replace(self.verdict, reason=reason)

    def note_inexact(self, found: str) -> None:
        """Record, for all later commits, that the run continues although a rehearsal differed.

        Args:
            found: the difference that a rehearsal has found.
        """
        assert self.head is not None
        self._noted = self.head.number, replace(self.verdict, inexact=found)

    def note_unproved(self) -> None:
        """Record, for all later commits, that the steps after the head were compared with nothing, as after a stop."""
        assert self.head is not None
        unproved = (*self.verdict.unproved, self.next_number)[-REHEARSALS:]
        self._noted = self.head.number, replace(self.verdict, unproved=unproved)

    def note_unkept(self, names: Iterable[str]) -> None:
        """Record, for all later commits, values that steps change and that no checkpoint contains."""
        known = self.verdict.unkept
        if new := [name for name in names if name not in known]:
            unkept = (*known, *new)[:MOST_UNKEPT]
            self._noted = self.head.number if self.head else 0, replace(self.verdict, unkept=unkept)

    def find_unproved(self) -> str:
        """Return a clause that names the attempt since which the run may not be bit-exact, for a message.

        The text is empty if no attempt has resumed the run since the last rehearsal whose trails were equal.
        """
        each, since = self.head, ""
        for _ in range(ANCESTORS_SEARCHED):
            parent = self.journal.find_parent(each) if each is not None else None
            if each is None or parent is None or parent.step < max(each.rehearsed, default=0):
                break
            if parent.attempt != each.attempt:
                since = (
                    f"; the run may differ from an uninterrupted run since attempt {each.attempt}, which continued "
                    f"from step {parent.step}"
                )
            each = parent
        return since

    def follow(self) -> Commit:
        """Make the newest commit the head, and return it.

        An earlier attempt published this commit after the present attempt had claimed the run. That can happen if the
        earlier attempt made its last check for later attempts just before the claim.
        """
        commit = self.journal.newest()
        self.next_number = self.journal.next_number()
        assert commit is not None
        log.warning(
            "attempt %d has committed %s meanwhile; continuing from that checkpoint", commit.attempt, commit.path
        )
        self.take(commit)
        return commit

    def take(self, commit: Commit) -> None:
        """Make a commit the head. Write the files that belong to its record, if a kill has prevented that."""
        self.head = commit
        self._mend_copies(commit)
        with contextlib.suppress(RecordDamaged):  # restoring the commit reports this damage
            self._renew_latest()

    def _renew_latest(self) -> None:
        """Write latest.json again if it doesn't name the head, as after a kill."""
        assert self.head is not None
        metadata = self.read_metadata(self.head)
        if metadata is None:
            return  # restoring the commit reports this damage
        latest = self._read_latest()
        if latest == describe_latest(self.head, metadata):
            return
        found = "was missing or damaged" if latest is None else f"named commit {latest.commit}"
        log.warning("run %r: latest.json %s; rewrote it to name commit %d", self.journal.run, found, self.head.number)
        self._publish_latest(self.head, metadata)

    def _read_latest(self) -> Latest | None:
        """Return latest.json as this attempt last wrote it.

        If this attempt hasn't written it, read it once from the store.
        """
        if self._latest is None:
            self._latest = (self.journal.read_latest(),)
        return self._latest[0]

    def _publish_latest(self, commit: Commit, metadata: checkpoint.Metadata) -> None:
        latest = describe_latest(commit, metadata)
        self.journal.publish_latest(latest)
        self._latest = (latest,)

    def _mend_copies(self, commit: Commit) -> None:
        """Publish missing copies of a commit's files, as after a kill, if the checkpoint still has the files."""
        for file, name in _list_copies(commit):
            if self.journal.store.exists(name):
                continue
            with contextlib.suppress(NameMissing):
                data = self.journal.store.read(f"{commit.path}/{file.name}")
                if file.sha256 == hashlib.sha256(data).hexdigest():
                    self.journal.publish_copy(name, data)

    def _adopt(self) -> bool:
        """Commit a checkpoint that dead ranks have saved. Return whether there was such a checkpoint."""
        if self.trusted_keys:
            # a checkpoint without a commit has no signature: anyone who can write to the store could have put it there
            return False
        for saved in self._find_orphans():
            saver = "this attempt's earlier ranks" if self._has_resumed else "a dead attempt"
            log.info("adopting %s (step %d), which %s had saved", saved.path, saved.step, saver)
            try:
                self._commit_adopted(saved)
            except FolderTaken as error:
                log.warning("the checkpoint %s is not adopted: %s", saved.path, error)
                self._taken.add(saved.path)
            except ParentQuarantined as error:
                log.warning("%s", error)
            except NameTaken:
                log.info("%s is committed already, by the attempt that saved it", saved.path)
            return True
        return False

    def _find_orphans(self) -> Iterator[Saved]:
        """Yield the checkpoints that may be adopted: first from the store, then from this node's near folder."""
        run = self.journal.store, self.head, self.may_adopt, self.steps_per_epoch
        yield from filter(self._is_above_doubt, checkpoint.find_orphans(*run, self._find_refused))
        if self._near is None:
            return
        try:
            for saved in checkpoint.find_orphans(*run, place=self._near.store):
                if not self._is_refused(saved) and self._is_above_doubt(saved) and self._is_worth_copying(saved):
                    log.info("copying step %d from the near folder to the store", saved.step)
                    yield copy_checkpoint(self._near.store, saved, self.journal.store)
        # not an error, because the run can continue from its newest commit
        except (CheckpointDamaged, StoreError) as error:
            log.warning("%s; nothing is adopted from the near folder", error)

    def _is_above_doubt(self, saved: Saved) -> bool:
        """Return whether a checkpoint may be adopted: no extension refuses it."""
        doubt = ask_adoption(self.journal, self.head, self.attempt, saved)
        if doubt:
            log.warning(
                "the checkpoint of step %d (%s) is not adopted, so its steps are trained again: %s",
                saved.step,
                saved.path,
                doubt,
            )
        return not doubt

    def _is_refused(self, saved: Saved) -> bool:
        """Return whether a near checkpoint equals a checkpoint that is quarantined or that the gate has refused."""
        numbers = [*self.journal.numbers("quarantine"), *self._tripped]
        refused = filter(None, map(self.journal.find_commit, numbers))
        return any(commit.checkpoint_sha256 == saved.metadata.checkpoint_sha256 for commit in refused)

    def _is_worth_copying(self, saved: Saved) -> bool:
        """Return whether copying a near checkpoint to the store takes less time than training its steps again."""
        save_s = self.head.save_s if self.head else 0.0
        if saved.train_s < save_s:
            log.info(
                "training the steps up to step %d again, which takes %.1f s; copying their checkpoint to the store "
                "would take %.1f s",
                saved.step, saved.train_s, save_s,
            )  # fmt: skip
        return saved.train_s >= save_s

    def may_adopt(self, fingerprint: str) -> bool:
        """Return whether a checkpoint that was trained with settings of this fingerprint may be adopted.

        Allowed are the present settings, the settings of the head, and each of the two with a different number of
        ranks.
        """
        heads = [self.head.config_fingerprint] if self.head else []
        known = [self.config_fingerprint, *(each for each in heads if self._skips_as_now(each))]
        return fingerprint in known or any(self._differ_in_ranks(fingerprint, each) for each in known)

    def _skips_as_now(self, fingerprint: str) -> bool:
        """Return whether the settings of a fingerprint skip the same steps as the present settings."""
        configs = self.journal.read_config(fingerprint), self.journal.read_config(self.config_fingerprint)
        skipped = [each.identity.get("skip", "") if each else None for each in configs]
        return fingerprint == self.config_fingerprint or skipped[0] == skipped[1]

    def _differ_in_ranks(self, one: str, other: str) -> bool:
        configs = self.journal.read_config(one), self.journal.read_config(other)
        if configs[0] is None or configs[1] is None:
            return False
        return all(map(is_of_ranks, compare_identities(configs[0].identity, configs[1].identity, {})))

    def _find_refused(self) -> set[str]:
        """Return the folders that can't be adopted: they belong to quarantined, refused or other commits."""
        refused = [*self.journal.numbers("quarantine"), *self._tripped]
        return self._taken | {self.journal.path_of(number) for number in refused}

    def _restore(self, commit: Commit, restore: Restore) -> bool:
        """Restore a commit, or quarantine it if it is damaged. Return whether it was restored.

        Raises:
            GateTripped: the gate refuses the commit although its bytes verify, and an older checkpoint would not help.
        """
        for _ in range(READS):
            problem = restore(commit)
            if problem is None:
                return True
            if isinstance(problem, GateTripped) and not problem.blames_checkpoint:
                raise problem
        if isinstance(problem, GateTripped):
            log.warning("the gate refuses %s: %s", commit.path, problem)
            self._tripped[commit.number] = problem
            if len(self._tripped) == TRIPS:
                raise self._gate_tripped()
        else:
            self.journal.quarantine(commit.number, str(problem), self.attempt)
        return False

    def _settle_trips(self) -> None:
        """Quarantine the commits that the gate found unhealthy, because an older commit is healthy.

        Raises:
            GateTripped: no older commit is left.
        """
        if self.head is None and self._tripped:
            raise self._gate_tripped()
        for number, problem in self._tripped.items():
            self.journal.quarantine(number, f"the gate: {problem}", self.attempt)

    def _gate_tripped(self) -> GateTripped:
        reasons = [f"  commit {number}: {problem}" for number, problem in self._tripped.items()]
        return GateTripped(
            "\n".join([f"run {self.journal.run!r} has no checkpoint that passes the gate:", *reasons]),
            check="health",
            hint="the bytes of these checkpoints are undamaged. Check the limits of Recipe(health=...); if they are "
            "right, reject the newest checkpoint with holdfast quarantine: the next start goes back further",
        )

    def check_trusted(self, commit: Commit) -> None:
        """Check that a trusted key has signed the commit, if trusted keys are configured.

        Raises:
            NotTrusted: no trusted key has signed the commit. It isn't quarantined, because the keys may be wrong.
        """
        if self.trusted_keys:
            from holdfast.journal.signing import check_signed  # not imported by a run without trusted keys

            check_signed(self.journal, commit, self.trusted_keys)

    def _nothing_verified(self) -> NoVerifiedCheckpoint:
        reasons = [f"  {line}" for line in self.journal.quarantine_reasons()]
        return NoVerifiedCheckpoint(
            "\n".join(
                [f"run {self.journal.run!r} has commits, but none of its checkpoints can be verified:", *reasons]
            ),
            hint="restore the run's folder from a backup, or train under another name (--set run=...)",
        )


def _list_copies(commit: Commit) -> list[tuple[FileRecord, str]]:
    """Return the files of a commit that are kept when its checkpoint is deleted, each with the name of its copy."""
    copies = checkpoint.COPIES
    return [(file, copies[file.name](commit.number)) for file in commit.files if file.name in copies]


def describe_latest(commit: Commit, metadata: checkpoint.Metadata) -> Latest:
    """Return the content of latest.json for a commit."""
    return Latest(
        epoch=commit.epoch,
        path=commit.path,
        created_at=commit.created_at,
        model_params=metadata.model_params,
        optimizer_steps_total=commit.step,
        scheduler_type=metadata.scheduler_type,
        checkpoint_sha256=commit.checkpoint_sha256,
        commit=commit.number,
        attempt=commit.attempt,
        config_fingerprint=commit.config_fingerprint,
    )
