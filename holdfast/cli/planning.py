"""Planning: how long a run's chunks should be, and why."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from pydantic import ValidationError

from holdfast.checkpoint import read_metadata
from holdfast.cli.app import Json, app, print_json
from holdfast.config import RunConfig, load_config
from holdfast.errors import WrongUse
from holdfast.interval import (
    FIRST_STEPS,
    PRIOR_LOSSES,
    PRIOR_S,
    Expected,
    Interval,
    Losses,
    Measured,
    choose_interval,
    expect,
    measure,
    read_costs,
    read_losses,
)
from holdfast.journal import Journal
from holdfast.journal.finding import open_journal
from holdfast.store import open_store
from holdfast.terminal import counted

WHY = {
    "least lost": "sqrt(2 x stall x time between losses), where stalls and redone steps together cost least",
    "a save's length": "one and a half times what a save takes, so that none waits for the one before",
    "floor": "the shortest there is, so that what goes on between two chunks costs nothing to speak of",
}


HEADER = ("chunks", "steps", "long", "lost to stalls", "redone steps", "saves under way", "restarts", "in all")


@dataclass(frozen=True)
class Chunks:
    """Chunks of so many steps, and what is expected to be lost with them."""

    steps: int
    interval_s: float
    expected: Expected

    @classmethod
    def of(cls, steps: int, measured: Measured, losses: Losses) -> "Chunks":
        interval_s = steps * measured.step_s
        return cls(steps, interval_s, expect(measured, losses, interval_s))


@dataclass(frozen=True)
class Plan:
    """How long a run's chunks should be.

    Attributes:
        best: chunks of the interval that is chosen, which automatic ones have as far as epochs let them.
        current: those that the run is trained with, or is to be; None where that was lost.
        is_auto: whether these are automatic.
    """

    run: str
    measured: Measured
    losses: Losses
    interval: Interval
    best: Chunks
    current: Chunks | None
    is_auto: bool


@app.command
def plan(run: str, /, *, json: Json = False) -> None:
    """Explain how long the chunks of a run should be, and what they cost; chunk = "auto" makes them so.

    Args:
        run: <store>/<run>; or a configuration (a .toml file), for the run that it names and the chunks that it sets.
        json: Print JSON.
    """
    config = load_config(run) if run.endswith(".toml") else None
    journal = Journal(open_store(config.store), config.run) if config else open_journal(run)
    journal.read_run()
    plan = make_plan(journal, config or _read_config(journal))
    if json:
        print_json(asdict(plan) | {"mean_between_losses_s": plan.losses.mean_s})
    else:
        print("\n".join(_describe(plan)))


def make_plan(journal: Journal, config: RunConfig | None) -> Plan:
    """How long the chunks of a run should be, with these settings, if they are known.

    Raises:
        WrongUse: nothing was measured yet.
    """
    newest = journal.newest()
    if newest is None:
        raise WrongUse(
            f"run {journal.run!r} has no commit that counts",
            hint=f"its first chunk shows what a save costs; an automatic one has {FIRST_STEPS} steps",
        )
    measured = measure(read_costs(journal))
    if measured is None:
        raise WrongUse(
            f"the newest commits of run {journal.run!r} don't say how long their steps and saves took",
            hint="those that are trained from now on do",
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
        is_auto=config is not None and config.chunk.auto,
    )


def _read_config(journal: Journal) -> RunConfig | None:
    snapshot = journal.read_snapshot()
    try:
        return RunConfig.model_validate(snapshot.config) if snapshot else None
    except ValidationError:  # a version with other settings has written it
        return None


def _describe(plan: Plan) -> Iterator[str]:
    measured, losses, interval = plan.measured, plan.losses, plan.interval
    yield f"measured  a step takes {_seconds(measured.step_s)}"
    yield f"          a save stalls training for {_seconds(measured.stall_s)}, for the probe and a copy of the state"
    yield f"          and is durable {_seconds(measured.save_s)} after the copy has begun"
    if measured.restart_s:
        yield f"          an attempt trains {_seconds(measured.restart_s)} after it has begun"
    yield f"          (medians of the newest {counted(measured.count, 'commit')})"
    yield f"losses    {losses.count} unannounced in {_hours(losses.alive_s)} of {counted(losses.attempts, 'attempt')}"
    yield f"          and {PRIOR_LOSSES:g} in {_hours(PRIOR_S)}, which is assumed beforehand"
    yield f"          make one in {_hours(losses.mean_s)}"
    yield f"interval  {_seconds(interval.interval_s)}, {counted(interval.steps, 'step')}: {WHY[interval.bound]}"
    yield ""
    rows = [("best", plan.best)]
    if plan.current is not None:  # at the beginning of an epoch
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
