"""The training that led to a commit: the commit and its ancestors, oldest first, and the trails of their steps."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.attempt.lineage import Past
from holdfast.checkpoint import Lines, read_commit_lines
from holdfast.errors import NameMissing, RecordDamaged, WrongUse
from holdfast.journal import Commit, Journal
from holdfast.journal.finding import find_commit
from holdfast.journal.reading import read_all


@dataclass(frozen=True)
class Ancestry:
    """A commit and its ancestors, oldest first.

    Attributes:
        label: the name of this training in messages.
        missing: a line for each record that is lost.
    """

    journal: Journal
    label: str
    commits: list[Commit]
    missing: list[str] = field(default_factory=list)

    @property
    def head(self) -> Commit:
        return self.commits[-1]

    @functools.cached_property
    def by_step(self) -> dict[int, Commit]:
        """Return the commits by their steps."""
        return {commit.step: commit for commit in self.commits}

    def find_parent(self, commit: Commit) -> Commit | None:
        """Return a commit's parent; None for the first commit."""
        index = self.commits.index(commit)
        return self.commits[index - 1] if index else None

    def find_reaching(self, step: int) -> Commit:
        """Return the first commit at or after a step; if there is none, the last commit."""
        return next((commit for commit in self.commits if commit.step >= step), self.head)

    def read_trail(self, after: int, until: int) -> tuple[Lines, list[str]]:
        """Return the lines of the steps ``(after, until]``, and a note for each trail that is lost or damaged."""
        lines: Lines = []
        notes = []
        before = 0
        for commit in self.commits:
            if commit.step > after and before < until:
                found = _read_lines(self.journal, commit)
                lines += [line for line in found if after < line["step"] <= until]
                if not found:
                    notes.append(f"the trail of commit {commit.number} of {self.label} is lost")
            before = commit.step
        return lines, notes

    def read_past(self, commit: Commit) -> Past:
        """Return a commit's settings, code and machine.

        If the commit was pruned, read the code and the machine from the record of the commit's attempt.
        """
        past = Past.read(self.journal, commit)
        if past.environment:
            return past
        record = self.journal.find_attempt(commit.attempt)
        return Past(commit, past.fingerprint, past.identity, record.environment) if record else past


def _read_lines(journal: Journal, commit: Commit) -> Lines:
    """Return a commit's trail; an empty list if the trail is lost or damaged."""
    try:
        return read_commit_lines(journal.store, commit)
    except RecordDamaged:
        return []


def read_ancestry(journal: Journal, label: str, name: str = "") -> Ancestry:
    """Read the commits that led to a commit.

    Args:
        label: the name of this training in messages.
        name: the commit's number, the name of its folder, or ``best``; empty for the newest commit.

    Raises:
        RunUnknown: there is no such run.
        WrongUse: the run has no such commit.
    """
    journal.read_run()
    head = _find_head(journal, name)
    quarantined = {*journal.numbers("quarantine")}
    numbers = [number for number in journal.numbers("commits") if number < head.number]
    known = {commit.number: commit for commit in read_all(journal.find_commit, numbers) if commit}
    line, missing = [head], []
    while parent := line[-1].parent:
        if parent not in known and journal.is_unpacked(line[-1]):
            break
        if parent not in known or parent >= line[-1].number:
            missing.append(f"the record of commit {parent} of {label} is lost")
            before = min(parent, line[-1].number)
            parent = max((number for number in known if number < before and number not in quarantined), default=0)
        if not parent:
            break
        line.append(known[parent])
    return Ancestry(journal, label, line[::-1], missing)


def _find_head(journal: Journal, name: str) -> Commit:
    """Return the commit of this name, even if its checkpoint was pruned."""
    if not name.isdecimal():
        return find_commit(journal, name)
    try:
        return journal.read_commit(int(name))
    except NameMissing:
        raise WrongUse(
            f"run {journal.run!r} has no commit {name}", hint=f"the newest is {journal.newest_number()}"
        ) from None


def find_common_steps(one: Ancestry, other: Ancestry) -> Iterator[tuple[Commit, Commit]]:
    """Yield each pair of commits that two trainings have at the same step, oldest first."""
    for step, commit in one.by_step.items():
        if step in other.by_step:
            yield commit, other.by_step[step]
