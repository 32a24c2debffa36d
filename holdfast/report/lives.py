"""The lives of a run: when each attempt trained, why it ended, and the time between them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.endings import REASONS
from holdfast.journal import AttemptRecord, Commit, EndingRecord
from holdfast.report.gathering import History
from holdfast.report.numbers import to_seconds

# How a bar of the timeline looks, by the state in which Prefect shows such an attempt.
LOOKS = {"Completed": "good", "Failed": "bad", "Crashed": "bad", "Cancelled": "calm", "Paused": "calm"}
NO_ENDING = "no ending on record"


@dataclass(frozen=True)
class Life:
    """One attempt, with all times in seconds since 1970.

    Attributes:
        ended: when it ended, or its last sign of life; now if it is being trained.
        gap_s: seconds since the attempt before had ended.
        steps: how many steps its commits have.
        reason: why it ended; "running" if it is being trained.
        look: the class of its bar: good, warn, bad, calm, live or unknown.
    """

    record: AttemptRecord
    ending: EndingRecord | None
    began: float
    ended: float
    gap_s: float
    first_step: int
    last_step: int
    commits: int
    reason: str
    look: str


def list_lives(history: History, now: float | None = None) -> list[Life]:
    """Return the attempts whose records can be read, oldest first."""
    now = time.time() if now is None else now
    by_attempt: dict[int, list[Commit]] = {}
    for _, commit in sorted(history.commits.items()):
        by_attempt.setdefault(commit.attempt, []).append(commit)
    lives: list[Life] = []
    for number, record in sorted(history.attempts.items()):
        is_last = number == max(history.attempts)
        before = lives[-1].ended if lives else to_seconds(record.created_at)
        lives.append(_make(history, record, by_attempt.get(number, []), before, now if is_last else None))
    return lives


def _make(history: History, record: AttemptRecord, commits: Sequence[Commit], before: float, now: float | None) -> Life:
    ending, began = history.endings.get(record.number), to_seconds(record.created_at)
    last_sign = max([began, *(to_seconds(each.created_at) for each in commits)])
    is_live = ending is None and now is not None and not is_complete(history)
    ended = to_seconds(ending.created_at) if ending and ending.reason not in ("vanished", "crashed") else last_sign
    first = history.commits.get(commits[0].parent) if commits else None
    start = first.step if first else 0
    return Life(
        record=record,
        ending=ending,
        began=began,
        ended=max(began, now) if is_live and now else max(began, ended),
        gap_s=max(0.0, began - before),
        first_step=start,
        last_step=commits[-1].step if commits else start,
        commits=len(commits),
        reason="running" if is_live else ending.reason if ending else NO_ENDING,
        look="live" if is_live else find_look(ending.reason) if ending else "unknown",
    )


def find_look(reason: str) -> str:
    """Return the class of the bar of an attempt that ended for a reason."""
    if reason in ("preempted", "vanished"):
        return "warn"
    row = REASONS.get(reason)
    return LOOKS[row.state] if row else "unknown"


def is_complete(history: History) -> bool:
    """Return whether the newest commit is the end of the epochs that the run was last asked for."""
    total = find_total(history)
    return bool(total and history.newest and history.newest.step >= total)


def find_total(history: History) -> int | None:
    """Return the number of steps that the run was last asked for; None if it is unknown."""
    epochs = history.snapshot.config.get("epochs") if history.snapshot else None
    metadata = history.newest_metadata
    return epochs * metadata.steps_per_epoch if isinstance(epochs, int) and metadata else None
