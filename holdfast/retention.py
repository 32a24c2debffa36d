"""Which checkpoints stay. Deciding is a pure function over a list; deleting comes after it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from rich.filesize import decimal

from holdfast import checkpoint
from holdfast.config import KeepBest, Retention, did_you_mean
from holdfast.errors import ConfigError, NameMissing, NameTaken, NoVerifiedCheckpoint, RecordDamaged, StoreError
from holdfast.journal import Commit, Journal, Pruned, PruneEntry, PruneReport, now, read_record, record_name
from holdfast.terminal import counted

# How far back the last report is looked for before all commits are listed.
REPORTS_TRIED = 8

log = logging.getLogger(__name__)


# ---- deciding


def choose_kept(commits: Sequence[Commit], policy: Retention, steps_per_epoch: int) -> dict[int, str]:
    """The numbers of the commits whose checkpoints stay, and the first rule that keeps each.

    Args:
        commits: those that a run may continue from, newest first.

    Raises:
        ConfigError: no commit has the metric that the best are chosen by.
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
    if policy.max_epochs and commits:
        first = commits[0].step - policy.max_epochs * steps_per_epoch
        kept = {
            commit.number: kept[commit.number] for commit in commits if commit.number in kept and commit.step > first
        }
    return kept


def _best(commits: Sequence[Commit], policy: KeepBest, steps_per_epoch: int) -> list[Commit]:
    """The best commits, best first; of equal ones the newest."""
    known = {name for commit in commits for name in commit.metrics}
    if policy.metric not in known and any(commit.step % steps_per_epoch == 0 for commit in commits):
        # To delete by a metric that is misspelt would be to delete the best.
        raise ConfigError(
            f"retention.keep_best.metric = {policy.metric!r}: no checkpoint has it, so nothing is pruned",
            hint=did_you_mean(policy.metric, known),
        )
    valued = [(value, commit) for commit in commits if (value := commit.metrics.get(policy.metric)) is not None]
    valued.sort(key=lambda pair: pair[0], reverse=policy.mode == "max")
    return [commit for _, commit in valued[: policy.count]]


# ---- deleting


@dataclass(frozen=True)
class _Found:
    """What a prune begins with.

    Attributes:
        newest: the number of the newest commit.
        live: the commits that a run may continue from, newest first.
        given_up: folders of checkpoints that the last report says were given up.
        put_down: commits that were given up, too, and that it doesn't say so of: it is lost, or that prune was killed.
        quarantined: commits that are not to be used again.
        unreadable: commits whose records can't be read, so that their folders aren't known.
    """

    newest: int
    live: list[Commit]
    given_up: set[str]
    put_down: set[int]
    quarantined: set[int]
    unreadable: list[int]


def prune_run(journal: Journal, *, dry_run: bool = False) -> PruneReport | None:
    """As `prune`, with the policy that the run was last trained with; None for a run without a commit.

    Raises:
        ConfigError: its settings are lost.
    """
    journal.read_run()
    newest = journal.newest()
    if newest is None:
        return None
    metadata = checkpoint.read_metadata(journal.store, newest.path)
    policy = journal.read_retention()
    if metadata is None or policy is None:
        raise ConfigError(
            f"how run {journal.run!r} wants to be pruned can't be read, so nothing is pruned",
            hint="holdfast verify shows what is damaged; training the run on mends it",
        )
    return prune(journal, policy, metadata.steps_per_epoch, dry_run=dry_run)


