"""The comparison of two trails of the same steps: the first step that differs, and the field that differed first in it.

A trail has a line for each step; `holdfast/FORMAT.md` lists the line's fields. A share is the part of a batch that one
virtual rank trains.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.provenance.canonical import finite_or_none

Line = Mapping[str, Any]

# The minimum and the maximum number of steps of a rehearsal, for any speed. The line of each step has a checksum of
# each component.
REHEARSED_STEPS = 4
MOST_REHEARSED = 64
# The largest number of steps that ranks train after a stop's save, and of those whose lines have the checksums of all
# tensors. State with a period, such as a count for an accumulation of gradients, has an effect once in each
# period. So a rehearsal with a few more steps than the usual periods finds such state. The further steps find state
# that begins to act late.
MOST_SHADOWED, MOST_DETAILED = 64, 16
# The fields of a trail's line, and of the line's entries for ranks and shares. Causes come before their effects. For a
# ``state`` that differs, its components that differ are named instead.
CAUSES = (
    "samples", "generators", "buffers", "lrs", "anneals", "loss", "gradient", "partial_sum", "sum", "grad_norm",
    "logged", "state", "rng", "metrics", "form",
)  # fmt: skip
# The fields of a line that don't influence a later step.
LOGGED = ("logged", "grad_norm")
# Readable names for fields that only the entries of ranks and shares have.
FACTS = {"partial_sum": "sum of gradients", "sum": "sum of all gradients"}
# The first parts of the components' names, causes before effects. Within a step, a difference in one component causes
# differences in the components after it.
COMPONENTS = ("buffers", "optimizer", "model", "schedulers", "scaler", "extras")


@dataclass(frozen=True)
class Difference:
    """The first step in which two trails differ.

    Attributes:
        fields: the fields that differ in that step, causes first. ``state`` is replaced by its components that differ.
            If only some ranks differ, a field's name includes the rank in the first trail: ``loss of rank 1``.
        tensors: the names of the tensors that differ after that step, in the order of `COMPONENTS`; empty if the lines
            of that step have no checksums of tensors.
    """

    step: int
    fields: tuple[str, ...]
    tensors: tuple[str, ...] = ()


def find_first(one: Sequence[Line], other: Sequence[Line]) -> Difference | None:
    """Return the first difference between two trails, or None. Compare only the steps and fields that both trails have.

    Args:
        one: the trail whose ranks the result names. The other trail of a run with shares may have a different number of
            ranks.
    """
    others = {line["step"]: line for line in other}
    for line in one:
        found = others.get(line["step"])
        if found is not None and (fields := tuple(_compare_lines(line, found))):
            return Difference(int(line["step"]), fields, tuple(_compare_tensors(line, found)))
    return None


def compute_mean_loss(lines: Sequence[Line]) -> float | None:
    """Return the mean loss of the steps; None if the mean isn't finite, or if no step has logged a loss."""
    losses = [line["loss"] for line in lines if isinstance(line.get("loss"), float)]
    return finite_or_none(sum(losses) / len(losses)) if losses else None


def find_departure(lived: Sequence[Line], again: Sequence[Line], tolerance: float = 0.0) -> Difference | None:
    """Return the first difference between some steps and the same steps trained again, or None.

    Numbers that a program logs besides its loss aren't compared, because they don't influence a later step.

    Args:
        tolerance: the relative difference that is allowed between losses; 0 if equal bits are promised. With a
            tolerance, checksums and random numbers aren't compared, because a small error changes them completely.
    """
    if not tolerance:
        return find_first([_leave_out(line, LOGGED) for line in lived], again)
    others = {line["step"]: line for line in again}
    for line in lived:
        other = others.get(line["step"], {})
        shared = [name for name in ("samples", "lrs", "loss") if name in line and name in other]
        fields = [name for name in shared if not _is_close(line[name], other[name], tolerance)]
        if fields:
            return Difference(int(line["step"]), tuple(fields))
    return None


def _leave_out(line: Line, names: Sequence[str]) -> Line:
    return {name: value for name, value in line.items() if name not in names}


def _is_close(one: Any, other: Any, tolerance: float) -> bool:
    is_number = isinstance(one, float) and isinstance(other, float)
    return bool(one == other) or (is_number and math.isclose(one, other, rel_tol=tolerance))


