"""Skip steps that a run has already trained: write the skip list, and go back to the commit before these steps."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast import checkpoint
from holdfast.attempt.going_back import find_verified_before, take_back
from holdfast.config.steps import Steps
from holdfast.errors import NameTaken, NoVerifiedCheckpoint, RecordDamaged, WrongUse
from holdfast.journal import Commit, Journal, record_name, signature_name
from holdfast.journal.pins import unpin_before
from holdfast.journal.skips import SKIPS, SkipRecord, read_skips, sign_skips, write_skips

if TYPE_CHECKING:
    from holdfast.journal.signature import SigningKey

ELSE = "a run of a different name can skip steps from its beginning: --set run=... --set 'skip=\"{steps}\"'"


@dataclass(frozen=True)
class SkipResult:
    """The result of `skip_steps`.

    Attributes:
        record: the list that is now in force.
        start: the commit that the run continues from; None if an earlier call had already taken the run back.
        quarantined: the commits that don't count any more.
    """

    record: SkipRecord
    start: Commit | None
    quarantined: list[int]


def skip_steps(
    journal: Journal, steps: Steps, key: "SigningKey | None" = None, *, is_off: bool = False, reason: str = ""
) -> SkipResult:
    """Write a skip list, and go back to the newest verified commit before the first step that the new list changes.

    Args:
        steps: the steps to skip, besides the steps that are skipped already.
        is_off: whether the new list no longer skips ``steps``, so that the run trains them.

    Raises:
        WrongUse: the steps aren't trained yet, the list wouldn't change, or no checkpoint before the steps is left.
        RecordDamaged: the list in force can't be read.
        NotTrusted: the new list keeps steps of the list in force, which this key hasn't signed.
    """
    while True:
        before = read_skips(journal)
        known = Steps.parse(before.skip) if before else Steps()
        newest = journal.newest()
        # An equal earlier call wrote this list, but may have died before it had taken the run back, or may have had no
        # signing key. Complete that call.
        if before is not None and before.is_off == is_off and Steps.parse(before.changed) == steps:
            if key is not None:
                sign_skips(journal, before, key)
            return SkipResult(before, None, finish_going_back(journal, before))
        if before is not None and finish_going_back(journal, before):
            # Another process wrote the list in force, but hadn't rolled back the run yet. The rollback is now done and
            # has quarantined commits, so read the run again.
            continue
        if key is not None and known - steps:
            read_skips(journal, [key.trusted])  # the new signature covers the steps of the earlier list, too
        changed = steps - (steps - known) if is_off else steps - (known | _read_own(journal, newest))
        first, start = _find_start(journal, newest, steps, changed, is_off=is_off)
        if key is None and journal.store.exists(signature_name(first.number, first.attempt)):
            raise WrongUse(f"the commits of run {journal.run!r} are signed", hint="sign the skip list, too: --key KEY")
        skip = known - changed if is_off else known | changed
        number = before.number + 1 if before else 1
        with _pinned(journal, start, first):
            try:
                record = write_skips(journal, number, skip, changed, first.number, key, is_off=is_off, reason=reason)
            except NameTaken:
                continue  # another process has written a list first: check that list
            return SkipResult(record, start, finish_going_back(journal, record))


def finish_going_back(journal: Journal, record: SkipRecord) -> list[int]:
    """Quarantine the commits that have trained a step which the skip list excludes; return their numbers.

    An attempt calls it, too, because the process that has written the list may have died.

    Raises:
        NoVerifiedCheckpoint: no checkpoint before these commits verifies; none of them is quarantined.
    """
    name = record_name(SKIPS, record.number)

    def stays(commit: Commit) -> bool:
        return name in commit.records

    newest = journal.newest()  # if it was trained with the list, the run has gone back to before these steps
    if newest is None or newest.number < record.first_commit or stays(newest):
        return []
    if find_verified_before(journal, record.first_commit) is None:
        raise NoVerifiedCheckpoint(
            f"run {journal.run!r} can't go back to a step before {Steps.parse(record.changed).first}: every "
            f"checkpoint before commit {record.first_commit} is deleted or damaged",
            hint="restore the run's folder from a backup, or train under another name (--set run=...)",
        )
    did = "skipped steps that are to be trained" if record.is_off else "trained steps that are to be skipped"
    reason = f"this commit or a commit before it has {did}: {record}"
    return take_back(journal, record.first_commit, reason, stays)


@contextlib.contextmanager
def _pinned(journal: Journal, start: Commit, first: Commit) -> Iterator[None]:
    """Protect the checkpoint to go back to during the block, because a live attempt might prune it.

    Args:
        first: the first commit that won't count any more. The pin names it, so that the next attempt removes the pin if
            this process dies.
    """
    journal.pin(start.number, explains=first.number)
    try:
        yield
    finally:
        unpin_before(journal, first.number)


def _read_own(journal: Journal, newest: Commit | None) -> Steps:
    """Return the steps that the configuration or an earlier skip list already skips."""
    settings = journal.read_config(newest.config_fingerprint) if newest else None
    return Steps.parse(str(settings.identity.get("skip", ""))) if settings else Steps()


def _find_start(
    journal: Journal, newest: Commit | None, steps: Steps, changed: Steps, *, is_off: bool
) -> tuple[Commit, Commit]:
    """Return the first commit that contains one of the changed steps, and the last verified commit before it.

    Raises:
        WrongUse: see `skip_steps`.
    """
    run, steps_text = f"run {journal.run!r}", steps.named
    if not changed:
        state = "not on its skip list" if is_off else "skipped already"
        raise WrongUse(
            f"{steps_text} of {run}: {state}", hint=f"holdfast show {journal.store.url} names its skipped steps"
        )
    if newest is None or steps.last > newest.step:
        reason = f"its newest commit has step {newest.step}" if newest else "it has no commits"
        end = _find_end(journal, newest)
        reason = f"the run ends with step {end}" if end and steps.last > end else reason
        hint = "train the run past the skipped steps first" if is_off else ELSE.format(steps=steps)
        raise WrongUse(f"{run} has not {'passed' if is_off else 'trained'} {steps_text} yet: {reason}", hint=hint)
    first = newest
    for first in journal.walk_back(newest):
        if first.origin and changed.first <= first.step:
            raise WrongUse(f"step {changed.first} of {run} was not trained here: it was imported from {first.origin}")
        parent = journal.find_parent(first)
        if parent is None or parent.step < changed.first:
            break
    start = find_verified_before(journal, first.number)
    if start is None:
        oldest = [commit for commit in journal.candidates() if not checkpoint.verify(journal.store, commit)][-1:]
        left = f"the oldest one is commit {oldest[0].number} at step {oldest[0].step}" if oldest else "none is left"
        raise WrongUse(
            f"{run} can't go back before step {changed.first}: no checkpoint before it verifies; {left}",
            hint=f"retention.keep_every and holdfast pin keep older checkpoints; {ELSE.format(steps=steps)}",
        )
    return first, start


def _find_end(journal: Journal, newest: Commit | None) -> int:
    """Return the run's last step; 0 if it isn't known."""
    epochs = journal.read_epochs()
    try:
        metadata = checkpoint.read_metadata(journal.store, newest.path) if newest else None
    except RecordDamaged:
        return 0
    return epochs * metadata.steps_per_epoch if epochs and metadata else 0
