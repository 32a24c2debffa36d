"""The names of numbered records, and which of them a run can have.

A run's numbers grow by one. Records may be lost in between, so that a number may follow another at a distance; but one
that is further from all others than a run can lose is a stray: a copy, a typing error, somebody's date.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

# How many records in a row a run may have lost while it still has later ones.
REACH = 100_000
# The folders whose numbers follow one another. Those of the others name commits (of `endings`, attempts).
CHAINS = {"commits", "attempts"}
SUFFIXES = {"metrics": ".jsonl"}


@dataclass(frozen=True)
class Numbered:
    """The names in a folder of records.

    Attributes:
        numbers: sorted.
        strays: names that are no number, or one that the run can't have reached.
        suffix: of the names.
    """

    numbers: list[int]
    strays: list[str]
    suffix: str

    def up_to(self, last: int) -> "Numbered":
        """Return the same with no number beyond ``last``."""
        return self._cut(sum(number <= last for number in self.numbers))

    def within(self, base: int) -> "Numbered":
        """Return the same with the numbers that can be reached from ``base``, one after the other."""
        for index, number in enumerate(self.numbers):
            if number > base + REACH:
                return self._cut(index)
            base = number
        return self

    def _cut(self, count: int) -> "Numbered":
        strays = [f"{number:08d}{self.suffix}" for number in self.numbers[count:]]
        return Numbered(self.numbers[:count], self.strays + strays, self.suffix)


def sort_names(names: Sequence[str], suffix: str) -> Numbered:
    """Tell the names of records from others."""
    pattern = re.compile(rf"[0-9]{{8}}{re.escape(suffix)}")
    numbers = [int(name[:8]) for name in names if pattern.fullmatch(name) and not name.startswith("00000000")]
    named = {f"{number:08d}{suffix}" for number in numbers}
    return Numbered(numbers, [name for name in names if name not in named], suffix)
