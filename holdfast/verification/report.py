"""What a verification found."""

from typing import Any

from pydantic import BaseModel


class CheckedCheckpoint(BaseModel):
    """One checkpoint that was read back.

    Attributes:
        commit: None for one that no commit names.
        standing: ``counts``, ``quarantined`` or ``uncommitted``. Damage of the last two is no news.
        damaged: each file that differs, with both digests.
    """

    commit: int | None
    path: str
    checkpoint_sha256: str
    size_bytes: int
    standing: str
    damaged: list[dict[str, Any]]


class VerifyReport(BaseModel):
    """What was found.

    Attributes:
        problems: a line for each thing that is damaged, lost or not signed as it should be.
        notes: what is not as usual and mends itself.
    """

    run: str
    ok: bool
    problems: list[str]
    notes: list[str]
    records: int
    checkpoints: list[CheckedCheckpoint]
