"""The comparison of two trainings: their first difference, and the recorded differences that explain it."""

from holdfast.comparison.ancestry import Ancestry, read_ancestry
from holdfast.comparison.comparing import compare_trainings
from holdfast.comparison.report import Comparison

__all__ = ["Ancestry", "Comparison", "compare_trainings", "read_ancestry"]
