"""The first difference between two trainings: fields that results of proofs, audits and comparisons share."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from holdfast import checkpoint
from holdfast.checkpoint import Lines, Payload
from holdfast.checkpoint.departure import Difference, find_first

SHOWN_NAMES = 8
SHOWN_TENSORS = 3


class Differing(BaseModel):
    """The base class of results that contain the first difference between two trainings of the same steps.

    Attributes:
        first_step, first_differs_in, first_tensors: the first difference between the trails; see
            `holdfast.checkpoint.departure.Difference`. If the trails are equal, the step is None, and the lists are
            empty.
        different: names of the tensors and values that differ at the end; the first part of a name is its component.
    """

    model_config = ConfigDict(frozen=True)

    first_step: int | None = None
    first_differs_in: list[str] = []
    first_tensors: list[str] = []
    different: list[str] = []

    def describe_first(self) -> list[str]:
        """Return a list: one line about the first difference between the trails; no line if the trails are equal."""
        if self.first_step is None:
            return []
        tensors = checkpoint.shorten(self.first_tensors, SHOWN_TENSORS)
        after = f"; after it {tensors}" if self.first_tensors else ""
        return [f"  first in step {self.first_step}: {', '.join(self.first_differs_in)}{after}"]

    def describe_difference(self) -> list[str]:
        """Return lines for a person about the first difference, and about the values that differ at the end."""
        lines = self.describe_first()
        if not lines and self.different:
            lines.append("  every step has the same samples, loss, gradient and random numbers")
        if self.different:
            lines.append(f"  then, at the end: {checkpoint.shorten(self.different, SHOWN_NAMES)}")
        return lines


def find_difference(trails: tuple[Lines, Lines], ends: tuple[Payload, Payload] | None = None) -> dict[str, Any]:
    """Return the first difference between two runs of the same steps, as fields of a `Differing`.

    Args:
        trails: the trails of both runs, from `checkpoint.read_commit_lines`.
        ends: the states of both runs at the end; None if a run didn't reach the end.
    """
    found = to_fields(find_first(*trails))
    return found if ends is None else found | {"different": checkpoint.differences(*ends)}


def to_fields(first: Difference | None) -> dict[str, Any]:
    """Return the first difference between two trails as fields of a `Differing`; no fields if the trails are equal."""
    if first is None:
        return {}
    return {"first_step": first.step, "first_differs_in": list(first.fields), "first_tensors": list(first.tensors)}
