"""The verdict on a watched run: whether it trains, stalls or waits, and what it waits for. All functions are pure.

A run writes nothing to its store between two commits. So a run counts as stalled if its next commit takes much longer
than earlier commits took. Its attempt then has died without a record, hangs, or trains more slowly; the store doesn't
show which.
"""

from dataclasses import dataclass
from typing import Literal

from holdfast.extensions.watch.seen import Seen
from holdfast.journal import Commit
from holdfast.journal.endings import REASONS
from holdfast.terminal import spell_s

State = Literal["complete", "training", "starting", "stalled", "waiting", "ended", "unreadable"]

# A commit is late after three times the expected time, because a busy machine or an evaluation may double that time.
LATE_FACTOR = 3.0
# The shortest time, in seconds, after which a commit is late, because tasks, records and a slow store take seconds.
LATE_AFTER_S = 30.0


@dataclass(frozen=True)
class Health:
    """A run's progress, as a person is told of it.

    Attributes:
        text: the state in words, and what the run waits for. The text is short, so that no terminal truncates it.
        detail: the reason for the state; empty if there is none.
        expected_s: expected seconds from the newest commit or claim to the next commit; 0 if unknown.
    """

    state: State
    text: str
    detail: str = ""
    expected_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.text}: {self.detail}" if self.detail else self.text


def judge_health(seen: Seen, age_s: float) -> Health:
    """Return the verdict on a run.

    Args:
        age_s: seconds since the run's newest commit or claim.
    """
    if seen.problem:
        return Health("unreadable", seen.problem)
    if seen.is_complete:
        return Health("complete", "complete")
    if not seen.attempts:
        is_lost = bool(seen.newest)
        return Health("waiting", f"waits for {'a further' if is_lost else 'its first'} attempt")
    number, record = seen.attempts[-1]
    ending = seen.find_ending(number)
    if ending is not None:
        return _judge_ended(number, ending.reason, str(ending.ending))
    where = f" on {record.host} (pid {record.pid})" if record else ""
    expected_s = predict(seen)
    if not expected_s:
        return Health("starting", f"attempt {number}{where} began {spell_s(age_s)} ago; waits for its first commit")
    if age_s > max(LATE_FACTOR * expected_s, LATE_AFTER_S):
        return Health(
            "stalled",
            f"stalled: waits for a commit of attempt {number}, or for a further attempt",
            f"no commit for {spell_s(age_s)}, expected after {spell_s(expected_s)}; the attempt{where} died without a "
            "record, hangs, or is slower than before",
            expected_s,
        )
    return Health("training", f"training: attempt {number}{where}", expected_s=expected_s)


def _judge_ended(number: int, reason: str, text: str) -> Health:
    detail = f"attempt {number} ended: {text}"
    if reason in REASONS and not REASONS[reason].retries:
        return Health("ended", "ended: no further attempt starts by itself, so a person has to act", detail)
    return Health("waiting", "waits for another attempt", detail)


def predict(seen: Seen) -> float:
    """Return the expected seconds from the newest commit or claim to the next commit; 0 if unknown.

    The estimate uses the speed and the costs that the newest commit has recorded.
    """
    head = seen.head
    speed = find_speed(seen, head) if head else 0.0
    if head is None or not speed:
        return 0.0
    parent = seen.find_parent(head)
    steps = seen.next_stop - head.step if seen.next_stop else head.step - (parent.step if parent else 0)
    restart_s = max(commit.restart_s for commit in seen.commits) if head.attempt != seen.last_attempt else 0.0
    return max(steps, 1) / speed + head.stall_s + head.save_s + restart_s


def find_speed(seen: Seen, commit: Commit) -> float:
    """Return the steps per second of a commit's chunk; 0 if unknown."""
    parent = seen.find_parent(commit)
    if commit.parent and parent is None:
        return 0.0
    return (commit.step - (parent.step if parent else 0)) / commit.train_s if commit.train_s > 0 else 0.0
