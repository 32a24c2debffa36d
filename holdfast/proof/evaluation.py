"""The evaluation of a committed checkpoint: restore it through the gate, and measure it as training does."""

from pydantic import BaseModel, ConfigDict

from holdfast import checkpoint
from holdfast.journal import Commit, Journal
from holdfast.proof.audit import list_notes
from holdfast.proof.replay import ranks_at
from holdfast.provenance.canonical import finite_or_none
from holdfast.provenance.fingerprint import ABSENT
from holdfast.recipe.probe import Probe
from holdfast.recipe.trust import BY_DEFAULT, Trust
from holdfast.terminal.columns import align


class Evaluation(BaseModel):
    """The result of an evaluation.

    Attributes:
        metrics: the numbers that the recipe's ``evaluate`` returned.
        measured: the names of the metrics that differ between evaluations of the same state, such as times.
        anneals: the value of each anneal (a number that the step decides) at the checkpoint's step.
        probe: the outputs that the gate measures, of the restored model.
        recorded: the metrics that training recorded for the same state; empty if the checkpoint is inside an epoch.
        notes: changes of settings, code, data and packages since the commit, and reasons why equal bits aren't promised
            here.
    """

    model_config = ConfigDict(frozen=True)

    run: str
    commit: int
    path: str
    step: int
    epoch: int
    checkpoint_sha256: str
    metrics: dict[str, float]
    measured: list[str] = []
    anneals: dict[str, float]
    probe: Probe
    recorded: dict[str, float | None]
    notes: list[str] = []

    def __str__(self) -> str:
        lines = [f"commit {self.commit} of run {self.run} ({self.path}), step {self.step}: {self.checkpoint_sha256}"]
        # The prefix distinguishes a value of the probe from a metric of the same name.
        probe = {f"probe {name}": value for name, value in self.probe.values.items()}
        values = self.metrics | self.anneals | probe
        rows = {name: "not finite" if value is None else f"{value:.6g}" for name, value in values.items()}
        metrics = {name: finite_or_none(value) for name, value in self.metrics.items()}
        names = sorted((metrics.keys() | self.recorded.keys()) - set(self.measured)) if self.recorded else []
        different = [name for name in names if metrics.get(name, ABSENT) != self.recorded.get(name, ABSENT)]
        for name in different:
            rows[name] = f"{metrics.get(name, ABSENT)}, in training {self.recorded.get(name, ABSENT)}"
        lines += align({name.replace("_", " "): value for name, value in rows.items()}, indent="  ")
        if self.recorded and not different:
            lines.append("  the metrics equal those recorded in training")
        lines += [f"  not equal to training: {note}" for note in self.notes]
        return "\n".join(lines)


def evaluate_commit(journal: Journal, commit: Commit, trust: Trust = BY_DEFAULT) -> Evaluation:
    """Restore a commit's checkpoint through the gate in fresh processes, and evaluate it.

    Args:
        trust: the reader's own configuration, or the parts of the run's records to accept.

    Raises:
        CheckpointDamaged, GateTripped: the checkpoint can't be restored. Nothing is quarantined.
        WrongUse: the commit's settings were lost, or their recipe is not trusted.
        RunStopped: the ranks ended early.
    """
    metadata = checkpoint.read_metadata(journal.store, commit.path)
    with ranks_at(journal, commit, commit, trust) as (ranks, present):
        notes = list_notes(journal, commit, present)
        found = ranks.evaluate()
    return Evaluation(
        run=journal.run,
        commit=commit.number,
        path=commit.path,
        step=commit.step,
        epoch=commit.epoch,
        checkpoint_sha256=commit.checkpoint_sha256,
        metrics=found.metrics,
        measured=found.measured,
        anneals=found.anneals,
        probe=found.probe,
        recorded=metadata.metrics if metadata and metadata.is_at_epoch_end else {},
        notes=notes,
    )
