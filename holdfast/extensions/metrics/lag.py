"""The metrics of each rank: its step, and the seconds for which the other ranks waited for it; see `measure_waits`."""

from collections.abc import Mapping

from holdfast.extensions.metrics.readings import Readings
from holdfast.machine.heartbeats import Beat
from holdfast.machine.slow_ranks import are_at_one_step, measure_waits


class Lag:
    """Counts the lag of each rank: the seconds for which the other ranks waited for it."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._last: Mapping[int, Beat] = {}

    def look(self, beats: Mapping[int, Beat]) -> None:
        """Record each rank's step. Add to its lag the seconds that the other ranks waited for it since the last call.

        While ranks train different steps, add nothing. The next call at which all ranks train the same step adds these
        seconds.
        """
        waits = measure_waits(self._last, beats) if are_at_one_step(beats) else {}
        for rank, beat in beats.items():
            self._readings.put("holdfast.rank.step", beat.step, str(rank))
            self._readings.add("holdfast.rank.lag", waits.get(rank, 0.0), str(rank))
        if are_at_one_step(beats):
            self._last = dict(beats)
