"""The points that sinks show, made from the trails of commits."""

from holdfast.checkpoint import read_commit_lines
from holdfast.errors import RecordDamaged
from holdfast.journal import Commit, Journal, seconds_of
from holdfast.looking.sinks import Point, read_values


def read_points(journal: Journal, commit: Commit) -> list[Point]:
    """Return the steps of a commit; an empty list if its trail (the record of each step) is lost or damaged."""
    try:
        lines = read_commit_lines(journal.store, commit)
    except RecordDamaged:
        lines = []
    ended, each_s = seconds_of(commit.created_at), commit.train_s / max(1, len(lines))
    points = []
    for number, line in enumerate(lines, start=1):
        is_last = number == len(lines)
        values = read_values(line) | ({"run/attempt": float(commit.attempt)} if is_last else {})
        note = _describe_beginning(journal, commit) if number == 1 else ""
        points.append(Point(line["step"], ended - (len(lines) - number) * each_s, values, note))
    return points


def _describe_beginning(journal: Journal, commit: Commit) -> str:
    """Return a note that says how a commit's attempt began; empty if the commit is not the attempt's first."""
    parent = journal.find_parent(commit)
    if parent is None:
        return f"attempt {commit.attempt} begins the run" if not commit.parent else ""
    if parent.attempt == commit.attempt:
        return ""
    ending = journal.read_ending(parent.attempt)
    before = f", after attempt {parent.attempt} ({ending.reason})" if ending else ""
    return f"attempt {commit.attempt} continues from step {parent.step}{before}"
