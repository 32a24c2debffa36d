"""The trail of a commit as columns of numbers, by the names that metric sinks show."""

import json
from array import array
from dataclasses import dataclass, field

from holdfast.checkpoint import name_trails, split_lines
from holdfast.errors import NameMissing, RecordDamaged
from holdfast.journal import Commit, metrics_name
from holdfast.journal.records import MOST_STEPS
from holdfast.looking.sinks.points import read_values
from holdfast.store import Store
from holdfast.terminal import counted

Columns = dict[str, tuple["array[int]", "array[float]"]]


@dataclass(frozen=True)
class Columned:
    """The trail of one commit.

    Attributes:
        name: the file that it was read from, or that it should be in.
        columns: steps and values by name.
        problem: a line that says what is lost; empty if nothing is.
    """

    name: str
    columns: Columns = field(default_factory=dict)
    problem: str = ""


def read_commit_trail(folder: Store, commit: Commit) -> Columned:
    """Read the trail of a commit: the copy that outlives the checkpoint, or the checkpoint's own."""
    for name in name_trails(commit):
        columns: Columns = {}
        try:
            bad = sum(not _add(columns, line) for line in split_lines(folder.pieces(name), name))
        except NameMissing:
            continue
        except RecordDamaged as error:
            return Columned(name, columns, str(error))
        return Columned(name, columns, f"{name} has {counted(bad, 'line')} that can't be read" if bad else "")
    name = metrics_name(commit.number)
    return Columned(name, problem=f"{name} is missing: the curves lack the steps of commit {commit.number}")


def _add(columns: Columns, line: bytes) -> bool:
    """Add a line's numbers to the columns; return False if it is no line of a trail."""
    try:
        fields = json.loads(line.decode())  # decoded here: json would first detect the encoding of bytes
        step, values = fields["step"], read_values(fields)
        if type(step) is not int or abs(step) > MOST_STEPS:
            return False
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return False
    for name, value in values.items():
        steps, column = columns.setdefault(name, (array("q"), array("d")))
        steps.append(step)
        column.append(value)
    return True
