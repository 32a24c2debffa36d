"""Test support for users: a proof of resume, a suite for stores, faults at named points, and ranks without a model."""

from holdfast.testing.proofs import assert_resumes

__all__ = ["assert_resumes"]
