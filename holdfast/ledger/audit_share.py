"""The share of a run's training time that its audits may take: what they have taken, and which faults they find.

Everything here is a pure function of records. An audit counts with the seconds that the run itself spent in the steps
that the audit trains again, so that a busy or a slower machine changes no choice.

**What a share finds.** Let a run train ``D`` seconds a day, in chunks of ``c`` seconds on average, and let an audit
train ``a`` seconds on average, and ``A`` at most: a chunk, or two of them where it crosses a resume. A share ``s`` then
pays for ``k = s D / a`` audits a day, of ``n = D / c`` chunks, as soon as the run has trained ``A / s`` seconds.

- *One chunk was computed wrongly, once.* Each audit is of another commit. Any chunk may be the wrong one, so it is
  among those audited by now with the probability ``k / n = s c / a``, whatever the order. That is the least: an audit
  across a resume trains the chunk before, too.
- *A machine computes each chunk wrongly from some step on.* The first audit of a night is of the newest commit that
  isn't certified, which is such a chunk. So the first night with an audit finds it. A night has one with the
  probability ``min(1, s D / a)``, and at least one in ``ceil(max(1, A / (s D)))`` nights has. To that comes the chunk
  in which the fault begins. Only an audit on another machine finds it.

Where retention leaves ``w`` commits that can be trained again, a night has at most ``w`` audits, and ``k`` is no more.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from holdfast.journal import AuditRecord, Commit, may_follow_resume

DAY_S = 86400.0
# Sums of seconds are rounded: this much more than the share is still the share.
ROUNDED = 1.0 + 1e-9

T = TypeVar("T")


# ---- the choice


def order_commits(commits: Sequence[T], seed: int, is_open: Callable[[T], bool]) -> Iterator[T]:
    """Yield the newest commit to audit, then all others in an order that the seed decides.

    Args:
        commits: newest first.
        is_open: returns whether a commit is to be audited; called as late as possible, because it reads records.
    """
    newest = next(filter(is_open, commits), None)
    if newest is None:
        return
    yield newest
    others = [each for each in commits if each is not newest]
    yield from filter(is_open, random.Random(seed).sample(others, len(others)))


def fill_time(ordered: Iterable[T], cost_s: Callable[[T], float], left_s: float, longest_s: float) -> list[T]:
    """Return the first commits whose audits fit into a time.

    Another commit is taken while the longest audit would still fit. If the commit's own length decided, a night would
    wait at a long chunk until a later night began with a short one, and long chunks would hardly be audited.

    Args:
        longest_s: the seconds of the longest audit that there can be.
    """
    taken: list[T] = []
    for each in ordered:
        if longest_s > left_s * ROUNDED:
            break
        left_s -= cost_s(each)
        taken.append(each)
    return taken


# ---- the times on record


@dataclass(frozen=True)
class Times:
    """The seconds that a run has spent in the steps of each of its commits, those that don't count any more included.

    Attributes:
        commits: the commits, by number.
        seconds: the seconds in the steps of each. A commit without a time on record has the mean step's time.
    """

    commits: Mapping[int, Commit]
    seconds: Mapping[int, float]

    @classmethod
    def of(cls, commits: Iterable[Commit]) -> "Times":
        """Return the times of these commits."""
        known = {each.number: each for each in commits}
        steps = {number: _count_steps(known, each) for number, each in known.items()}
        timed = [number for number, each in known.items() if each.train_s]
        step_s = sum(known[each].train_s for each in timed) / max(sum(steps[each] for each in timed), 1)
        return cls(known, {number: each.train_s or steps[number] * step_s for number, each in known.items()})

    @property
    def trained_s(self) -> float:
        """The seconds in all steps of the run."""
        return sum(self.seconds.values())

    def measure(self, commit: int, start: int) -> float:
        """Return the seconds that an audit trains again: the steps up to a commit, from the start on.

        Args:
            start: the number of the commit to begin with; 0 for the beginning of the run.
        """
        total_s = 0.0
        while commit > start and commit in self.commits:
            total_s += self.seconds[commit]
            parent = self.commits[commit].parent
            commit = parent if parent < commit else 0  # a forged record may name a later parent
        return total_s

    def measure_audits(self, audits: Iterable[AuditRecord]) -> float:
        """Return the seconds that audits have trained again; an audit whose start the gate refused trained nothing."""
        return sum(self.measure(each.commit, each.from_commit) for each in audits if each.checkpoint_sha256)

    def measure_longest(self, commits: Iterable[Commit]) -> float:
        """Return the most seconds that an audit of one of these commits trains again; 0 without a commit."""
        return max(map(self.measure_usual, commits), default=0.0)

    def measure_usual(self, commit: Commit) -> float:
        """Return the seconds that an audit of a commit usually trains again: two chunks if it crosses a resume."""
        parent = self.commits.get(commit.parent)
        crosses = parent is not None and may_follow_resume(parent, commit) and not parent.origin
        return self.seconds[commit.number] + (self.seconds[commit.parent] if crosses else 0.0)


def _count_steps(commits: Mapping[int, Commit], commit: Commit) -> int:
    parent = commits.get(commit.parent)
    return commit.step - (parent.step if parent else commit.first_start)


# ---- the plan


@dataclass(frozen=True)
class AuditPlan:
    """What a share of audits costs, and which faults it finds; the module's docstring has the formulas.

    Attributes:
        chunk_s: the mean seconds of training in a chunk of the run.
        audit_s: the mean seconds that an audit trains again.
        audits_a_day: the audits that the share pays for, if the run trains day and night.
        most_a_night: the commits that can be trained again at a time, if retention has deleted some; else None.
        ranks: the ranks that an audit trains with.
        training_s, starting_s: the seconds a day that these ranks train again, and that they take to start.
        once: the probability that a chunk is audited, and so that a chunk which was computed wrongly once is found.
        first_night: the probability that a night has an audit, which finds a machine that computes each chunk wrongly.
        within_s: the seconds in which such a machine is found at the latest; None if nothing can be audited.
    """

    share: float
    chunk_s: float
    audit_s: float
    audits_a_day: float
    most_a_night: int | None
    ranks: int
    training_s: float
    starting_s: float
    once: float
    first_night: float
    within_s: float | None

    @property
    def gpu_s(self) -> float:
        """The seconds a day that audits take of all ranks together, each on a GPU."""
        return self.ranks * (self.training_s + self.starting_s)


def plan_audits(
    times: Times, share: float, restart_s: float = 0.0, ranks: int = 1, most_a_night: int | None = None
) -> AuditPlan | None:
    """Return what a share of audits costs and finds; None if no commit says how long its steps took.

    Args:
        times: the run's, from whose chunks the lengths are taken.
        restart_s: the seconds until new ranks train.
        most_a_night: the commits that can be trained again at a time; None for all.
    """
    chunks = [each for each in times.commits.values() if not each.origin]
    trained_s = sum(times.seconds[each.number] for each in chunks)
    if not trained_s or share <= 0:
        return None
    chunk_s = trained_s / len(chunks)
    audit_s = sum(map(times.measure_usual, chunks)) / len(chunks)
    day_s = DAY_S * trained_s / (trained_s + sum(each.stall_s for each in chunks))
    longest = times.measure_longest(chunks) / audit_s
    audits = min(share * day_s / audit_s, math.inf if most_a_night is None else most_a_night)
    return AuditPlan(
        share=share,
        chunk_s=chunk_s,
        audit_s=audit_s,
        audits_a_day=audits,
        most_a_night=most_a_night,
        ranks=ranks,
        training_s=audits * audit_s,
        starting_s=audits * restart_s,
        once=audits * chunk_s / day_s,
        first_night=min(1.0, audits),
        within_s=math.ceil(max(1.0, longest / audits) - 1e-9) * DAY_S + chunk_s if audits else None,
    )
