"""The trail of a commit (a record of each step) as columns of numbers, by the names that metric sinks show."""

import json
from array import array
from dataclasses import dataclass, field

from holdfast.checkpoint import name_trails, split_lines
from holdfast.errors import NameMissing, RecordDamaged
from holdfast.journal import Commit, metrics_name
from holdfast.journal.records import MOST_STEPS
from holdfast.looking.sinks import read_values
from holdfast.store import Store
from holdfast.terminal import counted

Columns = dict[str, tuple["array[int]", "array[float]"]]


@dataclass(frozen=True)
class Columned:
    """The trail of one commit as columns.

    Attributes:
        name: the file from which the trail was read, or in which the trail should be.
        columns: steps and values by name.
        problem: a line that says which part of the trail is lost; empty if it is complete.
    """

    name: str
    columns: Columns = field(default_factory=dict)
    problem: str = ""


def read_commit_trail(folder: Store, commit: Commit) -> Columned:
    """Read the trail of a commit from the copy that outlives the checkpoint, or else from the checkpoint."""
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
    """Add the numbers of a line to the columns; return False if the line doesn't belong to a trail."""
    try:
        fields = json.loads(line.decode())  # decode here, because json would first detect the encoding of bytes
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
