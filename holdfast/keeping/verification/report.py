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
        ok: whether there is no problem.
        problems: a line for each file that is damaged or lost, or that lacks a trusted signature.
        notes: a line for each irregularity that is harmless, or that the next attempt repairs.
        records: the number of records that were read.
        checkpoints: the results for the checkpoints that were read.
        verdict: the findings of the run's rehearsals; empty before the first commit.
    """

    run: str
    ok: bool
    problems: list[str]
    notes: list[str]
    records: int
    checkpoints: list[CheckedCheckpoint]
    verdict: str = ""
