"""The command ``plan``: the best length for a run's chunks, with the reasons, and a replay of preemption traces."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter, validators

from holdfast.cli.app import Json, app, print_json
from holdfast.config import load_config
from holdfast.errors import WrongUse
from holdfast.journal import Journal
from holdfast.journal.finding import open_journal
from holdfast.ledger.audit_share import AuditPlan
from holdfast.ledger.interval import PRIOR_LOSSES, PRIOR_S
from holdfast.ledger.near_saves import NearForecast
from holdfast.ledger.plan import (
    SHARES_A_RANK,
    Assumed,
    Chunks,
    Dealing,
    Plan,
    TracePlan,
    make_plan,
    plan_on_traces,
    plan_share,
    read_config,
)
from holdfast.ledger.pool import PoolForecast
from holdfast.ledger.traces import list_shipped, read_trace
from holdfast.store import open_store
from holdfast.terminal import counted
from holdfast.terminal.columns import tabulate

REASONS = {
    "least lost": "sqrt(2 x cost x time between losses), where saves and redone steps together cost least",
    "a save's length": "one and a half times the length of a save, so that no save waits for the one before",
    "floor": "the minimum, so that the work between two chunks costs less than 1 %",
}

NearSteps = Annotated[
    int | None, Parameter(name="--near-steps", validator=validators.Number(gte=1), show_default=False)
]
NearSaveSeconds = Annotated[
    float | None, Parameter(name="--near-save-s", validator=validators.Number(gte=0), show_default=False)
]
SameNode = Annotated[
    float | None, Parameter(name="--same-node", validator=validators.Number(gte=0, lte=1), show_default=False)
]
Pool = Annotated[int, Parameter(name="--pool", validator=validators.Number(gte=0, lte=1000), show_default=False)]

HEADER = ("chunks", "steps", "long", "lost to saves", "redone steps", "saves under way", "restarts", "in all")


@app.command
def plan(
    run: str,
    /,
    *,
    trace: Annotated[list[str] | None, Parameter(negative="", consume_multiple=False)] = None,
    audit_share: float | None = None,
    near_steps: NearSteps = None,
    near_save_s: NearSaveSeconds = None,
    same_node: SameNode = None,
    pool: Pool = 0,
    json: Json = False,
) -> None:
    """Show the best length for the chunks of a run, and what it costs. With chunk = "auto", training uses that length.

    Args:
        run: <store>/<run>; or a configuration (a .toml file), to compare the best chunks with the chunks that the
            configuration sets.
        trace: Replay a recorded history of preemptions: a file, or the name of one that comes with Holdfast. Several
            are compared, as pools to choose from.
        audit_share: Also show what audits of this share of the training time cost, such as 0.01, and what they find.
        near_steps: On each trace, show what saves into the node's folder after every n-th step are worth. By default
            the near.every_steps of the configuration, if set.
        near_save_s: The seconds until such a save is complete; by default as long as a save to the store takes.
        same_node: The share of losses, from 0 to 1, after which the next attempt begins on a node that still has the
            folder. By default both 0 and 1 are shown.
        pool: On each trace, let each preemption end one run of this many equal runs. Show the loss if it ends a random
            run, and if it ends the run that loses least.
        json: Print JSON.
    """
    if audit_share is not None and not 0 < audit_share <= 1:
        raise WrongUse(f"--audit-share {audit_share:g}: expected a share of the training time, such as 0.01")
    traces = list(map(read_trace, trace or ()))
    config = load_config(run) if run.endswith(".toml") else None
    journal = Journal(open_store(config.store), config.run) if config else open_journal(run)
    journal.read_run()
    plan = make_plan(journal, config or read_config(journal))
    audits = plan_share(journal, plan, audit_share) if audit_share is not None else None
    assumed = Assumed(near_steps or plan.near_every_steps, near_save_s, same_node, pool)
    _check_assumed(assumed, has_traces=bool(traces), is_asked=bool(near_steps or pool))
    on_traces = plan_on_traces(plan, traces, assumed)
    if json:
        planned = asdict(plan) | {"mean_between_losses_s": plan.losses.mean_s, "traces": list(map(asdict, on_traces))}
        print_json(planned | ({"audits": asdict(audits) | {"gpu_s": audits.gpu_s}} if audits else {}))
        return
    print("\n".join(_describe(plan)))
    if audits:
        print("\n".join(["", *_describe_audits(audits)]))
    for each in on_traces:
        print("\n".join(["", *_describe_trace(each), *_describe_near(each.near), *_describe_pool(each.pool)]))
    if len(on_traces) > 1:
        print("\n".join(["", *_compare(on_traces)]))


def _check_assumed(assumed: Assumed, *, has_traces: bool, is_asked: bool) -> None:
    if is_asked and not has_traces:
        raise WrongUse(
            "--near-steps and --pool replay a trace, and none is given",
            hint=f"add --trace with a file, or with the name of one that comes with Holdfast: {list_shipped()[0]}",
        )
    if not assumed.near_every_steps and not (assumed.near_save_s is None and assumed.same_node is None):
        raise WrongUse(
            "--near-save-s and --same-node are about saves into the node's folder, and this run makes none",
            hint="add --near-steps, or set near.folder and near.every_steps",
        )


def _describe(plan: Plan) -> Iterator[str]:
    measured, losses, interval = plan.measured, plan.losses, plan.interval
    yield f"measured  a step takes {_seconds(measured.step_s)}"
    yield f"          a save stalls training for {_seconds(measured.stall_s)}, for the probe and a copy of the state"
    yield f"          and slows the steps beside it by {_seconds(measured.slow_s)} in all"
    yield f"          and is durable {_seconds(measured.save_s)} after the copy has begun"
    if measured.restart_s:
        yield f"          an attempt trains {_seconds(measured.restart_s)} after it has begun"
    yield f"          (medians of the newest {counted(measured.count, 'commit')})"
    yield f"losses    {losses.count} unannounced in {_hours(losses.alive_s)} of {counted(losses.attempts, 'attempt')}"
    yield f"          and the prior assumption of {PRIOR_LOSSES:g} in {_hours(PRIOR_S)}"
    yield f"          give one in {_hours(losses.mean_s)}"
    yield f"interval  {_seconds(interval.interval_s)}, {counted(interval.steps, 'step')}: {REASONS[interval.bound]}"
    if plan.dealing:
        yield from _describe_dealing(plan.dealing)
    yield ""
    rows = [("best", plan.best)]
    if plan.current is not None:  # the first chunk of an epoch; at the epoch's end a chunk may be shorter
        rows.append(("automatic, with its epochs" if plan.is_auto else "as it is set", plan.current))
    yield from tabulate([HEADER, *(_row(name, chunks) for name, chunks in rows)])


def _describe_dealing(dealing: Dealing) -> Iterator[str]:
    shares, larger = dealing.virtual_ranks, dealing.larger
    yield f"ranks     {dealing.ranks}, which share {shares} virtual ranks; the rank with the most sets the pace"
    if dealing.waiting:
        yield f"          at worst, with {dealing.worst}, an average rank waits for {dealing.waiting:.0%} of a step"
    if shares < SHARES_A_RANK[0] * dealing.ranks:
        few, many = (each * dealing.ranks for each in SHARES_A_RANK)
        yield f"          for a pool whose size changes, a new run does better with {few} to {many} virtual ranks:"
        yield f"          with {many}, an average rank waits for {larger.waiting:.0%} of a step, at worst"


def _describe_audits(audits: AuditPlan) -> Iterator[str]:
    number = f"{audits.audits_a_day:.3g}" if audits.audits_a_day < 1000 else f"{audits.audits_a_day:,.0f}"
    yield f"audits    {number} a day for {audits.share:g} of the training time"
    if audits.most_a_night is not None:
        yield f"          at most {audits.most_a_night} a night, because retention has deleted the other checkpoints"
    yield f"          each trains {_seconds(audits.audit_s)} again; a chunk of the run has {_seconds(audits.chunk_s)}"
    yield f"costs     {_seconds(audits.gpu_s)} of GPUs a day, of {counted(audits.ranks, 'rank')}:"
    yield f"          {_seconds(audits.training_s)} of training, and {_seconds(audits.starting_s)} to start"
    yield f"finds     a chunk that was computed wrongly once: with a probability of at least {audits.once:.2%}"
    # A faulty machine can't find its own fault, because it computes the same wrong bits again.
    if audits.within_s is not None:
        yield "          a machine that computes each chunk wrongly, by audits on another machine:"
        yield (
            f"          in the first night with {audits.first_night:.0%} probability, "
            f"surely within {_hours(audits.within_s)}"
        )


def _row(name: str, chunks: Chunks) -> tuple[str, ...]:
    lost = chunks.expected
    shares = (lost.stalls, lost.redone, lost.saves, lost.restarts, lost.total)
    return (name, counted(chunks.steps, "step"), _seconds(chunks.interval_s), *(f"{share:.2%}" for share in shares))


def _describe_trace(plan: TracePlan) -> Iterator[str]:
    best, chosen = plan.best, plan.chosen
    yield f"trace     {plan.trace}, from {plan.source or 'an unknown source'}"
    losses = f"{counted(plan.preemptions, 'preemption')}, one in {_hours(plan.mean_s)}"
    yield f"          {counted(plan.nodes, 'node')}, {losses} of the time up, which is {plan.available:.0%} of all"
    yield f"expected  goodput {best.goodput:.2%}, in nine of ten such histories {best.low:.2%} to {best.high:.2%}"
    yield f"          limit {best.limit:.2%} if nothing but restarts cost time, efficiency {best.efficiency:.2%}"
    yield f"chunk     {counted(best.steps, 'step')}, {_seconds(best.interval_s)}"
    yield f"          {counted(chosen.steps, 'step')}, {_seconds(chosen.interval_s)}, would give {chosen.goodput:.2%}"
    for each in plan.notices:
        worth = f"adds {each.gain:.2%} if {each.kept:.0%} of losses are announced" if each.is_enough else "is too short"
        yield f"notice    of {_seconds(each.notice_s)} {worth}; a last save needs {_seconds(plan.last_save_s)}"
    yield f"retention keep_every_steps = {plan.keep_every_steps} keeps a checkpoint for each mean time between losses"


def _describe_near(forecasts: Sequence[NearForecast]) -> Iterator[str]:
    if not forecasts:
        return
    yield ""
    header = ("chunks", "saves on the node", "lost steps a loss", "goodput")
    rows = (
        (counted(each.steps, "step"), _spell_survival(each.survives), f"{each.lost_steps:.1f}", f"{each.goodput:.2%}")
        for each in forecasts
    )
    yield from tabulate([header, *rows])


def _spell_survival(survives: float | None) -> str:
    if survives is None:
        return "none"
    return f"there after {survives:.0%} of losses" if survives else "always gone with the node"


def _describe_pool(pool: PoolForecast | None) -> Iterator[str]:
    if pool is None:
        return
    yield ""
    runs = f"{counted(pool.runs, 'run')} of {counted(pool.ranks, 'rank')}, chunks of {counted(pool.steps, 'step')}"
    yield f"pool      {runs}; {counted(pool.preemptions, 'preemption')} that each end one run; rank hours:"
    header = ("the scheduler ends", "lost training", "restarts", "in all", "the worst run's share")
    rows = (
        (
            name,
            f"{each.lost_h:.3g} h",
            f"{each.restart_h:.3g} h",
            f"{each.lost_h + each.restart_h:.3g} h",
            f"{each.most:.0%}",
        )
        for name, each in (("a random run", pool.random), ("the run that loses least", pool.cheapest))
    )
    yield from tabulate([header, *rows])


def _compare(plans: Sequence[TracePlan]) -> Iterator[str]:
    header = ("pool, most training first", "goodput", "time up", "training an hour")
    rows = (
        (each.trace, f"{each.best.goodput:.2%}", f"{each.available:.0%}", f"{each.best.per_hour:.3f} h")
        for each in plans
    )
    yield from tabulate([header, *rows])


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.3g} h"
