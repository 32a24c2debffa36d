"""The search for a slow rank. The heartbeats show for how long the ranks of a machine wait for each rank.

The rank that arrives last at a synchronization waits least. So the time that the other ranks have waited for a rank is
their mean time at `Place.SYNCING`, minus this rank's own time at this place.

Only ranks of one machine are compared. Holdfast knows their places only in its own steps, and in a user's loop over
``step.shares()``. On GPUs the CPU runs ahead of the GPU, so only a rank with a slow CPU is found.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.machine.heartbeats import Beat, Phase

LEAST_STEPS = 100
LEAST_SHARE = 0.2  # two equal ranks wait for 0.01 to 0.06 of the time, if two other processes use the same 2 cores


@dataclass(frozen=True)
class SlowRank:
    """A rank for which the others wait.

    Attributes:
        where: the rank's host, and its GPU if it has one.
        share: the fraction of a step's time in which the others wait, on average over the steps ``(start, stop]``.
    """

    rank: int
    where: str
    share: float
    start: int
    stop: int

    def __str__(self) -> str:
        return (
            f"the other ranks waited for rank {self.rank} on {self.where} for {self.share:.0%} of the time, "
            f"in steps {self.start}-{self.stop}"
        )


def measure_waits(before: Mapping[int, Beat], beats: Mapping[int, Beat]) -> dict[int, float]:
    """Return, for each rank, the mean seconds that the other ranks waited for it between two readings, at least 0.

    Return an empty dict for a single rank, or if new processes have replaced the ranks.
    """
    pids, now = ({rank: beat.pid for rank, beat in each.items()} for each in (before, beats))
    if len(beats) < 2 or pids != now:
        return {}
    waited_s = {rank: beat.syncing_s - before[rank].syncing_s for rank, beat in beats.items()}
    total_s, others = sum(waited_s.values()), len(beats) - 1
    return {rank: max((total_s - own_s) / others - own_s, 0.0) for rank, own_s in waited_s.items()}


def are_at_one_step(beats: Mapping[int, Beat]) -> bool:
    """Return whether all ranks train the same step, so that the sums in their heartbeats cover the same steps."""
    return len({(beat.phase is Phase.STEP, beat.step) for beat in beats.values()}) == 1


class SlowRanks:
    """The search for a slow rank during the life of one set of ranks."""

    def __init__(self) -> None:
        self._last: Mapping[int, Beat] = {}

    def find(self, beats: Mapping[int, Beat]) -> SlowRank | None:
        """Return the slow rank, or None, judged by the steps that were trained since the last judgement.

        A call judges only after `LEAST_STEPS` steps. Until then it returns None, and later calls count these steps.
        """
        last, waits = self._last, measure_waits(self._last, beats)
        if not waits:
            self._last = dict(beats)
            return None
        start, stop = (min(beat.step for beat in each.values()) for each in (last, beats))
        if stop - start < LEAST_STEPS:
            return None
        self._last = dict(beats)
        steps_s = max(beat.steps_s - last[rank].steps_s for rank, beat in beats.items())
        slowest, waited_s = max(waits.items(), key=lambda each: each[1])
        share = waited_s / steps_s if steps_s else 0.0
        return SlowRank(slowest, beats[slowest].where, round(share, 4), start, stop) if share > LEAST_SHARE else None
