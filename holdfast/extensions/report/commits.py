"""The report's table of commits, with the fate of each checkpoint: kept, deleted, rolled back or quarantined."""

from typing import Any

from holdfast.extensions.report.gathering import History
from holdfast.extensions.report.lives import find_starts
from holdfast.journal import Commit
from holdfast.journal.spikes import describe_spikes

# The number of newest commits that have a row on a page.
MOST_COMMITS = 20_000


def describe_commits(history: History) -> dict[str, Any]:
    """Return the rows of the table of commits for the page's script, the newest first."""
    numbers = sorted(history.commits, reverse=True)
    kept = {each.commit: each.why for each in (history.prune.kept + history.prune.protected if history.prune else [])}
    verified = {commit: attempt for attempt, commit in find_starts(history).items()}
    rows = [
        _describe(history, history.commits[number], kept.get(number, ""), verified.get(number, 0))
        for number in numbers[:MOST_COMMITS]
    ]
    return {"rows": rows, "left_out": len(numbers) - len(rows)}


def _describe(history: History, commit: Commit, kept: str, verified: int) -> list[Any]:
    parent = history.commits.get(commit.parent)
    state, note = find_state(history, commit)
    host = history.certified.get(commit.number, "")
    return [
        commit.number,
        commit.parent,
        parent.step if parent else commit.first_start,
        commit.step,
        commit.epoch,
        commit.attempt,
        commit.why,
        commit.created_at,
        commit.path,
        commit.checkpoint_sha256,
        commit.size_bytes,
        *(float(f"{each:.3g}") for each in (commit.train_s, commit.stall_s, commit.save_s)),
        _describe_loss(commit),
        state,
        "; ".join(
            [*_list_notes(note, kept if state == "kept" else "", host), *describe_spikes(commit.spikes).values()]
        ),
        commit.number in history.pinned,
        commit.number in history.signed,
        verified,
    ]


def _list_notes(note: str, kept: str, host: str) -> list[str]:
    """Return a commit's note; by default the rule that keeps its checkpoint, and the host that certified it."""
    kept_by = [f"by {kept}"] if kept else []
    return [note] if note else kept_by + ([f"certified by {host}"] if host else [])


def _describe_loss(commit: Commit) -> float | str | None:
    """Return the mean loss of a commit's steps; the text NaN if the mean isn't finite, None if no loss was logged."""
    loss = commit.shown_loss
    return "NaN" if loss is None and "avg_loss" in commit.metrics else loss


def find_state(history: History, commit: Commit) -> tuple[str, str]:
    """Return a commit's state (kept, deleted, rolled back or quarantined), and a note on this state."""
    if commit.number in history.quarantined:
        return "quarantined", history.quarantined[commit.number]
    if commit.number not in history.line:
        return "rolled back", "the run continued from an earlier commit"
    if commit.number in history.deleted:
        return "deleted", ""
    return "kept", ""


def count_states(history: History) -> dict[str, int]:
    """Return how many commits are in each state."""
    found: dict[str, int] = {}
    for commit in history.commits.values():
        state, _ = find_state(history, commit)
        found[state] = found.get(state, 0) + 1
    return found