def causes_first(component: str) -> tuple[int, str]:
    """Return a component's key for sorting in the order of `COMPONENTS`: causes before their effects within a step."""
    first = component.partition(".")[0]
    return COMPONENTS.index(first) if first in COMPONENTS else len(COMPONENTS), component


def _compare_lines(one: Line, other: Line) -> Iterator[str]:
    if ("skipped" in one) != ("skipped" in other):
        yield "skipped"
    parts = _pair_parts(one, other)
    for name in CAUSES:
        yield from _compare_parts(name, parts)
        if name not in one or name not in other:  # earlier versions wrote fewer fields; some lines have no checksums
            continue
        if name == "samples":
            yield from _compare_samples(str(one[name]), str(other[name]))
        elif name == "form":
            yield from (f"saved {each}" for each in sorted(one[name]) if one[name][each] != other[name].get(each))
        elif name == "state":
            shared = sorted(one[name].keys() & other[name].keys() - {"tensors"}, key=causes_first)
            yield from (each for each in shared if one[name][each] != other[name][each])
        elif one[name] != other[name]:
            yield name


def _pair_parts(one: Line, other: Line) -> list[tuple[Line, Line]]:
    """Return pairs of entries for the same rank or share.

    If the two lines have different numbers of ranks, or divide shares or sums differently among ranks, pair only the
    entries of shares.
    """
    names = ("share", "model_part", "rank", "grid")
    ones, others = ({tuple(map(each.get, names)): each for each in line.get("parts", [])} for line in (one, other))
    if ones.keys() == others.keys():
        return [(ones[key], others[key]) for key in sorted(ones, key=str)]
    shares = {key[:2]: each for key, each in others.items() if "share" in each}
    return [(each, shares[key[:2]]) for key, each in ones.items() if key[:2] in shares]


def _compare_parts(name: str, parts: Sequence[tuple[Line, Line]]) -> Iterator[str]:
    """Yield the names of the fields that differ in ranks or shares.

    If only some ranks or shares differ in a field, its name includes their ranks in the first line. If all differ, its
    name includes no ranks, and is yielded only if the line has no value of this field for the whole step.
    """
    known = [(dict(_read_fact(name, one)), dict(_read_fact(name, other)), one) for one, other in parts]
    known = [each for each in known if each[0] and each[1]]
    for field in sorted({field for one, other, _ in known for field in one.keys() & other.keys()}, key=causes_first):
        found = [part for one, other, part in known if one.get(field) != other.get(field)]
        if found and len(found) == len(known) and name in ("generators", "buffers", "gradient", *FACTS):
            yield FACTS.get(field, field)
        elif len(found) < len(known):
            yield from (f"{FACTS.get(field, field)} of {where}" for where in _name_ranks(found))


def _read_fact(name: str, part: Line) -> Iterator[tuple[str, str]]:
    """Yield a field's name and value in a rank's or share's entry; for ``state``, each component's name and value."""
    if name == "state":
        yield from part.get("state", {}).items()
    elif name in part:
        yield name, part[name]


def _name_ranks(parts: Sequence[Line]) -> Iterator[str]:
    """Yield a name for each rank in these entries, followed by its shares if the entries are for shares."""
    for rank in dict.fromkeys(part["rank"] for part in parts):
        shares = [str(part["share"]) for part in parts if part["rank"] == rank and "share" in part]
        yield f"rank {rank} (share{'s' if len(shares) > 1 else ''} {', '.join(shares)})" if shares else f"rank {rank}"


def _compare_samples(one: str, other: str) -> Iterator[str]:
    """Yield the kind of difference between two names of samples. Such a name has the form ``indices-content``.

    Names of a stream's samples, and names from earlier versions, have a single part.
    """
    ones, others = one.split("-"), other.split("-")
    if ones[0] != others[0]:
        yield "samples"
    elif len(ones) == len(others) and ones != others:
        yield "batch content"


def _compare_tensors(one: Line, other: Line) -> list[str]:
    ones, others = (line.get("state", {}).get("tensors", {}) for line in (one, other))
    different = [name for name in ones.keys() & others.keys() if ones[name] != others[name]]
    return sorted(different, key=causes_first)
