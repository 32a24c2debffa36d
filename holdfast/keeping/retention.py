"""Retention: which checkpoints to keep (a pure function over the commits), and the deletion of the others."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from rich.filesize import decimal

from holdfast import checkpoint
from holdfast.config import KeepBest, Retention, did_you_mean
from holdfast.errors import (
    ConfigError,
    HoldfastError,
    NameMissing,
    NameTaken,
    NoVerifiedCheckpoint,
    RecordDamaged,
    RunStopped,
    StoreError,
    Superseded,
)
from holdfast.journal import Commit, Journal, Pruned, PruneEntry, PruneReport, now, read_record, record_name
from holdfast.journal.audits import list_audits
from holdfast.journal.finding import rank_by_metric
from holdfast.journal.snapshots import find_other_run, find_other_settings
from holdfast.terminal import counted

# A prune looks for the last prune's report under the numbers of this many newest commits. Without a report under any of
# these numbers, the prune lists all commits.
REPORTS_TRIED = 8

DEBRIS_AFTER_S = 24 * 3600.0

# The age, in seconds, at which an unfinished write is deleted. A write is short, but its process may be suspended.
SWEPT_AFTER_S = 3600.0

SETTINGS_HINT = "holdfast verify shows the damage; the run's next attempt writes the settings again"

log = logging.getLogger(__name__)


# ---- deciding


def choose_kept(commits: Sequence[Commit], policy: Retention, steps_per_epoch: int) -> dict[int, str]:
    """Return the numbers of the commits whose checkpoints the policy keeps, each with the first rule that keeps it.

    Args:
        commits: the commits that a run may continue from, newest first.

    Raises:
        ConfigError: no commit has the metric of ``keep_best``.
    """
    kept = dict.fromkeys((commit.number for commit in commits[: policy.keep_last]), "keep_last")
    for commit in commits:
        if policy.keep_every and commit.step % (policy.keep_every * steps_per_epoch) == 0:
            kept.setdefault(commit.number, "keep_every")
        if policy.keep_every_steps and commit.step % policy.keep_every_steps == 0:
            kept.setdefault(commit.number, "keep_every_steps")
    if policy.keep_best:
        for commit in _best(commits, policy.keep_best, steps_per_epoch):
            kept.setdefault(commit.number, "keep_best")
    return kept


def describe_policy(policy: Retention) -> str:
    """Return a phrase that names the checkpoints that a policy keeps, such as ``the newest 3 checkpoints``."""
    kept = [
        f"the newest {counted(policy.keep_last, 'checkpoint')}" if policy.keep_last > 1 else "the newest checkpoint"
    ]
    if policy.keep_every:
        kept.append(f"the end of {'every epoch' if policy.keep_every == 1 else f'each {policy.keep_every}. epoch'}")
    if policy.keep_every_steps:
        kept.append(f"the checkpoint after each {policy.keep_every_steps}. step")
    if policy.keep_best:
        kept.append(f"the best {policy.keep_best.count} by {policy.keep_best.metric}")
    return ", ".join(kept)


def _best(commits: Sequence[Commit], policy: KeepBest, steps_per_epoch: int) -> list[Commit]:
    """Return the best commits, the best first; of equally good commits the newest comes first."""
    known = {name for commit in commits for name in commit.metrics}
    if policy.metric not in known and any(commit.step % steps_per_epoch == 0 for commit in commits):
        # If the metric's name is misspelt, no commit has it. Without this error, the best checkpoint would be deleted.
        raise ConfigError(
            f"retention.keep_best.metric = {policy.metric!r}: your evaluate function has returned this metric for no "
            "checkpoint, so nothing is pruned",
            hint=did_you_mean(policy.metric, known),
        )
    return rank_by_metric(commits, policy)[: policy.count]


# ---- deleting


class Outdated(RunStopped):
    """The run fell back to an earlier checkpoint during a prune."""


@dataclass(frozen=True)
class _Found:
    """The commits of a run before a prune.

    Attributes:
        newest: the number of the newest commit.
        live: the commits that a run may continue from, newest first.
        reported: the folders that the last report names as deleted or to be deleted.
        unreported: pruned commits missing from the last report, because the report was lost or that prune was killed.
        quarantined: the numbers of the quarantined commits.
        unreadable: commits whose records can't be read, so that their folders are unknown.
    """

    newest: int
    live: list[Commit]
    reported: set[str]
    unreported: set[int]
    quarantined: set[int]
    unreadable: list[int]


def prune_run(journal: Journal, *, dry_run: bool = False) -> PruneReport | None:
    """Prune a run by the policy of its saved settings; see `prune_by_policy`. Return None for a run without a commit.

    Raises:
        ConfigError: the run's settings are lost, or belong to a different run.
    """
    journal.read_run()
    while True:
        attempt = journal.attempts()  # read before the policy, so that an attempt with a newer policy is noticed
        newest = journal.newest()
        if newest is None:
            return None
        metadata = checkpoint.read_metadata(journal.store, newest.path)
        policy = journal.read_retention()
        if metadata is None or policy is None:
            raise ConfigError(
                f"nothing is pruned, because the retention settings of run {journal.run!r} can't be read",
                hint=SETTINGS_HINT,
            )
        if other := find_other_run(journal) or find_other_settings(journal, newest):
            raise ConfigError(f"nothing is pruned, because {other}", hint=SETTINGS_HINT)
        with contextlib.suppress(Outdated, Superseded):
            return prune_by_policy(journal, policy, metadata.steps_per_epoch, attempt=attempt, dry_run=dry_run)
        log.info("run %r made progress while it was pruned; reading its records again", journal.run)


def prune_by_policy(
    journal: Journal,
    policy: Retention,
    steps_per_epoch: int,
    *,
    attempt: int | None = None,
    verified: int = 0,
    compared: int = 0,
    debris_after_s: float | None = DEBRIS_AFTER_S,
    dry_run: bool = False,
) -> PruneReport | None:
    """Delete the checkpoints that a policy doesn't keep; return a report, or None for a run without a commit.

    Some checkpoints are kept under every policy: the pinned checkpoints, the newest checkpoint that an audit on
    another host has certified, and the newest checkpoint that verifies (all its bytes are read), with all newer
    checkpoints. Quarantined checkpoints are kept as evidence. All metrics are kept.

    A pruned record is written before any file is deleted. So a kill in between leaves files without a commit, but never
    a valid commit without files. A failed deletion is logged, and the next prune finishes it.

    A prune's process may be suspended at any point, and continue when the run has new commits. Before a prune deletes a
    folder, it makes sure that no other commit can name the folder (`Journal.assign_folder`). After it has written the
    pruned records, it looks for a later attempt and for a new quarantine. If it finds one of these, it deletes its
    pruned records again.

    Args:
        attempt: the number of the attempt that has this policy; None for the run's newest attempt.
        verified: the number of a commit whose bytes the caller has just verified, so that they aren't read again; 0 if
            no commit was verified.
        compared: the number of a commit whose checkpoint the caller still needs for a comparison; 0 for none.
        debris_after_s: also delete the leftover files of dead attempts that are older than this many seconds; None
            deletes no leftovers.
        dry_run: only report, and delete nothing.

    Raises:
        ConfigError: the policy can't be applied; nothing was deleted.
        NoVerifiedCheckpoint: no checkpoint verifies; nothing was deleted.
        Outdated: a commit was quarantined meanwhile; nothing was deleted.
        Superseded: a later attempt owns the run, perhaps with another policy; nothing was deleted.
    """
    attempt = journal.attempts() if attempt is None else attempt
    found = _find(journal)
    if found.newest == 0:
        return None
    kept = choose_kept(found.live, policy, steps_per_epoch)
    protected = _protect(journal, found.live, kept, verified, compared)
    pruned = [commit for commit in found.live if commit.number not in kept | protected]
    if not dry_run:
        spared = _record_pruned(journal, pruned, lambda: _check_view(journal, found, attempt))
        protected |= dict.fromkeys(spared, "pinned")
        pruned = [commit for commit in pruned if commit.number not in spared]
    before = None if debris_after_s is None else datetime.now(UTC) - timedelta(seconds=debris_after_s)
    passed = _list_passed(journal, found, steps_per_epoch)
    unfinished = _find_unfinished(journal, found, passed)
    debris = _find_debris(journal, found, passed - unfinished, before) if before else []
    report = PruneReport(
        newest=found.newest,
        policy=policy.model_dump(mode="json"),
        kept=[_entry(commit, kept[commit.number]) for commit in found.live if commit.number in kept],
        protected=[_entry(commit, protected[commit.number]) for commit in found.live if commit.number in protected],
        pruned=[_entry(commit, "") for commit in pruned],
        unreadable=found.unreadable,
        unfinished=sorted(unfinished),
        debris=debris,
        dry_run=dry_run,
        created_at=now(),
    )
    if not dry_run:
        # Write the report before the deletions, so that the next prune knows which deletions to finish.
        journal.store.replace(record_name("prunes", found.newest), report.to_bytes())
        for path in [commit.path for commit in pruned] + _list_behind(journal, unfinished | {*debris}, steps_per_epoch):
            _delete(journal, path, was_committed=path not in debris)
        if before:
            _sweep(journal, {commit.path for commit in found.live}, before)
    return report


def _find(journal: Journal) -> _Found:
    """Find the commits that weren't pruned. The last prune's report names them; without a report, list all commits."""
    newest = journal.newest_number()
    reported: set[str] = set()
    for number in range(newest, max(newest - REPORTS_TRIED, 0), -1):
        try:
            report = read_record(journal.store, PruneReport, record_name("prunes", number))
        except (NameMissing, RecordDamaged):
            continue
        left = {entry.commit for entry in (*report.kept, *report.protected)}
        numbers = left | set(report.unreadable) | set(range(report.newest + 1, newest + 1))
        is_known = newest - report.newest <= REPORTS_TRIED and not report.unreadable
        there = numbers if is_known else set(journal.numbers("commits"))
        reported = {entry.path for entry in report.pruned} | set(report.unfinished)
        break
    else:
        there = set(journal.numbers("commits"))
        numbers = set(range(min(there, default=1), newest + 1))
    pruned = set(journal.numbers("pruned", after=min(numbers, default=1) - 1))
    quarantined = set(journal.numbers("quarantine"))
    expected = numbers - pruned - quarantined
    live, damaged, lost = [], list[int](), expected - there
    for number in sorted(expected & there, reverse=True):
        try:
            live.append(journal.read_commit(number))
        except NameMissing:
            lost.add(number)
        except RecordDamaged as error:
            damaged.append(number)
            journal.warn(str(error))
    if lost:  # one line, the same at each commit: a single stray file with a high number leaves a gap of many commits
        journal.warn(f"the records of some commits up to commit {max(lost)} are lost; holdfast verify lists them")
    return _Found(newest, live, reported, numbers & pruned, quarantined, sorted({*lost, *damaged}))


def _protect(
    journal: Journal, live: Sequence[Commit], kept: dict[int, str], verified: int, compared: int
) -> dict[int, str]:
    """Return the commits that must be kept although the policy doesn't keep them, each with the reason."""
    if len(kept) == len(live):
        return {}
    protected = dict.fromkeys(journal.numbers("pins"), "pinned")
    if compared:
        protected.setdefault(compared, "the steps after it are being compared")
    if audits := list_audits(journal):
        from holdfast.journal.chains import find_certified  # few runs are audited

        if certified := find_certified(journal, live, audits):
            protected.setdefault(certified[0].number, "the newest certified commit")
    for commit in live:
        is_verified = commit.number == verified
        damaged = [] if is_verified else checkpoint.verify(journal.store, commit, is_urgent=False)
        if damaged and journal.is_pruned(commit.number):
            break  # another prune has verified a newer checkpoint, and has deleted this checkpoint
        protected[commit.number] = "newer than every commit that verifies" if damaged else "the newest that verifies"
        if not damaged:
            break
        log.warning("%s", "; ".join(map(str, damaged)))
    else:
        raise NoVerifiedCheckpoint(f"nothing is pruned, because every checkpoint of run {journal.run!r} is damaged")
    return {number: reason for number, reason in protected.items() if number not in kept}


