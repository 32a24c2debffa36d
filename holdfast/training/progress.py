"""The progress of a run, and the numbers of its steps."""

import enum
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import RecipeError

# The probe's "loss_window" is the mean loss of this many last steps.
WINDOW_STEPS = 20
ENDED = "has_ended_epoch"


class Stage(enum.Enum):
    """The stage of a training, for a rank that loses another one: whether it has the state of a completed step."""

    SETTLED = enum.auto()
    """It has the state after the last completed step."""
    STEPPING = enum.auto()
    """It is in the next step."""
    RECORDED = enum.auto()
    """It has completed and recorded a step, and nothing else of what follows a step."""
    FOLLOWING = enum.auto()
    """It is at the end of an epoch, in what follows the step."""


@dataclass
class TrainingProgress:
    """The progress of a run. It is part of the state: equal runs have equal progress, whatever their chunks."""

    step: int = 0
    epoch_loss_sum: float = 0.0
    epoch_loss_steps: int = 0
    recent_losses: list[float] = field(default_factory=list)
    # If the run began with another run's weights: the steps that anneals count as done before step 0.
    anneal_offset: int = 0
    # One entry for each of the last EPOCHS_KEPT completed epochs: avg_loss, lrs (of its last step, one per parameter
    # group), metrics, and the anneals of the step after it.
    history: list[dict[str, Any]] = field(default_factory=list)
    # True once a loop's code at its last epoch's end has run. Only then is it saved: a longer run may go on from there.
    has_ended_epoch: bool = False

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != ENDED or value}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update({name: saved[name] for name in vars(self) if name != ENDED})
        self.has_ended_epoch = bool(saved.get(ENDED))

    def add_loss(self, loss: float) -> None:
        """Add the loss of one more step."""
        self.epoch_loss_sum += loss
        self.epoch_loss_steps += 1
        self.recent_losses = [*self.recent_losses[1 - WINDOW_STEPS :], loss]

    @property
    def avg_loss(self) -> float | None:
        """Return the mean loss of this epoch so far, or of the last epoch if this one has no step yet."""
        if self.epoch_loss_steps:
            return self.epoch_loss_sum / self.epoch_loss_steps
        return self.history[-1]["avg_loss"] if self.history else None


# The numbers of a step that have fields of their own in a trail's line; all others are in its field ``logged``.
OWN_FIELDS = ("loss", "grad_norm")


@dataclass
class Unread:
    """A finished step whose numbers, such as its loss, are still on the device.

    Attributes:
        numbers: scalar float32 tensors by name, on the training's device.
        samples: the names of the step's micro-batches.
    """

    step: int
    numbers: dict[str, Tensor]
    lrs: list[float]
    anneals: dict[str, float]
    samples: list[str]


def read_number(name: str, value: Any, device: torch.device) -> Tensor:
    """Return a number of a step as a scalar float32 tensor on the device. A tensor is copied, and nothing waits for it.

    Args:
        name: the number's name in the message of an error.

    Raises:
        RecipeError: the value is no scalar.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(()).to(device, torch.float32, copy=True)
    try:
        return torch.tensor(float(value), device=device)
    except (TypeError, ValueError):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise RecipeError(f"{name}: expected a number, found a {type(value).__name__}{shape}") from None
