"""The fraction of a run's training time that its audits may take: the time already taken, and the faults to be found.

Everything here is a pure function of records. The time of an audit is the time that the run itself spent in the
audited steps. So a busy or slow machine doesn't change which commits are chosen.

**What a share finds.** Let a run train ``D`` seconds a day, in chunks of ``c`` seconds on average. Let an audit
train ``a`` seconds on average, and ``A`` at most: a chunk, or two chunks if the audit crosses a resume. A share ``s``
then pays for ``k = s D / a`` audits a day, of ``n = D / c`` chunks, as soon as the run has trained ``A / s`` seconds.

- *One chunk was computed wrongly, once.* No commit is audited twice. The wrong chunk is among the chunks audited so far
  with the probability ``k / n = s c / a``, in any order of the audits. This is a lower bound, because an audit
  across a resume also trains the chunk before.
- *A machine computes each chunk wrongly from some step on.* The first audit of a night takes the newest commit that
  isn't certified, whose chunk is then wrong. So the first night with an audit finds the machine. A night has an audit
  with the probability ``min(1, s D / a)``; of ``ceil(max(1, A / (s D)))`` nights, at least one has an audit. Add the
  rest of the chunk in which the fault begins. Only an audit on another machine finds the fault.

Where retention leaves ``w`` commits that can be trained again, a night has at most ``w`` audits, so ``k`` is at most
``w``.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from holdfast.journal import AuditRecord, Commit
from holdfast.journal.trainers import may_follow_resume

DAY_S = 86400.0
# The tolerance for the rounding of sums of seconds: the share counts as kept if it is exceeded by no more than this.
ROUNDED = 1.0 + 1e-9

T = TypeVar("T")


# ---- the choice


def order_commits(commits: Sequence[T], seed: int, is_open: Callable[[T], bool]) -> Iterator[T]:
    """Yield the newest commit to audit, then all others in an order that the seed decides.

    Args:
        commits: newest first.
        is_open: returns whether a commit is to be audited. It is called as late as possible, because it reads records.
    """
    newest = next(filter(is_open, commits), None)
    if newest is None:
        return
    yield newest
    others = [each for each in commits if each is not newest]
    yield from filter(is_open, random.Random(seed).sample(others, len(others)))


def fill_time(ordered: Iterable[T], cost_s: Callable[[T], float], left_s: float, longest_s: float) -> list[T]:
    """Return the first commits whose audits together fit into ``left_s`` seconds.

    A commit is added only while the longest possible audit would still fit. If the commit's own length decided, long
    chunks would hardly ever fit and hardly be audited.

    Args:
        longest_s: the seconds that the longest possible audit takes.
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
    """The seconds that a run has spent in the steps of each of its commits, including rolled-back commits.

    Attributes:
        commits: the commits, by number.
        seconds: the seconds in the steps of each commit. For a commit without a time on record, the mean time of a step
            is used.
    """

    commits: Mapping[int, Commit]
    seconds: Mapping[int, float]

    @classmethod
    def of(cls, commits: Iterable[Commit]) -> "Times":
        """Return the `Times` of these commits."""
        known = {each.number: each for each in commits}
        steps = {number: _count_steps(known, each) for number, each in known.items()}
        timed = [number for number, each in known.items() if each.train_s]
        step_s = sum(known[each].train_s for each in timed) / max(sum(steps[each] for each in timed), 1)
        return cls(known, {number: each.train_s or steps[number] * step_s for number, each in known.items()})

    @property
    def trained_s(self) -> float:
        """The seconds that the run has spent in all of its steps."""
        return sum(self.seconds.values())

    def measure(self, commit: int, start: int) -> float:
        """Return the recorded seconds of the steps that an audit trains again, from the start up to a commit.

        Args:
            start: the number of the commit to begin with; 0 for the beginning of the run.
        """
        total_s = 0.0
        while commit > start and commit in self.commits:
            total_s += self.seconds[commit]
            parent = self.commits[commit].parent
            commit = parent if parent < commit else 0  # a forged record may name a later parent: don't loop
        return total_s

    def measure_audits(self, audits: Iterable[AuditRecord]) -> float:
        """Return the seconds of the steps that audits trained again; 0 for an audit whose start the gate refused."""
        return sum(self.measure(each.commit, each.from_commit) for each in audits if each.checkpoint_sha256)

    def measure_longest(self, commits: Iterable[Commit]) -> float:
        """Return the seconds of the steps that the longest audit of these commits trains again; 0 without a commit."""
        return max(map(self.measure_usual, commits), default=0.0)

    def measure_usual(self, commit: Commit) -> float:
        """Return the seconds of the chunk that an audit trains again; of two chunks if the audit crosses a resume."""
        parent = self.commits.get(commit.parent)
        crosses = parent is not None and may_follow_resume(parent, commit) and not parent.origin
        return self.seconds[commit.number] + (self.seconds[commit.parent] if crosses else 0.0)


def _count_steps(commits: Mapping[int, Commit], commit: Commit) -> int:
    parent = commits.get(commit.parent)
    return commit.step - (parent.step if parent else commit.first_start)


# ---- the plan


@dataclass(frozen=True)
class AuditPlan:
    """The cost of audits that may take a fraction of the training time, and the faults that they find.

    The module's docstring has the formulas.

    Attributes:
        chunk_s: the mean seconds of training in a chunk of the run.
        audit_s: the mean seconds of the steps that an audit trains again.
        audits_a_day: the number of audits a day that fit into the share, if the run trains day and night.
        most_a_night: the number of commits whose steps can be trained again now, if retention has deleted checkpoints;
            else None.
        ranks: the number of ranks of an audit.
        training_s, starting_s: the seconds a day that these ranks spend in training, and in starting.
        once: the probability that any given chunk is audited, so that a fault in a single chunk is found.
        first_night: the probability that a night has an audit, and so finds a machine that computes each chunk wrongly.
        within_s: the longest time, in seconds, until a machine that computes wrongly is found; None if no commit can be
            audited.
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
        """The GPU seconds that audits take a day: the seconds of all ranks together, each on a GPU."""
        return self.ranks * (self.training_s + self.starting_s)


def plan_audits(
    times: Times, share: float, restart_s: float = 0.0, ranks: int = 1, most_a_night: int | None = None
) -> AuditPlan | None:
    """Return what a share of audits costs and finds; None if no commit says how long its steps took.

    Args:
        times: the recorded times of the run, which give the lengths of its chunks.
        restart_s: the seconds until new ranks train.
        most_a_night: the number of commits whose steps can be trained again now; None for all.
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