def _check_view(journal: Journal, found: _Found, attempt: int) -> None:
    """Check that no other process has changed the records on which a prune's decision relies.

    Raises:
        Outdated: a commit was quarantined meanwhile; it may be the verified commit that allows other commits to be
            pruned.
        Superseded: a later attempt owns the run.
    """
    journal.check_fence(attempt)
    if set(journal.numbers("quarantine")) - found.quarantined:
        raise Outdated(
            f"run {journal.run!r} fell back to an earlier checkpoint while it was pruned, so nothing is pruned",
            hint="prune the run again",
        )


def _record_pruned(journal: Journal, commits: Sequence[Commit], check_view: Callable[[], None]) -> set[int]:
    """Write pruned records, so that the commits' checkpoints may be deleted; return the numbers of pinned commits.

    If ``check_view`` raises an error, before or after the records are written, delete the records.
    """
    check_view()
    created: list[Commit] = []
    try:
        for commit in commits:
            record = Pruned(
                commit=commit.number,
                path=commit.path,
                checkpoint_sha256=commit.checkpoint_sha256,
                size_bytes=commit.size_bytes,
                created_at=now(),
            )
            with contextlib.suppress(NameTaken):  # another prune has written this record, and does the checks
                journal.store.create(record_name("pruned", commit.number), record.to_bytes())
                created.append(commit)
        # Another process may pin a commit, quarantine a commit or begin a later attempt at the same time. Each of the
        # two processes first writes its own records and then reads the other process's records. So at least one of them
        # sees the other's records, and withdraws its own.
        check_view()
    except HoldfastError:
        for commit in created:
            _withdraw(journal, commit)
        raise
    pinned = set(journal.numbers("pins")) if created else set()
    for commit in created:
        if commit.number in pinned:
            _withdraw(journal, commit)
    return pinned & {commit.number for commit in created}


