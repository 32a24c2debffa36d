"""Values that are functions of the step: a temperature, an entropy coefficient, a teacher's weight in the loss."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from holdfast.config import did_you_mean
from holdfast.errors import ConfigError

# The end of a setting's name, and the field of `Anneal` that it sets: `tau_initial` sets `initial` of the anneal `tau`.
ENDINGS = {
    "initial": "initial",
    "final": "final",
    "anneal_start_frac": "start_frac",
    "anneal_end_frac": "end_frac",
    "anneal_start_step": "start_step",
    "anneal_end_step": "end_step",
}
# The setting for the length of a recipe's schedules and anneals, in epochs.
LENGTH = "schedule_epochs"


@dataclass
class Anneal:
    """A value that changes linearly from ``initial`` to ``final`` and stays there.

    The change begins and ends at fractions of ``epochs``, or at steps. As in a `Schedule`, ``epochs`` is the anneal's
    own length and not the run's, so that extending a run doesn't alter values that were already used. An anneal is a
    function of the step and has no state to save.

    Args:
        epochs: the length that the fractions refer to; may be left out if both steps are given.
        start_frac, end_frac: where the change begins and ends, as fractions of ``epochs``.
        start_step, end_step: where the change begins and ends, as steps; each overrides its fraction.

    Attributes:
        value: the value for the current step.

    Raises:
        ConfigError: a number is out of range, ``epochs`` is needed and missing, or the change ends before it begins.
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
            raise ConfigError("Anneal(...): set epochs, or both start_step and end_step")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ConfigError(f"Anneal(epochs={self.epochs!r}): expected a number above 0")
        for name, fraction in (("start_frac", self.start_frac), ("end_frac", self.end_frac)):
            if not 0 <= fraction <= 1:
                raise ConfigError(f"Anneal({name}={fraction!r}): expected a number from 0 to 1")
        if self.epochs is None or (self.start_step is None) == (self.end_step is None):
            start, end = self.bounds(1)
            if end < start:
                raise ConfigError(f"Anneal(...): the end, {end:g}, is before the start, {start:g}")

    @classmethod
    def from_settings(
        cls, name: str, settings: Mapping[str, Any], epochs: float | None = None, table: str = "settings"
    ) -> Self:
        """Build the anneal that a recipe's settings describe.

        This reads ``<name>_initial``, ``<name>_final``, ``<name>_anneal_start_frac`` (default 0),
        ``<name>_anneal_end_frac`` (default 1), ``<name>_anneal_start_step`` and ``<name>_anneal_end_step``. A step
        overrides the fraction of the same name. A setting that is None counts as missing. Every other setting that
        begins with ``<name>_`` is refused, unless it belongs to an anneal with a longer name.

        Args:
            settings: the recipe's settings; those that don't begin with ``<name>_`` are ignored.
            epochs: the length that the fractions refer to, by default the setting ``schedule_epochs``. It isn't the
                run's ``epochs``, so that extending a run changes no value.
            table: the name of the table of settings in messages.

        Raises:
            ConfigError: a setting is missing, unknown or out of range; the message names it.
        """
        known = {f"{name}_{ending}": field for ending, field in ENDINGS.items()}
        for key in settings:
            if key.startswith(f"{name}_") and key not in known and not _is_of_longer_name(key, name):
                raise ConfigError(f"there is no setting {table}.{key}", hint=did_you_mean(key, known))
        found = {key: settings[key] for key in known if settings.get(key) is not None}
        for key in (f"{name}_initial", f"{name}_final"):
            if key not in found:
                raise ConfigError(
                    f"{table}.{key} is missing", hint=(f"the anneal {name!r} needs a first and a last value")
                )
        for key, value in found.items():
            _check(f"{table}.{key}", value, known[key])
        length = settings.get(LENGTH) if epochs is None else epochs
        if length is not None:
            _check(f"{table}.{LENGTH}" if epochs is None else "epochs", length, "epochs")
        elif not {f"{name}_anneal_start_step", f"{name}_anneal_end_step"} <= found.keys():
            raise ConfigError(
                f"anneal {name!r}: the step at which it ends isn't known",
                hint=f"set {table}.{LENGTH}, or both {name}_anneal_start_step and {name}_anneal_end_step",
            )
        try:
            return cls(**{known[key]: value for key, value in found.items()}, epochs=length)
        except ConfigError:
            line = ", ".join(f"{table}.{key} = {found[key]!r}" for key in known if key in found and "_anneal_" in key)
            raise ConfigError(f"anneal {name!r} would end before it begins: {line}") from None

    def bounds(self, steps_per_epoch: int) -> tuple[float, float]:
        """Return the steps between which the value changes."""
        length = (self.epochs or 0.0) * steps_per_epoch
        start = self.start_frac * length if self.start_step is None else float(self.start_step)
        end = self.end_frac * length if self.end_step is None else float(self.end_step)
        return start, end

    def at(self, step: int, steps_per_epoch: int) -> float:
        """Return the value for the next step after ``step`` completed steps."""
        start, end = self.bounds(steps_per_epoch)
        if step >= end:
            return self.final
        if step <= start:
            return self.initial
        done = (step - start) / (end - start)
        return self.initial + (self.final - self.initial) * done


def _is_of_longer_name(key: str, name: str) -> bool:
    """Return whether a setting that begins with ``<name>_`` belongs to an anneal with a name like ``<name>_scale``."""
    rest = key.removeprefix(f"{name}_")
    return not rest.startswith("anneal_") and any(rest.endswith(f"_{ending}") for ending in ENDINGS)


def _check(key: str, value: Any, field: str) -> None:
    """Raise ConfigError if a setting's value is out of the range of its field."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if field.endswith("_step"):
        expected, is_good = "a whole number from 0", is_number and isinstance(value, int) and value >= 0
    elif field.endswith("_frac"):
        expected, is_good = "0 to 1", is_number and 0 <= value <= 1
    elif field == "epochs":
        expected, is_good = "a number above 0", is_number and value > 0
    else:
        expected, is_good = "a finite number", is_number
    if not is_good:
        raise ConfigError(f"{key} = {value!r}: expected {expected}")
