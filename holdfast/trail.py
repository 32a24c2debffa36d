"""The comparison of two trails of the same steps: the first step that differs, and the first cause in it.

A trail has a line for each step; `holdfast/FORMAT.md` lists its fields.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Line = Mapping[str, Any]

# The fields of a line, causes before effects. A difference in ``state`` is named by its components.
CAUSES = ("samples", "lrs", "anneals", "loss", "grad_norm", "logged", "state", "rng", "metrics")
# The first parts of the components' names, in the order in which a difference spreads within a step.
COMPONENTS = ("buffers", "optimizer", "model", "schedulers", "scaler", "extras")


@dataclass(frozen=True)
class Difference:
    """The first step in which two trails differ.

    Attributes:
        fields: the fields that differ in that step, causes first; in place of ``state`` its components that differ.
        tensors: names of the tensors that differ after that step, in the order of `COMPONENTS`; empty if the trails
            have no checksums of tensors there.
    """

    step: int
    fields: tuple[str, ...]
    tensors: tuple[str, ...] = ()


def find_first(one: Sequence[Line], other: Sequence[Line]) -> Difference | None:
    """Return the first difference between two trails, in the steps and fields that both have; None if there is none."""
    others = {line["step"]: line for line in other}
    for line in one:
        found = others.get(line["step"])
        if found is not None and (fields := tuple(_compare_lines(line, found))):
            return Difference(int(line["step"]), fields, tuple(_compare_tensors(line, found)))
    return None


def spreads(component: str) -> tuple[int, str]:
    """Return a sort key for components, in the order in which a difference spreads from one to the next."""
    first = component.partition(".")[0]
    return COMPONENTS.index(first) if first in COMPONENTS else len(COMPONENTS), component


def _compare_lines(one: Line, other: Line) -> Iterator[str]:
    for name in CAUSES:
        if name not in one or name not in other:  # earlier versions wrote fewer; checksums are not in every line
            continue
        if name == "samples":
            yield from _compare_samples(str(one[name]), str(other[name]))
        elif name == "state":
            shared = sorted(one[name].keys() & other[name].keys() - {"tensors"}, key=spreads)
            yield from (each for each in shared if one[name][each] != other[name][each])
        elif one[name] != other[name]:
            yield name


def _compare_samples(one: str, other: str) -> Iterator[str]:
    """Compare the names of samples, ``indices-content``; names of streams and of earlier versions have one part."""
    ones, others = one.split("-"), other.split("-")
    if ones[0] != others[0]:
        yield "samples"
    elif len(ones) == len(others) and ones != others:
        yield "batch content"


def _compare_tensors(one: Line, other: Line) -> list[str]:
    ones, others = (line.get("state", {}).get("tensors", {}) for line in (one, other))
    different = [name for name in ones.keys() & others.keys() if ones[name] != others[name]]
    return sorted(different, key=spreads)
