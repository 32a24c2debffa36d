"""The progress of a run."""

import enum
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoint.progress import ENDED_EPOCH

# The probe's "loss_window" is the mean loss of this many last steps.
WINDOW_STEPS = 20


class Stage(enum.Enum):
    """The stage of a step that this rank has reached.

    If another rank is lost, this shows whether this rank's state can be saved.
    """

    SETTLED = enum.auto()
    """The rank has the state after the last completed step."""
    STEPPING = enum.auto()
    """The rank is in the next step."""
    RECORDED = enum.auto()
    """The rank has completed and recorded a step; the work that follows a step hasn't begun."""
    FOLLOWING = enum.auto()
    """The rank is at the end of an epoch, in the work that follows the step: evaluation and schedulers."""


@dataclass
class TrainingProgress:
    """The progress of a run. It is part of the state: equal runs have equal progress, with any chunks."""

    step: int = 0
    epoch_loss_sum: float = 0.0
    epoch_loss_steps: int = 0
    recent_losses: list[float] = field(default_factory=list)
    # The number of steps that anneals add to the run's step, if the run began with another run's weights.
    anneal_offset: int = 0
    # One entry for each of the last EPOCHS_KEPT completed epochs: avg_loss; lrs (of the epoch's last step, one per
    # parameter group); metrics; and the anneals' values for the step after the epoch.
    history: list[dict[str, Any]] = field(default_factory=list)
    # True if a loop's code at the end of the last completed epoch has run. Only True is saved. A run that resumes reads
    # this, and doesn't run the code again.
    has_ended_epoch: bool = False

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != ENDED_EPOCH or value}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update({name: saved[name] for name in vars(self) if name != ENDED_EPOCH})
        self.has_ended_epoch = bool(saved.get(ENDED_EPOCH))

    def add_loss(self, loss: float) -> None:
        """Add the loss of one more step."""
        self.epoch_loss_sum += loss
        self.epoch_loss_steps += 1
        self.recent_losses = [*self.recent_losses[1 - WINDOW_STEPS :], loss]

    @property
    def avg_loss(self) -> float | None:
        """Return the mean loss of this epoch so far, or of the last epoch if this epoch has no step yet."""
        if self.epoch_loss_steps:
            return self.epoch_loss_sum / self.epoch_loss_steps
        return self.history[-1]["avg_loss"] if self.history else None
