"""Is a run on its store what was committed? Every record and every byte is read back."""

from holdfast.verification.report import CheckedCheckpoint, VerifyReport
from holdfast.verification.run import verify_run

__all__ = ["CheckedCheckpoint", "VerifyReport", "verify_run"]
