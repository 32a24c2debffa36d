"""The lag of each rank of a machine: how long other ranks wait for it, sampled from the ranks' heartbeats.

Ranks that train together take each step together, so no rank is more than one step behind. The slow rank is the one
that computes or loads data while another rank already waits for it.
"""

import time
from collections.abc import Mapping

from holdfast.looking.metrics.readings import Readings
from holdfast.machine.heartbeats import Beat, Phase, Place

# The longest time, in seconds, that one look adds. After a longer pause the process or the machine itself was
# suspended.
MOST_S = 2.0


class Lag:
    """Adds the time since the last look to the lag of each rank for which another rank waits."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._looked_at = time.monotonic()

    def look(self, beats: Mapping[int, Beat]) -> None:
        """Take a sample."""
        now = time.monotonic()
        elapsed_s, self._looked_at = min(now - self._looked_at, MOST_S), now
        training = {rank: beat for rank, beat in beats.items() if beat.phase is Phase.STEP}
        waiting = [beat.step for beat in training.values() if beat.place is Place.SYNCING]
        late = {
            rank
            for rank, beat in training.items()
            if waiting and beat.place is not Place.SYNCING and beat.step <= max(waiting)
        }
        for rank, beat in beats.items():
            self._readings.put("holdfast.rank.step", beat.step, str(rank))
            self._readings.add("holdfast.rank.lag", elapsed_s if rank in late else 0.0, str(rank))
