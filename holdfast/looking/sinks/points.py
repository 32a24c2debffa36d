"""The names and values that sinks show, made from the trails of commits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint import read_commit_lines
from holdfast.errors import RecordDamaged
from holdfast.journal import Commit, Journal, seconds_of


@dataclass(frozen=True)
class Point:
    """One step in a sink.

    Attributes:
        time: the approximate time of the step's end, in seconds since 1970, computed from the commit's record.
        values: numbers by name.
        note: how the attempt that trained this step began, if this is the attempt's first step; else empty.
    """

    step: int
    time: float
    values: Mapping[str, float]
    note: str = ""


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


def read_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a line of a trail, by the names that sinks show. docs/metrics.md lists these names."""
    return {name: float(value) for name, value in _name_values(line) if value is not None}


def _name_values(line: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in line.get("logged", {}).items():
        yield _in_group("train", name), value
    for group, field in (("eval", "metrics"), ("eval", "measured"), ("anneal", "anneals")):
        for name, value in line.get(field, {}).items():
            yield _in_group(group, name), value
    rates = line.get("lrs", [])
    for number, rate in enumerate(rates):
        yield f"train/lr/{number}" if len(rates) > 1 else "train/lr", rate
    for name in ("loss", "grad_norm"):
        yield f"train/{name}", line.get(name)


def _in_group(group: str, name: str) -> str:
    """Return ``group/name``; a name with a slash is returned unchanged, because it already has a group."""
    return name if "/" in name else f"{group}/{name}"


def _describe_beginning(journal: Journal, commit: Commit) -> str:
    """Return a note on the beginning of a commit's attempt; empty if the commit is not the attempt's first."""
    parent = journal.find_parent(commit)
    if parent is None:
        return f"attempt {commit.attempt} begins the run" if not commit.parent else ""
    if parent.attempt == commit.attempt:
        return ""
    ending = journal.read_ending(parent.attempt)
    before = f", after attempt {parent.attempt} ({ending.reason})" if ending else ""
    return f"attempt {commit.attempt} continues from step {parent.step}{before}"
