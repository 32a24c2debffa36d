"""Learning-rate schedules by name: functions of the step."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR

Name = Literal["linear", "step", "cosine", "constant"]
NAMES: tuple[Name, ...] = ("linear", "step", "cosine", "constant")


@dataclass(frozen=True)
class Schedule:
    """A factor on the base learning rate of every parameter group.

    ``epochs`` is the schedule's own length and not the run's, so that extending a run doesn't alter rates that were
    already used. After the schedule's end the rate stays at its last value.

    Args:
        name: ``linear`` and ``cosine`` fall from 1 to ``final_lr_scale`` over ``epochs``; ``step`` multiplies by
            ``gamma`` every ``step_size`` epochs; ``constant`` stays 1.
        epochs: epochs from the first step to the end of the schedule, warm-up included.
        warmup_steps: steps over which the factor first rises linearly to the schedule's value.
    """

    name: Name = "constant"
    epochs: float = 1.0
    warmup_steps: int = 0
    final_lr_scale: float = 0.0
    step_size: float = 1.0
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ConfigError(f"schedule = {self.name!r}: expected one of {', '.join(NAMES)}")
        for field, value in (("schedule_epochs", self.epochs), ("step_size", self.step_size)):
            if not value > 0:
                raise ConfigError(f"{field} = {value!r}: expected a number above 0")
        if self.warmup_steps < 0:
            raise ConfigError(f"Schedule(warmup_steps={self.warmup_steps}): expected 0 or more")

    def factor(self, step: int, steps_per_epoch: int) -> float:
        """Return the factor for the next optimizer step after ``step`` completed steps."""
        warmup = min((step + 1) / (self.warmup_steps + 1), 1.0)
        length = self.epochs * steps_per_epoch - self.warmup_steps
        done = min(max(step - self.warmup_steps, 0) / length, 1.0) if length > 0 else 1.0
        if self.name == "linear":
            scale = 1.0 + (self.final_lr_scale - 1.0) * done
        elif self.name == "cosine":
            scale = self.final_lr_scale + (1.0 - self.final_lr_scale) * (1.0 + math.cos(math.pi * done)) / 2.0
        elif self.name == "step":
            scale = self.gamma ** math.floor(step / (self.step_size * steps_per_epoch))
        else:
            scale = 1.0
        return warmup * scale

    def build(self, optimizer: "Optimizer", steps_per_epoch: int) -> "LambdaLR":
        """Return a torch scheduler, to be stepped after every optimizer step."""
        from torch.optim.lr_scheduler import LambdaLR

        return LambdaLR(optimizer, lambda step: self.factor(step, steps_per_epoch))