def _withdraw(journal: Journal, commit: Commit) -> None:
    """Delete a pruned record, unless another prune has read it and has begun to delete the checkpoint."""
    name = record_name("pruned", commit.number)
    record = journal.store.read(name)
    journal.store.delete(name)
    if not all(journal.store.exists(f"{commit.path}/{file.name}") for file in commit.files):
        with contextlib.suppress(NameTaken):
            journal.store.create(name, record)


def _list_passed(journal: Journal, found: _Found, steps_per_epoch: int) -> set[str]:
    """Return the checkpoint folders up to the step of the run's newest valid commit.

    A live attempt may be writing folders of later steps.
    """
    folders = [name for name in journal.store.list() if checkpoint.is_folder_name(name)]
    return {path for path in folders if found.live and checkpoint.step_of(path, steps_per_epoch) <= found.live[0].step}


def _find_unfinished(journal: Journal, found: _Found, folders: set[str]) -> set[str]:
    """Return the folders of pruned checkpoints that an earlier prune didn't finish deleting."""
    others = folders - {commit.path for commit in found.live}
    if others <= found.reported:  # then the records of `found.unreported` needn't be read
        return others
    return others & (found.reported | {journal.path_of(number) for number in found.unreported})


def _find_debris(journal: Journal, found: _Found, folders: set[str], before: datetime) -> list[str]:
    """Return the folders that no commit names and that were last written before a time."""
    needed = {commit.path for commit in found.live} | {journal.path_of(number) for number in found.quarantined}
    if found.unreadable or "" in needed:
        return []  # any folder may belong to a commit whose record can't be read
    return [path for path in sorted(folders - needed) if _is_older(journal, path, before)]


