"""Test support for users: a proof of resume, a conformance suite for stores, and faults that kill a run at a point."""

from holdfast.testing.proofs import assert_resumes

__all__ = ["assert_resumes"]
