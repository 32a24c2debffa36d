"""The publication of a commit: check the checkpoint's fingerprint and hashes, write the record, then latest.json.

All commits are published here, for every reason: a chunk, a stop, a notice, an adoption.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.attempt.line import Line
from holdfast.checkpoint import Saved
from holdfast.errors import ConfigDrift
from holdfast.journal import Commit
from holdfast.journal.spikes import describe_spikes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Proposal:
    """A commit that is about to be made.

    Attributes:
        saved: the checkpoint.
        reason: ``chunk``, ``preempted``, ``adopted`` or ``imported``.
        is_urgent: whether the attempt has been told to end.
    """

    saved: Saved
    reason: str
    is_urgent: bool = False


Publish = Callable[[Line, Proposal], Commit]


def publish_commit(line: Line, proposal: Proposal) -> Commit:
    """Check a checkpoint, publish its commit's record and latest.json, and return the commit. Log the commit's spikes.

    Raises:
        ConfigDrift: the checkpoint was trained with different settings than the run's.
        CheckpointDamaged: a file of the checkpoint is missing or cut short, or its hashes contradict each other.
        Superseded: a later attempt owns the run.
    """
    if line.head is not None and line.head.path == proposal.saved.path:
        return line.head  # an interrupted call made this commit already
    check_fingerprint(line, proposal)
    commit = line.commit(proposal.saved, proposal.reason)
    for step, text in describe_spikes(commit.spikes).items():
        log.warning("%s; to see why: holdfast explain %s %d", text, line.journal.store.url, step)
    return commit


def check_fingerprint(line: Line, proposal: Proposal) -> None:
    """Check that a checkpoint was trained with the run's settings.

    For an adopted checkpoint, a few other settings are allowed; see `Line.may_adopt`.

    Raises:
        ConfigDrift: the checkpoint was trained with different settings.
    """
    trained_with = proposal.saved.metadata.config_fingerprint
    is_adopted = proposal.reason == "adopted" and line.may_adopt(trained_with)
    if trained_with != line.config_fingerprint and not is_adopted:
        path, current = proposal.saved.path, line.config_fingerprint
        raise ConfigDrift(
            f"checkpoint {path} was trained with settings of the fingerprint {trained_with[:16]}, and the run has "
            f"settings of the fingerprint {current[:16]}",
            hint="continue with the settings of the checkpoint; holdfast diff shows which settings changed",
        )
