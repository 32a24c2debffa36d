"""The command ``plan``: the best length for a run's chunks, with the reasons."""

from collections.abc import Iterator
from dataclasses import asdict

from holdfast.config import load_config
from holdfast.errors import WrongUse
from holdfast.extensions.plan.plan import (
    SHARES_A_RANK,
    Chunks,
    Dealing,
    Plan,
    make_plan,
    plan_share,
)
from holdfast.journal import Journal
from holdfast.journal.configs import read_config
from holdfast.journal.finding import open_journal
from holdfast.ledger.audit_share import AuditPlan
from holdfast.ledger.interval import PRIOR_LOSSES, PRIOR_S
from holdfast.store import open_store
from holdfast.terminal import counted
from holdfast.terminal.columns import tabulate
from holdfast.terminal.options import Json, print_json

REASONS = {
    "least lost": "sqrt(2 x cost x time between losses), where saves and redone steps together cost least",
    "a save's length": "one and a half times the length of a save, so that no save waits for the save before",
    "floor": "the shortest length with which the work between two chunks costs less than 1 %",
}

HEADER = ("chunks", "steps", "long", "lost to saves", "redone steps", "saves under way", "restarts", "in all")


def plan(
    run: str,
    /,
    *,
    audit_share: float | None = None,
    json: Json = False,
) -> None:
    """Show the best length for the chunks of a run, and what it costs. With chunk = "auto", training uses that length.

    Args:
        run: <store>/<run>; or a configuration (a .toml file), to compare the best length with the length that the
            configuration sets.
        audit_share: Also show what audits of this fraction of the training time cost, such as 0.01, and what they find.
        json: Print JSON.
    """
    if audit_share is not None and not 0 < audit_share <= 1:
        raise WrongUse(f"--audit-share {audit_share:g}: expected a share of the training time, such as 0.01")
    config = load_config(run) if run.endswith(".toml") else None
    journal = Journal(open_store(config.store), config.run) if config else open_journal(run)
    journal.read_run()
    plan = make_plan(journal, config or read_config(journal))
    audits = plan_share(journal, plan, audit_share) if audit_share is not None else None
    if json:
        planned = asdict(plan) | {"mean_between_losses_s": plan.losses.mean_s}
        print_json(planned | ({"audits": asdict(audits) | {"gpu_s": audits.gpu_s}} if audits else {}))
        return
    print("\n".join(_describe(plan)))
    if audits:
        print("\n".join(["", *_describe_audits(audits)]))


def _describe(plan: Plan) -> Iterator[str]:
    measured, losses, interval = plan.measured, plan.losses, plan.interval
    yield f"measured  a step takes {_seconds(measured.step_s)}"
    yield f"          a save stalls training for {_seconds(measured.stall_s)}, for the probe and a copy of the state"
    yield f"          and slows the steps beside it by {_seconds(measured.slow_s)} in all"
    yield f"          and is durable {_seconds(measured.save_s)} after the copy has begun"
    if measured.restart_s:
        yield f"          an attempt trains {_seconds(measured.restart_s)} after it has begun"
    yield f"          (medians of the newest {counted(measured.count, 'commit')})"
    yield (f"losses    {losses.count} unannounced in {_hours(losses.alive_s)} of {counted(losses.attempts, 'attempt')}")
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
    yield (
        f"ranks     {dealing.ranks}, which share {shares} virtual ranks; the rank with the most virtual ranks sets "
        f"the pace"
    )
    if dealing.waiting:
        yield f"          at worst, with {dealing.worst}, an average rank waits for {dealing.waiting:.0%} of a step"
    if shares < SHARES_A_RANK[0] * dealing.ranks:
        few, many = (each * dealing.ranks for each in SHARES_A_RANK)
        yield f"          for a pool whose size changes, a new run does better with {few} to {many} virtual ranks:"
        yield f"          with {many}, an average rank waits for at most {larger.waiting:.0%} of a step"


def _describe_audits(audits: AuditPlan) -> Iterator[str]:
    number = f"{audits.audits_a_day:.3g}" if audits.audits_a_day < 1000 else f"{audits.audits_a_day:,.0f}"
    yield f"audits    {number} a day for {audits.share:g} of the training time"
    if audits.most_a_night is not None:
        yield f"          at most {audits.most_a_night} a night, because retention has deleted the other checkpoints"
    yield f"          each trains {_seconds(audits.audit_s)} again; a chunk of the run has {_seconds(audits.chunk_s)}"
    yield f"costs     {_seconds(audits.gpu_s)} of GPUs a day, of {counted(audits.ranks, 'rank')}:"
    yield f"          {_seconds(audits.training_s)} of training, and {_seconds(audits.starting_s)} to start"
    yield f"finds     a single chunk that was computed wrongly: with a probability of at least {audits.once:.2%}"
    # A faulty machine can't find its own fault, because it computes the same wrong bits again.
    if audits.within_s is not None:
        yield "          a machine that computes each chunk wrongly, by audits on another machine:"
        yield (
            f"          in the first night with a probability of {audits.first_night:.0%}, "
            f"surely within {_hours(audits.within_s)}"
        )


def _row(name: str, chunks: Chunks) -> tuple[str, ...]:
    lost = chunks.expected
    shares = (lost.stalls, lost.redone, lost.saves, lost.restarts, lost.total)
    return (name, counted(chunks.steps, "step"), _seconds(chunks.interval_s), *(f"{share:.2%}" for share in shares))


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.3g} h"
