"""The search for a slow rank, from heartbeats: one for which the others wait in a large share of each step.

A rank that arrives last where the ranks meet waits least there. So the slowest rank is the one with the least time at
`Place.SYNCING`, and the others' mean time there beyond its own is what it costs them.

Only ranks of one machine are compared, and only where the engine marks the places: in its own steps, and in the shares
of a loop. On GPUs the host runs ahead of its device, so that only a rank with a slow host is found.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.machine.heartbeats import Beat

LEAST_STEPS = 100
LEAST_SHARE = 0.2  # two equal ranks beside two busy processes, on 2 cores: 0.01 to 0.06


@dataclass(frozen=True)
class SlowRank:
    """A rank for which the others wait.

    Attributes:
        share: the share of a step in which the others wait, on average over the steps ``(start, stop]``.
        where: the rank's host, and its GPU if it has one.
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


class SlowRanks:
    """The search over the life of one set of ranks."""

    def __init__(self) -> None:
        self._last: Mapping[int, Beat] = {}

    def find(self, beats: Mapping[int, Beat]) -> SlowRank | None:
        """Return the slow rank of the steps since the last search that judged any, if there is one.

        As long as these are fewer than `LEAST_STEPS`, nothing is judged.
        """
        if self._last.keys() != beats.keys():
            self._last = dict(beats)
            return None
        start, stop = (min((beat.step for beat in each.values()), default=0) for each in (self._last, beats))
        if len(beats) < 2 or stop - start < LEAST_STEPS:
            return None
        steps_s = max(beat.steps_s - self._last[rank].steps_s for rank, beat in beats.items())
        syncing_s = {rank: beat.syncing_s - self._last[rank].syncing_s for rank, beat in beats.items()}
        self._last = dict(beats)
        slowest, least_s = min(syncing_s.items(), key=lambda each: each[1])
        waited_s = sum(each - least_s for each in syncing_s.values()) / (len(beats) - 1)
        share = waited_s / steps_s if steps_s else 0.0
        return SlowRank(slowest, beats[slowest].where, share, start, stop) if share > LEAST_SHARE else None
