"""One process life of a run: claim it, find where to go on, train chunks, commit them, stop in time."""

from holdfast.attempt.attempt import Attempt, Chunk, started_ahead
from holdfast.attempt.hooks import Hooks
from holdfast.attempt.line import Line

__all__ = ["Attempt", "Chunk", "Hooks", "Line", "started_ahead"]