def prune(
    journal: Journal, policy: Retention, steps_per_epoch: int, *, collect: bool = True, dry_run: bool = False
) -> PruneReport | None:
    """The run has the checkpoints that its policy keeps, and no others; None for a run without a commit.

    The newest, the newest that verifies (its bytes are read for that) and pinned ones stay, whatever the policy says.
    That a checkpoint is given up is on record before any of its files goes, so that a kill in between leaves debris
    and never a commit that looks good and is not. A deletion that fails is a warning, and the next prune finishes it.
    Quarantined checkpoints stay, as evidence, and metrics stay.

    Args:
        collect: also delete what dead attempts left half-done, once it is old enough.
        dry_run: only report.

    Raises:
        ConfigError: the policy can't be applied; nothing was deleted.
        NoVerifiedCheckpoint: nothing verifies; nothing was deleted.
    """
    found = _find(journal)
    if found.newest == 0:
        return None
    kept = choose_kept(found.live, policy, steps_per_epoch)
    protected = _protect(journal, found.live, kept)
    pruned = [commit for commit in found.live if commit.number not in kept | protected]
    if not dry_run:
        spared = {commit.number for commit in pruned if not _give_up(journal, commit)}
        protected |= dict.fromkeys(spared, "pinned")
        pruned = [commit for commit in pruned if commit.number not in spared]
    before = datetime.now(UTC) - timedelta(seconds=policy.debris_after_s)
    behind = _list_behind(journal, found, steps_per_epoch)
    given_up = _given_up(journal, found, behind)
    debris = _find_debris(journal, found, behind - given_up, before) if collect else []
    report = PruneReport(
        newest=found.newest,
        policy=policy.model_dump(mode="json"),
        kept=[_entry(commit, kept[commit.number]) for commit in found.live if commit.number in kept],
        protected=[_entry(commit, protected[commit.number]) for commit in found.live if commit.number in protected],
        pruned=[_entry(commit, "") for commit in pruned],
        unreadable=found.unreadable,
        unfinished=sorted(given_up),
        debris=debris,
        dry_run=dry_run,
        created_at=now(),
    )
    if not dry_run:
        # Before the deletions: whoever prunes next then knows which are to be finished.
        journal.store.replace(record_name("prunes", found.newest), report.to_bytes())
        doomed = [commit.path for commit in pruned]
        for path in doomed + _still_unneeded(journal, found, [*report.unfinished, *debris], steps_per_epoch):
            _delete(journal, path)
        if collect:
            _sweep(journal, before)
    return report


def _find(journal: Journal) -> _Found:
    """The report of the last prune names what it left; without one that can be read, all commits are looked at."""
    newest = journal.newest_number()
    given_up: set[str] = set()
    for number in range(newest, max(newest - REPORTS_TRIED, 0), -1):
        try:
            report = read_record(journal.store, PruneReport, record_name("prunes", number))
        except (NameMissing, RecordDamaged):
            continue
        left = {entry.commit for entry in (*report.kept, *report.protected)}
        numbers = left | set(report.unreadable) | set(range(report.newest + 1, newest + 1))
        there = numbers if newest - report.newest <= REPORTS_TRIED else set(journal.numbers("commits"))
        given_up = {entry.path for entry in report.pruned} | set(report.unfinished)
        break
    else:
        there = set(journal.numbers("commits"))
        numbers = set(range(min(there, default=1), newest + 1))
    pruned = set(journal.numbers("pruned", after=min(numbers, default=1) - 1))
    quarantined = set(journal.numbers("quarantine"))
    expected = numbers - pruned - quarantined
    live, unreadable = [], sorted(expected - there)
    if unreadable:
        log.warning("the records of %d commits are lost, the first is commit %d", len(unreadable), unreadable[0])
    for number in sorted(expected & there, reverse=True):
        try:
            live.append(journal.read_commit(number))
        except (NameMissing, RecordDamaged) as error:
            unreadable.append(number)
            log.warning("%s", error)
    return _Found(newest, live, given_up, numbers & pruned, quarantined, unreadable)


def _protect(journal: Journal, live: Sequence[Commit], kept: dict[int, str]) -> dict[int, str]:
    """What the policy would give up and may not, and why."""
    if len(kept) == len(live):
        return {}
    protected = dict.fromkeys(journal.numbers("pins"), "pinned")
    for commit in live:
        damaged = checkpoint.verify(journal.store, commit, is_urgent=False)
        protected[commit.number] = "newer than any that verifies" if damaged else "the newest that verifies"
        if not damaged:
            return {number: why for number, why in protected.items() if number not in kept}
        log.warning("%s", "; ".join(map(str, damaged)))
    raise NoVerifiedCheckpoint(f"no checkpoint of run {journal.run!r} verifies, so nothing is pruned")


