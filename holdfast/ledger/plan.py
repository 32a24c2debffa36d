"""The plan for a run: the best chunks, from the times of its commits, and the goodput on recorded preemptions."""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from holdfast.checkpoint import read_metadata
from holdfast.config import Compute, RunConfig
from holdfast.errors import WrongUse
from holdfast.journal import Journal
from holdfast.journal.reading import read_all
from holdfast.ledger.audit_share import AuditPlan, Times, plan_audits
from holdfast.ledger.forecast import NOTICES_S, Forecast, Warning, find_best_steps, forecast, reserve_s
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
from holdfast.ledger.near_saves import NearForecast, compare_near
from holdfast.ledger.pool import PoolForecast, forecast_pool
from holdfast.ledger.traces import Trace

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
        ranks: the most ranks that the run has.
        virtual_ranks: the number of virtual ranks, into whose shares each batch is divided.
        worst: the number of ranks at which the most time is lost.
        waiting: the fraction of a step for which an average rank then waits for the rank with the most virtual ranks.
    """

    ranks: int
    virtual_ranks: int
    worst: int
    waiting: float

    @classmethod
    def of(cls, ranks: int, virtual_ranks: int) -> "Dealing":
        """Return the assignment to at most ``ranks`` ranks. Compute at which number of ranks the most time is lost."""
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
        near_every_steps: ``near.every_steps`` of the configuration.
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
    near_every_steps: int = 0


@dataclass(frozen=True)
class Assumed:
    """The assumptions of a replay of traces, besides the run's measured times.

    Attributes:
        near_every_steps: the number of steps between two saves into the node's folder; 0 for no such saves.
        near_save_s: seconds until a save into the node's folder is complete. None assumes the time of a save to the
            store, which is an upper bound.
        same_node: the share of losses after which the next attempt finds the node's folder. None shows both 0 and 1.
        pool: the number of runs in a pool, one of which is lost at each preemption; 0 for no comparison of pools.
    """

    near_every_steps: int = 0
    near_save_s: float | None = None
    same_node: float | None = None
    pool: int = 0


@dataclass(frozen=True)
class Noticed:
    """The gain from preemption notices on a trace, with the best chunks.

    Attributes:
        notice_s: seconds between a notice and the loss.
        is_enough: whether a last save fits between the notice and the loss.
        kept: the share of losses that a notice precedes.
        gain: the goodput that the notices add.
    """

    notice_s: float
    is_enough: bool
    kept: float
    gain: float


@dataclass(frozen=True)
class TracePlan:
    """The forecast for a run on a trace, and the settings that suit the trace.

    Attributes:
        mean_s: the mean time between two preemptions, in seconds.
        available: the share of the time in which the job was up.
        best: chunks with the highest goodput on the trace.
        chosen: chunks of the length that the run's own plan has.
        last_save_s: seconds that a last save needs before a deadline.
        keep_every_steps: the setting of retention that keeps one checkpoint in each mean time between preemptions.
        near: the forecasts with saves into the node's folder; empty if no such saves are assumed.
        pool: the losses of a pool whose scheduler preempts the run that loses least; None if no pool is assumed.
    """

    trace: str
    source: str
    nodes: int
    preemptions: int
    mean_s: float
    available: float
    best: Forecast
    chosen: Forecast
    notices: tuple[Noticed, ...]
    last_save_s: float
    keep_every_steps: int
    near: tuple[NearForecast, ...] = ()
    pool: PoolForecast | None = None


def plan_on_traces(plan: Plan, traces: Sequence[Trace], assumed: Assumed = Assumed()) -> list[TracePlan]:
    """Return a plan for each trace, with a run's measured costs. The trace with most training an hour comes first."""
    plans = [_plan_on_trace(plan, trace, assumed) for trace in traces]
    return sorted(plans, key=lambda each: -each.best.per_hour)


def _plan_on_trace(plan: Plan, trace: Trace, assumed: Assumed) -> TracePlan:
    measured = plan.measured
    steps = find_best_steps(trace, measured)
    best = forecast(trace, measured, steps)
    needed_s = reserve_s(measured)

    def value(notice_s: float) -> Noticed:
        warning = Warning(notice_s)
        gain = forecast(trace, measured, steps, warning).goodput - best.goodput
        return Noticed(notice_s, needed_s <= notice_s, warning.kept, gain)

    own_steps = plan.current.steps if plan.current else plan.best.steps
    return TracePlan(
        trace=trace.name,
        source=trace.source,
        nodes=trace.nodes,
        preemptions=trace.preemptions,
        mean_s=trace.mean_s,
        available=trace.available_s / max(trace.span_s, trace.up[-1][1]),
        best=best,
        chosen=forecast(trace, measured, own_steps),
        notices=tuple(map(value, NOTICES_S)),
        last_save_s=needed_s,
        keep_every_steps=max(steps, round(trace.mean_s / measured.step_s)),
        near=_plan_near(trace, measured, (steps, own_steps), assumed),
        pool=forecast_pool(trace, measured, own_steps, assumed.pool, plan.ranks) if assumed.pool else None,
    )


def _plan_near(trace: Trace, measured: Measured, lengths: Sequence[int], assumed: Assumed) -> tuple[NearForecast, ...]:
    if not assumed.near_every_steps:
        return ()
    save_s = measured.save_s if assumed.near_save_s is None else assumed.near_save_s
    shares = {0.0, 1.0} if assumed.same_node is None else {assumed.same_node}
    return tuple(
        compare_near(trace, measured, [*dict.fromkeys(lengths)], assumed.near_every_steps, save_s, sorted(shares))
    )


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
            f"run {journal.run!r} has no commit that counts",
            hint=f"train the first chunk, which measures a save; a chunk of automatic length has {FIRST_STEPS} steps",
        )
    measured = measure_costs(read_costs(journal))
    if measured is None:
        raise WrongUse(
            f"the newest commits of run {journal.run!r} don't say how long their steps and saves took",
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
        near_every_steps=config.near.every_steps if config else 0,
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


def read_config(journal: Journal) -> RunConfig | None:
    """Return the settings that a run was last trained with; None if this version can't read them."""
    snapshot = journal.read_snapshot()
    try:
        return RunConfig.model_validate(snapshot.config) if snapshot else None
    except ValidationError:  # a version of Holdfast with other settings wrote the snapshot
        return None
