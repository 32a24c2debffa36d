"""The lives of a run: when each attempt trained, why it ended, and the time between two attempts."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from holdfast.extensions.report.gathering import History
from holdfast.journal import AttemptRecord, Commit, EndingRecord
from holdfast.journal.endings import REASONS
from holdfast.ledger.goodput import AttemptLedger, Ledger, account
from holdfast.ledger.timeline import Records, find_trainer, make_lives
from holdfast.machine.slow_ranks import SlowRank

# The CSS class of an attempt's bar in the timeline, by the attempt's state in Prefect.
LOOKS = {"Completed": "good", "Failed": "bad", "Crashed": "bad", "Cancelled": "calm", "Paused": "calm"}
NO_ENDING, RUNNING = "no ending on record", "running"


@dataclass(frozen=True)
class ReportedLife:
    """One attempt. All times are in seconds since 1970, and come from the goodput ledger.

    Attributes:
        began: when its ranks were started.
        ended: when it ended; if that is not on record, the latest time at which it can have trained.
        gap_s: seconds between the end of the previous attempt and the beginning of this one.
        first_step, last_step: its ranks trained the committed steps after ``first_step``, up to ``last_step``.
            A later attempt may have committed the last of these steps, from a checkpoint of this attempt.
        reason: why it ended. If the last attempt has no ending on record, "running": it still trains, or it died
            without a record.
        look: the CSS class of the attempt's bar: good, warn, bad, calm, live or unknown.
        slow_rank: the rank for which the other ranks waited longest in the steps of a commit; None if no rank was slow.
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
    slow_rank: SlowRank | None = None


def make_report_ledger(history: History, now: float) -> tuple[Ledger | None, list[str]]:
    """Return a run's goodput ledger (None if no attempt has begun), and a line for each missing record.

    Args:
        now: seconds since 1970.
    """
    records = Records(history.attempts, history.endings, history.commits, frozenset(history.quarantined))
    lives = make_lives(records)
    ledger = account(history.run, lives, now=datetime.fromtimestamp(now, UTC)) if lives else None
    return ledger, records.missing


def list_lives(history: History, ledger: Ledger | None) -> list[ReportedLife]:
    """Return the attempts whose records can be read, oldest first."""
    by_attempt: dict[int, list[Commit]] = {}
    for _, commit in sorted(history.commits.items()):
        by_attempt.setdefault(find_trainer(commit, history.attempts), []).append(commit)
    lives: list[ReportedLife] = []
    for each in ledger.attempts if ledger else ():
        if record := history.attempts.get(each.number):
            before = lives[-1].ended if lives else each.began.timestamp()
            lives.append(_make(history, record, each, by_attempt.get(each.number, []), before))
    return lives


def _make(
    history: History, record: AttemptRecord, spent: AttemptLedger, commits: Sequence[Commit], before: float
) -> ReportedLife:
    first = history.commits.get(commits[0].parent) if commits else None
    start = first.step if first else 0
    ending = history.endings.get(record.number)
    is_live = ending is None and record.number == max(history.attempts) and not history.is_complete
    reason = RUNNING if is_live else spent.reason or NO_ENDING
    slow_ranks = [each.slow_rank for each in commits if each.slow_rank]
    return ReportedLife(
        record=record,
        ending=ending,
        began=spent.began.timestamp(),
        ended=spent.ended.timestamp(),
        gap_s=max(0.0, spent.began.timestamp() - before),
        first_step=start,
        last_step=commits[-1].step if commits else start,
        commits=len(commits),
        reason=reason,
        look="live" if is_live else find_look(reason),
        slow_rank=max(slow_ranks, key=lambda slow: slow.share, default=None),
    )


def find_starts(history: History) -> dict[int, int]:
    """Return the commit from whose checkpoint each attempt continued, by the attempt's number.

    An attempt that trained nothing new, or that began the run, has no such commit. An attempt may itself have made this
    commit, from a checkpoint that a dead attempt had saved.
    """
    starts: dict[int, int] = {}
    for _, commit in sorted(history.commits.items()):
        if commit.why != "adopted":
            starts.setdefault(commit.attempt, commit.parent)
    return {attempt: parent for attempt, parent in starts.items() if parent}


def find_look(reason: str) -> str:
    """Return the CSS class of an attempt's bar in the timeline, by the reason for the attempt's end."""
    if reason in ("preempted", "vanished"):
        return "warn"
    row = REASONS.get(reason)
    return LOOKS[row.state] if row else "unknown"
