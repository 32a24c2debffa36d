"""Bounds on the duration of the next step, save or commit, computed from measured durations."""

import collections
import math
import statistics

# While few durations are measured, the bound is twice the longest duration.
SAFETY = 2.0
# The bound of a commit's duration, in seconds, before any commit is measured.
MARGIN_S = 1.0
# The lowest bound of a commit's duration, in seconds. A commit is made when the message arrives that a save is durable,
# and a busy machine may deliver this message late.
LEAST_MARGIN_S = 0.2
# The spread counts as known if at least this many durations are measured.
FEW = 5
# If the spread is known, the bound is the longest duration plus this many standard deviations. By Cantelli's inequality
# at most one duration in ten exceeds the mean plus three deviations. The longest duration is above the mean, so fewer
# exceed this bound.
DEVIATIONS = 3.0
# The number of recent steps without a concurrent save, to which steps with a concurrent save are compared.
RECENT = 256


class Durations:
    """The durations of one kind of work, in seconds: their number, the longest duration, and the spread."""

    def __init__(self, unknown_s: float = math.inf, least_s: float = 0.0) -> None:
        """
        Args:
            unknown_s: the bound, in seconds, while nothing is measured.
            least_s: the lowest bound, in seconds.
        """
        self._unknown_s, self._least_s = unknown_s, least_s
        self.count = 0
        self.longest_s = 0.0
        self._mean_s = self._squares = 0.0  # Welford's running mean and sum of squared deviations

    def add(self, seconds: float) -> None:
        """Add a measured duration."""
        self.count += 1
        self.longest_s = max(self.longest_s, seconds)
        off_s = seconds - self._mean_s
        self._mean_s += off_s / self.count
        self._squares += off_s * (seconds - self._mean_s)

    @property
    def bound_s(self) -> float:
        """Return the longest time that the next work of this kind is expected to take.

        The bound is computed from the spread once the spread is known. It never exceeds the bound for an unknown
        spread.
        """
        if not self.count:
            return self._unknown_s
        bound_s = SAFETY * self.longest_s
        if self.count >= FEW:
            bound_s = min(bound_s, self.longest_s + DEVIATIONS * math.sqrt(self._squares / (self.count - 1)))
        return max(bound_s, self._least_s)


class Slowing:
    """The slowing of steps by concurrent saves: hashing and writing take cores and memory bandwidth."""

    def __init__(self) -> None:
        self._alone_s: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._beside_s: list[float] = []

    def add(self, seconds: float, *, is_beside: bool) -> None:
        """Add the duration of a step.

        Args:
            is_beside: whether a save was under way when the step began.
        """
        (self._beside_s if is_beside else self._alone_s).append(seconds)

    def take_s(self) -> float:
        """Return by how many seconds saves have slowed concurrent steps since the last call.

        The result is 0 if no step had a concurrent save, or if every step had one.
        """
        beside_s, self._beside_s = self._beside_s, []
        if not beside_s or not self._alone_s:
            return 0.0
        return max(sum(beside_s) - len(beside_s) * statistics.median(self._alone_s), 0.0)
