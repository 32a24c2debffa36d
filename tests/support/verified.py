"""Helpers for the run that the verification tests share."""

from typing import Any

from holdfast.attempt import Line
from holdfast.journal import Journal, Pruned, now
from holdfast.keeping.verification import CheckedCheckpoint, VerifyReport, verify_run
from holdfast.store.local import LocalStore
from tests.support.makers import root

LIVE = [7, 6, 5, 2]


def fresh(line: Line) -> Journal:
    """Return a journal of the run that has read nothing yet."""
    return Journal(LocalStore(str(root(line).parent)), "run")


def check(line: Line, **options: Any) -> VerifyReport:
    """Verify the run, as a process that has read nothing yet."""
    return verify_run(fresh(line), **options)


def numbers(entries: list[CheckedCheckpoint]) -> list[int | None]:
    """Return the numbers of the commits that checkpoints belong to."""
    return [entry.commit for entry in entries]


def pruned(line: Line, number: int) -> bytes:
    """Return the bytes of a commit's pruned record."""
    commit = line.journal.read_commit(number)
    return Pruned(
        commit=number, path=commit.path, checkpoint_sha256=commit.checkpoint_sha256, size_bytes=1, created_at=now()
    ).to_bytes()
