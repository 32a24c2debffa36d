"""What a caller adds around an attempt's commits: how one is made, who hears of it, what is tidied up after it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.checkpoint import Saved
from holdfast.journal import Commit

if TYPE_CHECKING:
    from holdfast.attempt.attempt import Attempt

log = logging.getLogger(__name__)

Hook = Callable[["Attempt"], object]


@dataclass(frozen=True)
class Proposal:
    """A commit that is about to be made.

    Attributes:
        saved: the checkpoint.
        why: ``chunk``, ``preempted`` or ``adopted``.
        publish: makes the commit: publishes its record and latest.json, and returns it.
    """

    saved: Saved
    why: str
    publish: Callable[[], Commit]


def publish(attempt: "Attempt", proposal: Proposal) -> Commit:
    """Make a commit with nothing around it."""
    return proposal.publish()


@dataclass(frozen=True)
class Hooks:
    """Called for every commit of an attempt, whoever makes it: a chunk, a stop, a notice, an adoption.

    Attributes:
        commit: makes a commit by calling ``proposal.publish``; what it raises fails the commit.
        notify: told of each commit at once, in this order. They must be quick: a deadline may be near.
        upkeep: called after that, in this order; may take their time. While an attempt stops they are left to the next
            one, which calls them once its ranks train.

    A failure of `notify` or `upkeep` is a warning.
    """

    commit: Callable[["Attempt", Proposal], Commit] = publish
    notify: Sequence[Hook] = ()
    upkeep: Sequence[Hook] = ()


def call_each(hooks: Sequence[Hook], attempt: "Attempt") -> None:
    """Call hooks in their order; the failure of one is a warning and keeps no other from being called."""
    for hook in hooks:
        try:
            hook(attempt)
        except Exception as error:  # what a hook does is no concern of the run's
            log.warning("%s failed: %s; the run goes on", getattr(hook, "__name__", hook), error or repr(error))
