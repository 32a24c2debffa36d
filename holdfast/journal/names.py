"""The names of numbered records, and how to distinguish them from stray names.

A run numbers its records 1, 2, 3 and so on. Lost records leave gaps. A number that exceeds the previous number by more
than `REACH` doesn't belong to a record. Its name is a stray name: a copy, a typing error, a date.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

# The largest accepted gap between two numbers, which lost records leave.
REACH = 100_000
# The folders whose records have consecutive numbers. In other folders a record has the number of a commit or an
# attempt.
CHAINS = {"commits", "attempts"}
SUFFIXES = {"metrics": ".jsonl", "shown": ".jsonl"}


@dataclass(frozen=True)
class Numbered:
    """The names in a folder of records.

    Attributes:
        numbers: the sorted numbers of the records.
        strays: the names that aren't numbers, or that are numbers that the run can't have reached.
        suffix: the suffix of the records' names.
    """

    numbers: list[int]
    strays: list[str]
    suffix: str

    def up_to(self, last: int) -> "Numbered":
        """Return a copy in which numbers above ``last`` count as strays."""
        return self._cut(sum(number <= last for number in self.numbers))

    def within(self, base: int) -> "Numbered":
        """Return a copy in which all numbers after a gap above `REACH` count as strays.

        Args:
            base: the number that precedes the first number; there may be a gap between the two.
        """
        for index, number in enumerate(self.numbers):
            if number > base + REACH:
                return self._cut(index)
            base = number
        return self

    def _cut(self, count: int) -> "Numbered":
        strays = [f"{number:08d}{self.suffix}" for number in self.numbers[count:]]
        return Numbered(self.numbers[:count], self.strays + strays, self.suffix)


def sort_names(names: Sequence[str], suffix: str) -> Numbered:
    """Split a folder's names into numbers of records and strays."""
    pattern = re.compile(rf"[0-9]{{8}}{re.escape(suffix)}")
    numbers = [int(name[:8]) for name in names if pattern.fullmatch(name) and not name.startswith("00000000")]
    named = {f"{number:08d}{suffix}" for number in numbers}
    return Numbered(numbers, [name for name in names if name not in named], suffix)
