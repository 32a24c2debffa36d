"""Which checkpoints stay. Deciding is a pure function over a list; deleting comes after it."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.config import Retention
from holdfast.errors import NameTaken
from holdfast.journal import Commit, Journal, Pruned, now, record_name


@dataclass(frozen=True)
class PruneReport:
    """What a prune keeps and gives up, newest first."""

    kept: list[Commit]
    pruned: list[Commit]

    def to_json(self) -> dict[str, Any]:
        return {"kept": [_entry(commit) for commit in self.kept], "pruned": [_entry(commit) for commit in self.pruned]}


def choose_kept(commits: Sequence[Commit], policy: Retention, steps_per_epoch: int) -> set[int]:
    """The numbers of the commits whose checkpoints stay.

    Args:
        commits: those that a run may continue from, newest first.
    """
    kept = {commit.number for commit in commits[: policy.keep_last]}
    if policy.keep_every:
        every = policy.keep_every * steps_per_epoch
        kept |= {commit.number for commit in commits if commit.step % every == 0}
    return kept


def plan(journal: Journal, policy: Retention, steps_per_epoch: int) -> PruneReport:
    """What `prune` would keep and give up. Nothing is written."""
    commits = list(journal.candidates())
    kept = choose_kept(commits, policy, steps_per_epoch)
    return PruneReport(
        kept=[commit for commit in commits if commit.number in kept],
        pruned=[commit for commit in commits if commit.number not in kept],
    )


def prune(journal: Journal, policy: Retention, steps_per_epoch: int) -> PruneReport:
    """The run has the checkpoints that its policy keeps, and no others.

    That a checkpoint is given up is on record before any of its files goes, so that a kill in between leaves debris
    and never a commit that looks good and is not. Quarantined checkpoints stay, as evidence.
    """
    report = plan(journal, policy, steps_per_epoch)
    for commit in report.pruned:
        _give_up(journal, commit)
    return report


def _give_up(journal: Journal, commit: Commit) -> None:
    record = Pruned(
        commit=commit.number,
        path=commit.path,
        checkpoint_sha256=commit.checkpoint_sha256,
        size_bytes=commit.size_bytes,
        created_at=now(),
    )
    with contextlib.suppress(NameTaken):
        journal.store.create(record_name("pruned", commit.number), record.to_bytes())
    journal.store.delete_folder(commit.path)


def _entry(commit: Commit) -> dict[str, Any]:
    return {
        "commit": commit.number,
        "step": commit.step,
        "path": commit.path,
        "checkpoint_sha256": commit.checkpoint_sha256,
        "size_bytes": commit.size_bytes,
    }
