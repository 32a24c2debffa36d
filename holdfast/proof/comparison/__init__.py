"""The comparison of two trainings: their first difference, and the recorded differences that explain it."""

from holdfast.proof.comparison.ancestry import Ancestry, read_ancestry
from holdfast.proof.comparison.comparing import compare_trainings
from holdfast.proof.comparison.report import Comparison

__all__ = ["Ancestry", "Comparison", "compare_trainings", "read_ancestry"]
