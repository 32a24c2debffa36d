"""One process life of a run: claim it, find where to go on, train chunks, commit them, stop in time."""

from holdfast.attempt.attempt import Attempt, Chunk, start_ahead
from holdfast.attempt.line import Line

__all__ = ["Attempt", "Chunk", "Line", "start_ahead"]
