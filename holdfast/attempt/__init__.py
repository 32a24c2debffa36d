"""One start of a run (attempt): claim the run, find the commit to continue from, train and commit chunks, stop."""

from holdfast.attempt.ahead import started_ahead
from holdfast.attempt.attempt import Attempt
from holdfast.attempt.commits import Proposal, publish_commit
from holdfast.attempt.life import (
    RETRIES,
    RETRY_AFTER_S,
    Acts,
    Cause,
    find_ending,
    live,
    opens_again,
    surrounded,
    train,
    trains_again,
)
from holdfast.attempt.line import Line
from holdfast.attempt.observers import AttemptView, CheckpointVerdict, Observer
from holdfast.attempt.pipeline import Chunk

__all__ = [
    "RETRIES",
    "RETRY_AFTER_S",
    "Acts",
    "Attempt",
    "AttemptView",
    "Cause",
    "CheckpointVerdict",
    "Chunk",
    "Line",
    "Observer",
    "Proposal",
    "find_ending",
    "live",
    "opens_again",
    "publish_commit",
    "started_ahead",
    "surrounded",
    "train",
    "trains_again",
]
