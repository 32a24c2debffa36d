"""The interface of a metric sink, and the names of the numbers that sinks show."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from holdfast.config import RunConfig
from holdfast.journal import Commit, Journal


@dataclass(frozen=True)
class Point:
    """The numbers of one step, as Holdfast sends them to a sink.

    Attributes:
        time: the approximate time of the step's end, in seconds since 1970, computed from the commit's record.
        values: numbers by name.
        note: how the attempt that trained this step began, if this is the attempt's first step; else empty.
    """

    step: int
    time: float
    values: Mapping[str, float]
    note: str = ""


@dataclass(frozen=True)
class Facts:
    """The facts about a run that a sink needs.

    Attributes:
        id: the run's id in the sink, derived from the run's records, so that all attempts continue the same curve.
        project: the project, or experiment, that the run belongs to in the sink.
        settings: the recipe, the seed and the recipe's settings, as plain values.
        folder: the folder on this machine into which a sink writes its files.
        attempt: the number of the attempt that sends the numbers.
    """

    journal: Journal
    id: str
    project: str
    settings: dict[str, Any]
    folder: Path
    attempt: int

    @classmethod
    def read(cls, journal: Journal, config: RunConfig, attempt: int) -> "Facts":
        """Return the facts of a run that an attempt has claimed.

        Raises:
            RecordDamaged: the run's own record, or the record of its first attempt, can't be read.
        """
        settings = {"recipe": config.recipe, "seed": config.seed, **config.settings}
        folder = Path(config.log.folder).absolute()
        return cls(journal, find_id(journal), config.log.project, settings, folder, attempt)

    @property
    def run(self) -> str:
        """The run's name."""
        return self.journal.run


def find_id(journal: Journal) -> str:
    """Return an id that only this run has, and that stays the same when the run's folder is moved.

    Two runs may have the same name, recipe and second of creation; the first attempt's random token distinguishes them.
    """
    run, first = journal.read_run(), journal.numbers("attempts")[:1]
    tokens = [journal.read_attempt(number).writer for number in first]
    return hashlib.sha256("\0".join([run.run, run.created_at, *tokens]).encode()).hexdigest()[:16]


class Sink:
    """A service or a folder that shows a run's numbers. Any method may raise. The caller then reopens the sink.

    Attributes:
        hint: what to do if the sink fails.
        step: the last step that is drawn; 0 if no step is drawn.
    """

    hint: ClassVar[str] = ""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.step = 0

    def open(self) -> None:
        """Find the run in the sink, and set `step`."""

    def has(self, commit: Commit) -> bool:
        """Return whether the steps of a commit are drawn. If they are, all earlier steps are drawn, too."""
        return commit.step <= self.step

    def rewind(self, number: int) -> None:
        """Remove the steps of all commits after this one, if the sink can remove steps.

        A sink that can't remove steps skips steps of the same numbers when a later commit contains them again.
        """

    def write(self, commit: Commit, points: Sequence[Point]) -> None:
        """Draw a commit's steps. If a call is interrupted and repeated, no step is drawn twice."""
        raise NotImplementedError

    def close(self, is_complete: bool) -> None:
        """Make everything that was written durable, and close the sink.

        Args:
            is_complete: whether the run is complete.
        """


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
