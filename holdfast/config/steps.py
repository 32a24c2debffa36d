"""A set of steps, which the user writes as ``1200-1210, 1300``."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

MOST_STEPS = 2**53
RANGE = re.compile(r"(\d{1,16})(?:\s*-\s*(\d{1,16}))?")
SHOWN_CHARS = 40
EXPECTED = "expected steps such as 1200-1210, or 1200-1210,1300"


@dataclass(frozen=True)
class Steps:
    """A set of step numbers, which count from 1.

    Attributes:
        ranges: the first and the last step of each range, in ascending order. Ranges neither overlap nor adjoin.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> Self:
        """Return the set of all steps in some ranges, which may overlap."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted(ranges):
            if joined and first <= joined[-1][1] + 1:
                joined[-1] = joined[-1][0], max(last, joined[-1][1])
            else:
                joined.append((first, last))
        return cls(tuple(joined))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the set that a text describes; for an empty text, the empty set.

        Raises:
            ValueError: the text doesn't describe a set of steps.
        """
        ranges = []
        for part in text.split(",") if text.strip() else ():
            found = RANGE.fullmatch(part.strip())
            first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
            if not 1 <= first <= last <= MOST_STEPS:
                raise ValueError(f"{EXPECTED}, from 1; found {part.strip()[:SHOWN_CHARS]!r}")
            ranges.append((first, last))
        return cls.of(ranges)

    def __str__(self) -> str:
        return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in self.ranges)

    @property
    def named(self) -> str:
        """The set as a readable text: ``step 24``, or ``steps 24-26``."""
        return f"step{'' if self.first == self.last else 's'} {self}"

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __contains__(self, step: int) -> bool:
        return any(first <= step <= last for first, last in self.ranges)

    def __or__(self, other: Self) -> Self:
        return self.of((*self.ranges, *other.ranges))

    def __sub__(self, other: Self) -> Self:
        return self.of(self._without(other))

    def __xor__(self, other: Self) -> Self:
        """Return the steps that are in exactly one of the two sets."""
        return (self - other) | (other - self)

    def count_outside(self, first: int, last: int) -> int:
        """Return the number of the steps from ``first`` to ``last`` that aren't in the set."""
        all_steps = Steps.of([(first, last)] if first <= last else [])
        return sum(until - begin + 1 for begin, until in all_steps._without(self))

    @property
    def first(self) -> int:
        """The first step; 0 for an empty set."""
        return self.ranges[0][0] if self.ranges else 0

    @property
    def last(self) -> int:
        """The last step; 0 for an empty set."""
        return self.ranges[-1][1] if self.ranges else 0

    def find_outside(self, step: int) -> int:
        """Return the last step that isn't in the set and isn't after this step; 0 if there is none."""
        for first, last in reversed(self.ranges):
            if first <= step <= last:
                return first - 1
        return step

    def _without(self, other: Self) -> Iterator[tuple[int, int]]:
        for first, last in self.ranges:
            begin = first
            for away, until in other.ranges:
                if until < begin or away > last:
                    continue
                if away > begin:
                    yield begin, away - 1
                begin = until + 1
            if begin <= last:
                yield begin, last