def _give_up(journal: Journal, commit: Commit) -> bool:
    """Whether it is on record that the checkpoint is given up; not if it was pinned meanwhile."""
    record = Pruned(
        commit=commit.number,
        path=commit.path,
        checkpoint_sha256=commit.checkpoint_sha256,
        size_bytes=commit.size_bytes,
        created_at=now(),
    )
    name = record_name("pruned", commit.number)
    try:
        journal.store.create(name, record.to_bytes())
    except NameTaken:
        return True  # another prune was faster, and looks at the pins itself
    # A pin looks for our record after it has put down its own; one of us sees the other.
    if journal.store.exists(record_name("pins", commit.number)):
        journal.store.delete(name)
        return False
    return True


def _list_behind(journal: Journal, found: _Found, steps_per_epoch: int) -> set[str]:
    """The checkpoints' folders that the run is past: what lies ahead may be in a live attempt's hands this moment."""
    folders = [name for name in journal.store.list() if checkpoint.is_folder_name(name)]
    return {path for path in folders if found.live and checkpoint.step_of(path, steps_per_epoch) <= found.live[0].step}


def _given_up(journal: Journal, found: _Found, behind: set[str]) -> set[str]:
    """Those of the folders whose checkpoints were given up before."""
    others = behind - {commit.path for commit in found.live}
    if others <= found.given_up:  # which spares us to read as many records as there are commits
        return others
    return others & (found.given_up | {journal.path_of(number) for number in found.put_down})


def _find_debris(journal: Journal, found: _Found, folders: set[str], before: datetime) -> list[str]:
    """Those of the folders that no commit names, last written to before a time."""
    needed = {commit.path for commit in found.live} | {journal.path_of(number) for number in found.quarantined}
    if found.unreadable or "" in needed:
        return []  # the folder may be that of the commit whose record can't be read
    return [path for path in sorted(folders - needed) if _is_older(journal, path, before)]


def _still_unneeded(journal: Journal, found: _Found, folders: list[str], steps_per_epoch: int) -> list[str]:
    """Those of the folders that nobody has taken meanwhile: an attempt that fell back passes there once more."""
    head = journal.newest() if folders else None
    if head is None:
        return []
    taken = {journal.path_of(number) for number in range(found.newest + 1, head.number + 1)}
    return [path for path in folders if path not in taken and checkpoint.step_of(path, steps_per_epoch) <= head.step]


def _is_older(journal: Journal, path: str, before: datetime) -> bool:
    try:
        return all(journal.store.modified(f"{path}/{name}") < before for name in journal.store.list(path))
    except NameMissing:
        return False


def _sweep(journal: Journal, before: datetime) -> None:
    try:
        journal.store.sweep(before)
    except StoreError as error:  # S3 asks for a right of its own
        log.warning("%s; the remains of writes that never ended stay", error)


def _delete(journal: Journal, path: str) -> None:
    try:
        journal.store.delete_folder(path)
    except StoreError as error:
        log.warning("%s; the next prune tries again", error)


def _entry(commit: Commit, why: str) -> PruneEntry:
    return PruneEntry(
        commit=commit.number,
        step=commit.step,
        path=commit.path,
        checkpoint_sha256=commit.checkpoint_sha256,
        size_bytes=commit.size_bytes,
        why=why,
    )


def summarize(report: PruneReport) -> str:
    """Describe a prune in one line."""
    stay = counted(len(report.kept) + len(report.protected), "checkpoint")
    freed = decimal(sum(entry.size_bytes for entry in report.pruned))
    return f"keeps {stay}, {'would delete' if report.dry_run else 'deleted'} {len(report.pruned)} of {freed}"
