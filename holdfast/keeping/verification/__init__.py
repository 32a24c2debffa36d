"""Verification of a run on its store: every record and every byte is read back and checked."""

from holdfast.keeping.verification.report import CheckedCheckpoint, VerifyReport
from holdfast.keeping.verification.run import verify_run

__all__ = ["CheckedCheckpoint", "VerifyReport", "verify_run"]
