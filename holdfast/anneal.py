"""Values that are functions of the step: a temperature, an entropy coefficient, a teacher's share."""

import math
from dataclasses import dataclass, field

from holdfast.errors import ConfigError


@dataclass
class Anneal:
    """A value that moves on a straight line from ``initial`` to ``final`` and stays there.

    Where it begins and ends is a fraction of ``epochs``, a length of its own as a `Schedule`'s is: training a run
    further changes no value that was used already. A step overrides a fraction. It has no state: after a resume the
    value is what it would have been.

    Args:
        epochs: what the fractions are of; may be left out if both steps are given.
        start_frac, end_frac: where the line begins and ends, as fractions of ``epochs``.
        start_step, end_step: the same as steps.

    Attributes:
        value: the value for the step in hand.

    Raises:
        ConfigError: there is no length to take fractions of, or it ends before it begins.
    """

    initial: float
    final: float
    epochs: float | None = None
    start_frac: float = 0.0
    end_frac: float = 1.0
    start_step: int | None = None
    end_step: int | None = None
    value: float = field(init=False)

    def __post_init__(self) -> None:
        self.value = self.initial
        if self.epochs is None and (self.start_step is None or self.end_step is None):
            raise ConfigError("an anneal needs epochs, or both start_step and end_step")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ConfigError(f"an anneal's epochs = {self.epochs!r}: expected a number above 0")
        for name, fraction in (("start_frac", self.start_frac), ("end_frac", self.end_frac)):
            if not 0 <= fraction <= 1:
                raise ConfigError(f"an anneal's {name} = {fraction!r}: expected 0 to 1")
        if self.epochs is None or (self.start_step is None) == (self.end_step is None):
            start, end = self.bounds(1)
            if end < start:
                raise ConfigError(f"an anneal ends at {end:g}, before it begins at {start:g}")

    def bounds(self, steps_per_epoch: int) -> tuple[float, float]:
        """The steps between which the value moves."""
        length = (self.epochs or 0.0) * steps_per_epoch
        start = self.start_frac * length if self.start_step is None else float(self.start_step)
        end = self.end_frac * length if self.end_step is None else float(self.end_step)
        return start, end

    def at(self, step: int, steps_per_epoch: int) -> float:
        """The value for the step after ``step`` completed ones."""
        start, end = self.bounds(steps_per_epoch)
        if step >= end:
            return self.final
        if step <= start:
            return self.initial
        done = (step - start) / (end - start)
        return self.initial + (self.final - self.initial) * done
