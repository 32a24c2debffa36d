"""The steps at which rehearsals start, and how many steps they last.

State with a period that divides a chunk has the same phase at each commit, in a new process and in an old one. State
that begins anew in each epoch has the same value at each epoch's end. So rehearsals don't start at commits alone.
"""

from collections.abc import Sequence

from holdfast.checkpoint.departure import MOST_REHEARSED, REHEARSED_STEPS
from holdfast.journal import RehearsedSteps
from holdfast.journal.records import RehearsalKind

KINDS: tuple[RehearsalKind, ...] = ("inside", "across", "commit")
# The periods that the phases of rehearsals are chosen for.
PERIODS = range(2, 9)
# The number of steps among which a start inside a chunk is chosen; the first start has at least this distance from the
# commit, if the chunk is long enough.
SEARCHED, DISTANCE = 40, 8
# The number of steps before an epoch's end among which a start is chosen, and how many steps of the next epoch are
# rehearsed at least.
BEFORE_END, AFTER_END = 5, 2
# The fraction of a chunk between the places of two successive starts; its multiples are spread evenly over the chunk.
SPREAD = 0.618


def count_rehearsed(restart_s: float, steps_per_s: float) -> int:
    """Return the number of steps of a rehearsal that takes about as long as the restart before it.

    Args:
        steps_per_s: the speed of the ranks; 0 if it is unknown.
    """
    return max(REHEARSED_STEPS, min(MOST_REHEARSED, round(restart_s * steps_per_s)))


def find_end(after: int, last: int, per_epoch: int) -> int:
    """Return the first end of an epoch in the steps ``(after, last]``; 0 if there is none."""
    end = (after // per_epoch + 1) * per_epoch
    return end if end <= last else 0


def choose_inside(start: int, stop: int, per_epoch: int, past: Sequence[RehearsedSteps]) -> int:
    """Return the step inside the chunk ``(start, stop]`` after which a rehearsal starts; 0 if the chunk is too short.

    Its distances from the commit and from the epoch's beginning have as few divisors from 2 to 8 as possible. Later
    rehearsals start at other places of the chunk, and at other phases.
    """
    count = sum(each.kind == "inside" for each in past)
    first = start + 1 + int((stop - start) * (count * SPREAD % 1))
    steps = range(first, min(first + SEARCHED, stop - 1)) or range(start + 1, stop - 1)
    return max(steps, key=lambda step: _rate(step, start, per_epoch, past), default=0)


def choose_across(start: int, stop: int, per_epoch: int, total: int, past: Sequence[RehearsedSteps]) -> int:
    """Return the step inside a chunk after which a rehearsal across an epoch's end starts; 0 if the chunk has none.

    The run's last epoch has no successor, so its end is left out.
    """
    end = find_end(start + 1, min(stop, total - AFTER_END), per_epoch)
    steps = range(max(start + 1, end - BEFORE_END), end)
    return max(steps, key=lambda step: _rate(step, start, per_epoch, past), default=0) if end else 0


def _rate(step: int, start: int, per_epoch: int, past: Sequence[RehearsedSteps]) -> tuple[int, int, bool, int]:
    """Return the sort key of a possible start. First comes the start with the most phases that no commit has had."""
    within = step % per_epoch
    phases = sum(bool((step - start) % period and within % period) for period in PERIODS)
    known = [each.start % per_epoch for each in past]
    new = sum(all((within - each) % period for each in known) for period in PERIODS)
    return phases, new, step - start >= DISTANCE, -step


def describe_steps(kind: RehearsalKind, start: int, stop: int, per_epoch: int) -> RehearsedSteps:
    """Return the record of the steps ``(start, stop]`` of an equal rehearsal."""
    return RehearsedSteps(kind=kind, start=start, stop=stop, has_end=bool(find_end(start + 1, stop - 1, per_epoch)))
