"""The command ``plan``: the best length for a run's chunks, with the reasons."""

from collections.abc import Iterator
from dataclasses import asdict

from holdfast.cli.app import Json, app, print_json
from holdfast.config import load_config
from holdfast.interval import PRIOR_LOSSES, PRIOR_S
from holdfast.journal import Journal
from holdfast.journal.finding import open_journal
from holdfast.plan import Chunks, Plan, make_plan, read_config
from holdfast.store import open_store
from holdfast.terminal import counted

REASONS = {
    "least lost": "sqrt(2 x stall x time between losses), where stalls and redone steps together cost least",
    "a save's length": "one and a half times the length of a save, so that no save waits for the one before",
    "floor": "the minimum, so that the work between two chunks costs less than 1 %",
}

HEADER = ("chunks", "steps", "long", "lost to stalls", "redone steps", "saves under way", "restarts", "in all")


@app.command
def plan(run: str, /, *, json: Json = False) -> None:
    """Show the best length for the chunks of a run, and what it costs. With chunk = "auto", training uses that length.

    Args:
        run: <store>/<run>; or a configuration (a .toml file), to compare with the chunks that it sets for its run.
        json: Print JSON.
    """
    config = load_config(run) if run.endswith(".toml") else None
    journal = Journal(open_store(config.store), config.run) if config else open_journal(run)
    journal.read_run()
    plan = make_plan(journal, config or read_config(journal))
    if json:
        print_json(asdict(plan) | {"mean_between_losses_s": plan.losses.mean_s})
    else:
        print("\n".join(_describe(plan)))


def _describe(plan: Plan) -> Iterator[str]:
    measured, losses, interval = plan.measured, plan.losses, plan.interval
    yield f"measured  a step takes {_seconds(measured.step_s)}"
    yield f"          a save stalls training for {_seconds(measured.stall_s)}, for the probe and a copy of the state"
    yield f"          and is durable {_seconds(measured.save_s)} after the copy has begun"
    if measured.restart_s:
        yield f"          an attempt trains {_seconds(measured.restart_s)} after it has begun"
    yield f"          (medians of the newest {counted(measured.count, 'commit')})"
    yield f"losses    {losses.count} unannounced in {_hours(losses.alive_s)} of {counted(losses.attempts, 'attempt')}"
    yield f"          and the prior assumption of {PRIOR_LOSSES:g} in {_hours(PRIOR_S)}"
    yield f"          give one in {_hours(losses.mean_s)}"
    yield f"interval  {_seconds(interval.interval_s)}, {counted(interval.steps, 'step')}: {REASONS[interval.bound]}"
    yield ""
    rows = [("best", plan.best)]
    if plan.current is not None:  # the first chunk of an epoch; later ones may end with it
        rows.append(("automatic, with its epochs" if plan.is_auto else "as it is set", plan.current))
    table = [HEADER, *(_row(name, chunks) for name, chunks in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        yield "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _row(name: str, chunks: Chunks) -> tuple[str, ...]:
    lost = chunks.expected
    shares = (lost.stalls, lost.redone, lost.saves, lost.restarts, lost.total)
    return (name, counted(chunks.steps, "step"), _seconds(chunks.interval_s), *(f"{share:.2%}" for share in shares))


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.3g} h"
