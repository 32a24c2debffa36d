"""Test support for users: a proof of resume, a suite for stores, faults at a point, an array in place of ranks."""

from holdfast.testing.proofs import assert_resumes

__all__ = ["assert_resumes"]
