"""The shadow of a stop, trained late: for a stop that left its ranks no time to train on after their save.

New ranks start from the state before the stop's commit, train the commit's steps again, and train on past the stop.
They haven't stopped there, so their steps show whether the resume was exact, as a stop's own shadow does; see
`holdfast.rank.shadow`.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.attempt.line import Line
from holdfast.attempt.ranks import AttemptRanks, Renew
from holdfast.checkpoint import read_checkpoint_lines
from holdfast.checkpoint.departure import MOST_DETAILED
from holdfast.checkpoint.found import Found
from holdfast.config.steps import Steps
from holdfast.errors import RankDied
from holdfast.journal import Commit

log = logging.getLogger(__name__)

# The seconds of a commit's steps that are trained again in any case. More than that has to fit into `proof.share`.
BRIEF_S = 60.0


class Late(NamedTuple):
    """The steps of ranks that trained through a stop.

    Attributes:
        known: the trail of the stop's commit.
        lines: the trail of the same steps, trained again, and of some steps after the stop.
        unregistered: the values at the stop that the commit's checkpoint doesn't contain.
    """

    known: list[dict[str, Any]]
    lines: list[dict[str, Any]]
    unregistered: list[Found]


def may_train_late(line: Line, ranks: AttemptRanks) -> bool:
    """Return whether the head is the commit of a stop whose steps can be trained again in a short time."""
    head = line.head
    if head is None or not _is_of_a_stop(line, head) or head.step + 1 >= _count_total(line, ranks):
        return False
    if not _has_state_before(line):
        return False
    pays = line.verdict.unrehearsed_s * ranks.config.proof.share > head.train_s or ranks.config.proof.share == 1
    return pays or head.train_s <= BRIEF_S


def train_late(line: Line, ranks: AttemptRanks, renew: Renew, has_notice: Callable[[], bool]) -> Late | None:
    """Train the steps of the head's commit and of its stop's shadow in new ranks. Afterwards restore the head again.

    Return None if some steps were not trained, because the ranks were told to end or the skip list has changed.
    """
    head = line.head
    assert head is not None
    known = read_checkpoint_lines(line.journal.store, head.path)
    skipped = Steps.parse(ranks.config.skip)
    if any(bool(each.get("skipped")) != (each["step"] in skipped) for each in known):
        return None
    log.info(
        "the stop after step %d left no steps to compare with those of this attempt, so new ranks train such steps "
        "now, from the commit before",
        head.step,
    )
    ranks.is_quiet = True
    try:
        lines, unregistered = _train_through(line, ranks, renew, has_notice)
        ranks.end_running()
        renew(None)
    finally:
        ranks.is_quiet = False
    return Late(known, lines, unregistered) if lines and lines[-1]["step"] > head.step else None


def _train_through(
    line: Line, ranks: AttemptRanks, renew: Renew, has_notice: Callable[[], bool]
) -> tuple[list[dict[str, Any]], list[Found]]:
    """Train the head's steps and some steps after them. Return their trail, and the unsaved values at the head."""
    head = line.head
    assert head is not None
    ranks.end_running()
    try:
        renew(head)
        ranks.own.gives_up = has_notice
        lines = _train(ranks, head.step)
        unregistered = ranks.own.examine().unregistered
        stop = min(head.step + MOST_DETAILED, _count_total(line, ranks) - 1)
        return [*lines, *_train(ranks, stop)], unregistered
    except RankDied as error:
        if not error.data.get("is_given_up"):
            raise
        return [], []


def _train(ranks: AttemptRanks, stop: int) -> list[dict[str, Any]]:
    ranks.own.rehearse(stop, ranks.present.fingerprint, is_kept=False, is_repeated=True)
    return ranks.own.await_rehearsed().lines


def _count_total(line: Line, ranks: AttemptRanks) -> int:
    return ranks.config.epochs * line.steps_per_epoch


def _is_of_a_stop(line: Line, head: Commit) -> bool:
    """Return whether the head is the last commit of ranks that were told to stop, maybe at the end of a chunk."""
    ending = line.journal.read_ending(head.attempt)
    is_ended_here = ending is not None and (ending.ending.reason, ending.ending.step) == ("preempted", head.step)
    return head.why == "preempted" or is_ended_here


def _has_state_before(line: Line) -> bool:
    """Return whether the state before the head's steps exists: the run's beginning, or an unpruned checkpoint."""
    head = line.head
    if head is None or head.parent == 0:
        return head is not None
    parent = line.journal.find_parent(head)
    return parent is not None and line.read_metadata(parent) is not None
