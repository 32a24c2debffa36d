"""The plan for a run: the best chunks, from the times of its commits."""

from dataclasses import dataclass

from holdfast.checkpoint import read_metadata
from holdfast.config import Compute, RunConfig
from holdfast.errors import WrongUse
from holdfast.journal import Journal
from holdfast.journal.reading import read_all
from holdfast.ledger.audit_share import AuditPlan, Times, plan_audits
from holdfast.ledger.history import read_costs, read_losses
from holdfast.ledger.interval import (
    FIRST_STEPS,
    Expected,
    Interval,
    Losses,
    Measured,
    choose_interval,
    expect,
    measure_costs,
)

# The advised range of virtual ranks per rank in a pool whose size changes. With fewer virtual ranks, the ranks wait too
# long for the rank that trains the most virtual ranks.
SHARES_A_RANK = (4, 8)


@dataclass(frozen=True)
class Chunks:
    """A chunk length in steps, and the time that a run is expected to lose with it."""

    steps: int
    interval_s: float
    expected: Expected

    @classmethod
    def of(cls, steps: int, measured: Measured, losses: Losses) -> "Chunks":
        """Return chunks of `steps` steps with their expected lost time."""
        interval_s = steps * measured.step_s
        return cls(steps, interval_s, expect(measured, losses, interval_s))


@dataclass(frozen=True)
class Dealing:
    """The assignment of virtual ranks to the ranks of a run, or to fewer ranks if machines were lost.

    Attributes:
        ranks: the maximum number of ranks of the run.
        virtual_ranks: the number of virtual ranks; each batch is divided into this number of shares.
        worst: the number of ranks at which the most time is lost.
        waiting: the fraction of a step for which an average rank then waits for the rank with the most virtual ranks.
    """

    ranks: int
    virtual_ranks: int
    worst: int
    waiting: float

    @classmethod
    def of(cls, ranks: int, virtual_ranks: int) -> "Dealing":
        """Return the assignment to at most ``ranks`` ranks. Find the number of ranks at which the most time is lost."""
        waiting, worst = max(
            (1 - virtual_ranks / (each * -(-virtual_ranks // each)), each) for each in range(1, ranks + 1)
        )
        return cls(ranks, virtual_ranks, worst, waiting)

    @property
    def larger(self) -> "Dealing":
        """Return the assignment with eight times as many virtual ranks as ranks."""
        return self.of(self.ranks, SHARES_A_RANK[1] * self.ranks)


@dataclass(frozen=True)
class Plan:
    """The best and the current chunks of a run.

    Attributes:
        best: chunks with which the run is expected to lose the least time, but not shorter than the lower bounds of
            `choose_interval`. Automatic chunks have this length, but end with their epoch.
        current: chunks as the configuration sets them; None if the configuration was lost.
        is_auto: whether the configuration asks for automatic chunks.
        dealing: the assignment of the run's virtual ranks to its ranks; None if it has no virtual ranks.
        ranks: the run's ranks on all of its nodes; 1 if the configuration leaves the number to the machine.
    """

    run: str
    measured: Measured
    losses: Losses
    interval: Interval
    best: Chunks
    current: Chunks | None
    is_auto: bool
    dealing: Dealing | None
    ranks: int = 1


def make_plan(journal: Journal, config: RunConfig | None) -> Plan:
    """Plan how long the chunks of a run should be.

    Args:
        config: the run's settings; None if they were lost.

    Raises:
        WrongUse: no commit has recorded its times yet.
    """
    newest = journal.newest()
    if newest is None:
        raise WrongUse(
            f"run {journal.run!r} has no commit yet that counts",
            hint="train until the first commit, which records how long a save takes: at most "
            f'{FIRST_STEPS} steps with chunk = "auto"',
        )
    measured = measure_costs(read_costs(journal))
    if measured is None:
        raise WrongUse(
            f"the newest commits of run {journal.run!r} have no record of how long their steps and saves took",
            hint="train one more chunk: its commit records both",
        )
    losses = read_losses(journal)
    interval = choose_interval(measured, losses)
    metadata = read_metadata(journal.store, newest.path)
    steps = config.next_stop(0, metadata.steps_per_epoch, interval.steps) if config and metadata else 0
    return Plan(
        run=journal.run,
        measured=measured,
        losses=losses,
        interval=interval,
        best=Chunks.of(interval.steps, measured, losses),
        current=Chunks.of(steps, measured, losses) if steps else None,
        is_auto=config is not None and config.chunk.is_auto,
        dealing=_read_dealing(config.compute) if config else None,
        ranks=_count_ranks(config.compute) if config else 1,
    )


def plan_share(journal: Journal, plan: Plan, share: float) -> AuditPlan | None:
    """Return the cost of a share of audits for a run, and the faults that these audits find; see `plan_audits`.

    The result is None if no commit says how long its steps took.
    """
    times = Times.of(filter(None, read_all(journal.find_commit, journal.numbers("commits"))))
    most = None
    if journal.numbers("pruned"):
        there = {each.number for each in journal.candidates()}
        most = sum(not times.commits[number].parent or times.commits[number].parent in there for number in there)
    return plan_audits(times, share, plan.measured.restart_s, plan.ranks, most)


def _read_dealing(compute: Compute) -> Dealing | None:
    if not compute.virtual_ranks or compute.ranks == "all":
        return None
    ranks = _count_ranks(compute) // compute.tensor_ranks
    return Dealing.of(ranks, compute.virtual_ranks) if ranks > 1 else None


def _count_ranks(compute: Compute) -> int:
    return compute.node_range[1] * (1 if compute.ranks == "all" else compute.ranks)
