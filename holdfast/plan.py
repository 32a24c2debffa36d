"""The plan for a run's chunks: the best length, from the times that its commits recorded."""

from dataclasses import dataclass

from pydantic import ValidationError

from holdfast.checkpoint import read_metadata
from holdfast.config import RunConfig
from holdfast.errors import WrongUse
from holdfast.interval import (
    FIRST_STEPS,
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


@dataclass(frozen=True)
class Chunks:
    """Chunks of one length in steps, and what a run is expected to lose with them."""

    steps: int
    interval_s: float
    expected: Expected

    @classmethod
    def of(cls, steps: int, measured: Measured, losses: Losses) -> "Chunks":
        """Return chunks of `steps` steps with their expected loss."""
        interval_s = steps * measured.step_s
        return cls(steps, interval_s, expect(measured, losses, interval_s))


@dataclass(frozen=True)
class Plan:
    """The best and the current chunks of a run.

    Attributes:
        best: chunks with the least expected loss; automatic chunks have this length, but end with their epoch.
        current: chunks as the configuration sets them; None if the configuration was lost.
        is_auto: whether the configuration asks for automatic chunks.
    """

    run: str
    measured: Measured
    losses: Losses
    interval: Interval
    best: Chunks
    current: Chunks | None
    is_auto: bool


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
            hint=f"train its first chunk, which measures a save; an automatic one has {FIRST_STEPS} steps",
        )
    measured = measure(read_costs(journal))
    if measured is None:
        raise WrongUse(
            f"the newest commits of run {journal.run!r} don't say how long their steps and saves took",
            hint="train one more chunk, whose commit does",
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


def read_config(journal: Journal) -> RunConfig | None:
    """Return the settings that a run was last trained with; None if this version can't read them."""
    snapshot = journal.read_snapshot()
    try:
        return RunConfig.model_validate(snapshot.config) if snapshot else None
    except ValidationError:  # a version with other settings wrote the snapshot
        return None
