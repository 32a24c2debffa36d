"""What a checkpoint is worth: loaded, checked and measured as training does it."""

from pydantic import BaseModel, ConfigDict

from holdfast import checkpoint
from holdfast.errors import RunStopped
from holdfast.journal import Commit, Journal
from holdfast.probe import Probe
from holdfast.replay import ranks_at


class Evaluation(BaseModel):
    """What a checkpoint was evaluated to.

    Attributes:
        metrics: what the recipe's ``evaluate`` gives.
        anneals: their values at the checkpoint's own step.
        probe: what the gate has measured.
        recorded: the metrics that training wrote down for the same state; empty inside an epoch.
    """

    model_config = ConfigDict(frozen=True)

    run: str
    commit: int
    path: str
    step: int
    epoch: int
    checkpoint_sha256: str
    metrics: dict[str, float]
    anneals: dict[str, float]
    probe: Probe
    recorded: dict[str, float | None]

    def __str__(self) -> str:
        lines = [f"commit {self.commit} of run {self.run} ({self.path}), step {self.step}: {self.checkpoint_sha256}"]
        for name, value in (self.metrics | self.anneals | self.probe.values).items():
            lines.append(f"  {name.replace('_', ' '):16}{'not finite' if value is None else f'{value:.6g}'}")
        if self.recorded:
            is_same = self.recorded == self.metrics
            lines.append("  the metrics are those of training" if is_same else f"  in training: {self.recorded}")
        return "\n".join(lines)


def evaluate_commit(journal: Journal, commit: Commit) -> Evaluation:
    """The commit's checkpoint, restored through the gate in fresh processes and evaluated.

    Raises:
        CheckpointDamaged, GateTripped: it can't be restored. Nothing is quarantined.
        WrongUse: its settings were lost.
        RunStopped: the ranks ended early.
    """
    metadata = checkpoint.read_metadata(journal.store, commit.path)
    with ranks_at(journal, commit, commit) as (ranks, _):
        ranks.order("evaluate")
        event = ranks.next_event()
        if event["event"] != "evaluated":
            raise RunStopped(f"a rank reported {event['event']} where evaluated was expected")
    return Evaluation(
        run=journal.run,
        commit=commit.number,
        path=commit.path,
        step=commit.step,
        epoch=commit.epoch,
        checkpoint_sha256=commit.checkpoint_sha256,
        metrics=event["metrics"],
        anneals=event["anneals"],
        probe=event["probe"],
        recorded=metadata.metrics if metadata and metadata.is_at_epoch_end else {},
    )
