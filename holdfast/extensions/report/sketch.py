"""Curves of bounded size: each bucket of steps keeps its minimum and its maximum.

A bucket begins at a multiple of its width. So thinning with a width, and then with twice this width, leaves the
same points as thinning once with twice the width. So a run of any length can be read and
thinned piece by piece.
"""

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Steps = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

# The maximum number of points in memory for all curves of a run together. A point takes 24 bytes.
MOST_POINTS = 2_000_000
# The widest bucket, in steps. A bucket of this width covers all steps of a commit. Each commit keeps two points in any
# case, so a wider bucket saves nothing.
WIDEST = 2**32


@dataclass(frozen=True)
class Curve:
    """Points in the order of their steps.

    Attributes:
        commits: the number of each point's commit.
        values: floats; NaN and infinities as they were measured.
    """

    commits: Steps
    steps: Steps
    values: Values

    def __len__(self) -> int:
        return len(self.steps)

    @classmethod
    def from_points(cls, points: Sequence[tuple[int, int, float]]) -> "Curve":
        """Return the curve through points, each a commit's number, a step and a value."""
        commits, steps, values = zip(*points, strict=True)
        return cls(np.array(commits, np.int64), np.array(steps, np.int64), np.array(values, np.float64))

    def thin(self, width: int) -> "Curve":
        """Return the minimum, the maximum and the first infinite or NaN value of every ``width`` steps of a commit.

        The first and the last point of the curve are kept, too.
        """
        if width <= 1 or len(self) <= 2:
            return self
        finite, places = np.isfinite(self.values), np.arange(len(self))
        lowest, highest = self._ends(places[finite], self.values, width)
        first_odd, _ = self._ends(places[~finite], places, width)
        ends = np.array([0, len(self) - 1])
        return self._take(np.unique(np.concatenate([ends, lowest, highest, first_odd])))

    def _ends(self, places: Steps, keys: Values | Steps, width: int) -> tuple[Steps, Steps]:
        """Return, for each bucket of each commit, the indices of the points with the minimum and the maximum key.

        Args:
            places: the indices of the points to choose from.
            keys: for each point of the curve, the number to compare: its value or its index.
            width: the number of steps of a bucket.
        """
        buckets = self.steps // width
        places = places[np.lexsort((keys[places], buckets[places], self.commits[places]))]
        is_first = _changes(self.commits[places]) | _changes(buckets[places])
        starts = np.flatnonzero(is_first)
        return places[starts], places[np.append(starts[1:], len(places))[: len(starts)] - 1]

    def fit(self, most: int) -> "Curve":
        """Return the curve thinned to about ``most`` points or fewer. A bucket may contain several commits."""
        if len(self) <= most:
            return self
        span = int(self.steps[-1] - self.steps[0]) + 1
        joined = Curve(np.zeros_like(self.commits), self.steps, self.values)
        return joined.thin(max(2, -(-2 * span // most)))

    def of(self, commits: Collection[int]) -> "Curve":
        """Return a curve with only the points of these commits, in the order of their steps."""
        chosen = self._take(np.isin(self.commits, np.fromiter(commits, np.int64, len(commits))))
        order = np.argsort(chosen.steps, kind="stable")
        return chosen._take(order)

    def _take(self, which: npt.NDArray[np.bool_] | Steps) -> "Curve":
        return Curve(self.commits[which], self.steps[which], self.values[which])


def _changes(values: Steps) -> npt.NDArray[np.bool_]:
    """Return a mask of the values that differ from the value before; True for the first value."""
    return np.concatenate([np.ones(min(1, len(values)), bool), values[1:] != values[:-1]])


class Sketch:
    """All curves of a run, read commit by commit. If they have too many points, all are thinned."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._width = 1
        self._count = 0
        self._columns: dict[str, tuple[array[int], array[int], array[float]]] = {}
        # By name and commit: the number of values, and the number of infinite or NaN values.
        self._counts: dict[str, dict[int, tuple[int, int]]] = {}

    @property
    def names(self) -> list[str]:
        """The curves' names, sorted."""
        return sorted(self._columns)

    def add(self, commit: int, name: str, steps: Iterable[int], values: Iterable[float]) -> None:
        """Add all points of a commit to the curve of this name, in the order of their steps.

        Call this only once for a commit and a name.
        """
        columns = self._columns.setdefault(name, (array("q"), array("q"), array("d")))
        before = len(columns[1])
        columns[1].extend(steps)
        columns[2].extend(values)
        added = len(columns[1]) - before
        columns[0].extend([commit] * added)
        self._count += added
        odd = added - int(np.isfinite(columns[2][before:]).sum())
        self._counts.setdefault(name, {})[commit] = (added, odd)

    def settle(self) -> None:
        """Thin all curves until they have no more points than allowed. Call this after each commit.

        A curve keeps at least two points of each commit, so that a commit that is rolled back later still has points.
        """
        while self._count > self._most:
            self._width *= 2
            before = self._count
            for name in self._columns:
                self._columns[name] = _to_columns(self.read(name).thin(self._width))
            self._count = sum(len(steps) for _, steps, _ in self._columns.values())
            if self._count == before and self._width > WIDEST:
                self._most = 2 * before

    def count(self, name: str, commits: Collection[int]) -> tuple[int, int]:
        """Return the number of values with this name in the commits, and the number of infinite and NaN ones.

        Values that were thinned out count, too.
        """
        counts = [each for commit, each in self._counts[name].items() if commit in commits]
        return sum(values for values, _ in counts), sum(odd for _, odd in counts)

    def read(self, name: str) -> Curve:
        """Return the points of the curve of this name, in the order in which they were added."""
        commits, steps, values = self._columns[name]
        return Curve(np.array(commits, np.int64), np.array(steps, np.int64), np.array(values, np.float64))


def _to_columns(curve: Curve) -> "tuple[array[int], array[int], array[float]]":
    commits, steps, values = curve.commits.tobytes(), curve.steps.tobytes(), curve.values.tobytes()
    return array("q", commits), array("q", steps), array("d", values)
