"""The delivery to a sink: find in the journal which commits the sink lacks, and send them."""

from itertools import takewhile

from holdfast.extensions.sinks.points import read_points
from holdfast.journal import Commit
from holdfast.looking.sinks import Sink


def deliver(sink: Sink) -> None:
    """Send a sink every valid commit that the sink lacks, the oldest first.

    Raises:
        Superseded: a later attempt owns the run, and sends the commits itself.
    """
    facts = sink.facts
    for commit in find_undrawn(sink):
        facts.journal.check_fence(facts.attempt)
        points = [point for point in read_points(facts.journal, commit) if point.step > sink.step]
        if points:
            sink.write(commit, points)
        sink.step = max(sink.step, commit.step)


def find_undrawn(sink: Sink) -> list[Commit]:
    """Return the valid commits that a sink lacks, oldest first. Remove rolled-back steps from the sink.

    The search goes from the newest commit to its parents, so it never reaches commits that were rolled back. The
    search ends at the first commit that the sink has: a sink draws commits in order, so it has all earlier commits.
    """
    journal = sink.facts.journal
    newest = journal.newest()
    found = list(takewhile(lambda commit: not sink.has(commit), journal.walk_back(newest)))
    if newest is not None:
        sink.rewind(found[-1].parent if found else newest.number)
    return found[::-1]