def _list_behind(journal: Journal, folders: set[str], steps_per_epoch: int) -> list[str]:
    """Return the given folders up to the step of the run's newest valid commit, which this reads again.

    The run may have fallen back meanwhile, and a live attempt may be writing folders of later steps.
    """
    head = journal.newest() if folders else None
    return [path for path in sorted(folders) if head and checkpoint.step_of(path, steps_per_epoch) <= head.step]


def _is_older(journal: Journal, path: str, before: datetime) -> bool:
    try:
        return all(journal.store.modified(f"{path}/{name}") < before for name in journal.store.list(path))
    except NameMissing:
        return False


def _sweep(journal: Journal, committed: set[str], before: datetime) -> None:
    """Delete unfinished writes, except in a checkpoint folder to which a live save may be writing."""

    def is_spared(folder: str) -> bool:
        return checkpoint.is_folder_name(folder) and folder not in committed

    before = min(before, datetime.now(UTC) - timedelta(seconds=SWEPT_AFTER_S))
    try:
        journal.store.sweep(before, is_spared)
    except StoreError as error:  # S3 requires separate permissions to list and abort unfinished uploads
        log.warning("%s; so the files of unfinished writes are not deleted", error)


def _delete(journal: Journal, path: str, *, was_committed: bool) -> None:
    try:
        if _may_be_deleted(journal, path, was_committed):
            journal.store.delete_folder(path)
    except StoreError as error:
        log.warning("%s; the next prune tries again", error)


def _may_be_deleted(journal: Journal, path: str, was_committed: bool) -> bool:
    """Return whether a folder may be deleted: no valid commit names it, and no commit can name it later.

    Args:
        was_committed: whether a pruned commit names the folder.
    """
    number = journal.assign_folder(path, 0)
    if not number:
        return number == 0
    if journal.is_pruned(number):
        return True
    commit = journal.find_commit(number)
    if commit is None:
        return was_committed and journal.is_void(number)
    return commit.path != path


def _entry(commit: Commit, reason: str) -> PruneEntry:
    return PruneEntry(
        commit=commit.number,
        step=commit.step,
        path=commit.path,
        checkpoint_sha256=commit.checkpoint_sha256,
        size_bytes=commit.size_bytes,
        why=reason,
    )


def summarize_prune(report: PruneReport) -> str:
    """Return one line that describes a prune."""
    stay = counted(len(report.kept) + len(report.protected), "checkpoint")
    freed = decimal(sum(entry.size_bytes for entry in report.pruned))
    return f"keeps {stay}, {'would delete' if report.dry_run else 'deleted'} {len(report.pruned)} of {freed}"
