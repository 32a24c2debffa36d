"""The report of a verification."""

from typing import Any

from pydantic import BaseModel


class CheckedCheckpoint(BaseModel):
    """The result for one checkpoint that was read back.

    Attributes:
        commit: the number of the commit that names the checkpoint; None if no commit does.
        standing: ``counts``, ``quarantined`` or ``uncommitted``. Damage is a problem only if the checkpoint counts.
        damaged: each file that differs, with both digests; or the error for a file that can't be read.
    """

    commit: int | None
    path: str
    checkpoint_sha256: str
    size_bytes: int
    standing: str
    damaged: list[dict[str, Any]]


class VerifyReport(BaseModel):
    """The result of verifying a run.

    Attributes:
        ok: whether ``problems`` and ``unanswered`` are both empty.
        problems: a line for each file that is damaged or lost, or that lacks a trusted signature.
        notes: a line for each irregularity that is harmless, or that the next attempt repairs.
        records: the number of records that were read.
        checkpoints: the results for the checkpoints that were read.
        verdict: a sentence on the run's rehearsals; see `describe_resume`. It isn't a verdict of audits. Empty before
            the first commit.
        covered, uncovered: the files that the signatures cover, and the uncovered files, by kind; empty without
            trusted keys.
        coverage: both lists as lines for a person.
        unanswered: a line for each verdict of audits that puts the run's bytes in doubt, with the command to run
            next. A rollback, audits of two other machines that refute the verdict, or ``holdfast release --reason``
            removes the line.
    """

    run: str
    ok: bool
    problems: list[str]
    notes: list[str]
    records: int
    checkpoints: list[CheckedCheckpoint]
    verdict: str = ""
    covered: dict[str, list[str]] = {}
    uncovered: dict[str, list[str]] = {}
    coverage: list[str] = []
    unanswered: list[str] = []
