"""The gate: is the resumed model the model that was saved, and is it in good health?

When a checkpoint is saved the probe is measured, and what came out goes into its metadata. Before the first resumed
step it is measured again. On the same kind of machine both have to be equal to the bit; on another one, whose bits
nobody promises, numbers have to agree within a tolerance. Health is asked at both times.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from holdfast.errors import ConfigError

How = Literal["exact", "tolerance", "record"]


@dataclass(frozen=True)
class Limits:
    """What a number of the probe, or the loss window, has to stay within. That it is finite always counts.

    Args:
        min, max: the smallest and the largest value that is healthy.
        jump: how many times what it was in the checkpoint before the value may be.

    Raises:
        ConfigError: there is no limit, or none can be met.
    """

    min: float | None = None
    max: float | None = None
    jump: float | None = None

    def __post_init__(self) -> None:
        if self.min is self.max is self.jump is None:
            raise ConfigError("limits: give min, max or jump")
        if any(limit is not None and not math.isfinite(limit) for limit in (self.min, self.max, self.jump)):
            raise ConfigError("limits: expected finite numbers")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ConfigError(f"limits: min = {self.min} is above max = {self.max}")

    def complaint(self, name: str, value: float, before: float | None) -> str:
        """How the value is outside; empty if it isn't."""
        if self.min is not None and value < self.min:
            return f"{name} is {value:.6g}, below {self.min:.6g}"
        if self.max is not None and value > self.max:
            return f"{name} is {value:.6g}, above {self.max:.6g}"
        if self.jump is not None and before is not None and before > 0 and value > self.jump * before:
            return f"{name} is {value:.6g}, more than {self.jump:.6g} times {before:.6g}"
        return ""


@dataclass(frozen=True)
class Gate:
    """How strictly a resumed model is held against the saved one.

    Args:
        how: ``exact``: equal to the bit; ``tolerance``: on a machine whose bits nobody promises; ``record``: settings
            or code were changed on purpose, and the probe only goes on record.
        tolerance: of numbers, relative to the largest.
    """

    how: How = "exact"
    tolerance: float = 0.0


class Probe(BaseModel):
    """What the probe gave.

    Attributes:
        sha256: of all outputs, to the bit; empty where the recipe has nothing to probe.
        gradient: checksum of a micro-batch's gradient in training mode; empty where it was not taken.
        values: numbers by name, ``loss_window`` among them; None for one that isn't finite.
        sample: up to 32 numbers of the outputs, evenly spaced, for a comparison within a tolerance.
    """

    model_config = ConfigDict(frozen=True)

    sha256: str = ""
    gradient: str = ""
    values: dict[str, float | None] = {}
    sample: list[float | None] = []


def check_health(probe: Probe, limits: Mapping[str, Limits], before: Probe | None = None) -> list[str]:
    """What is not healthy, a line each.

    Args:
        before: the probe of the checkpoint before, for limits on a jump.
    """
    lines = [f"{name} is not finite" for name, value in probe.values.items() if value is None]
    for name, limit in limits.items():
        value = probe.values.get(name)
        if value is not None and (line := limit.complaint(name, value, before.values.get(name) if before else None)):
            lines.append(line)
    return lines


def compare(saved: Probe, found: Probe, tolerance: float) -> str:
    """Return how the resumed model differs from the saved one; empty if it does not.

    Args:
        tolerance: largest difference, relative to the largest number; 0 for equality to the bit, which alone compares
            gradients.
    """
    return _compare_outputs(saved, found, tolerance) or ("" if tolerance else _compare_gradients(saved, found))


def _compare_gradients(saved: Probe, found: Probe) -> str:
    if not saved.gradient or not found.gradient or saved.gradient == found.gradient:
        return ""
    return (
        f"the gradient of a micro-batch in training mode is {found.gradient}, and was {saved.gradient} when it was "
        "saved: training reads something that is not saved"
    )


def _compare_outputs(saved: Probe, found: Probe, tolerance: float) -> str:
    if saved.sha256 == found.sha256:
        return ""
    if not saved.sha256 or not found.sha256:
        return ""  # the recipe has got its probe, or lost it, since
    if not tolerance:
        return f"the probe gave {found.sha256[:12]}, and {saved.sha256[:12]} when it was saved{_apart(saved, found)}"
    difference = _difference(saved, found)
    if difference is None or difference > tolerance:
        by = "in kind" if difference is None else f"by {difference:.2g} of its size"
        return f"the probe differs {by}, where {tolerance:.2g} is allowed"
    return ""


def _apart(saved: Probe, found: Probe) -> str:
    difference = _difference(saved, found)
    return "" if difference is None else f" ({difference:.2g} of its size apart)"


def _difference(saved: Probe, found: Probe) -> float | None:
    """The largest difference relative to the largest number; None where they can't be compared."""
    names = saved.values.keys() & found.values.keys() - {"loss_window"}
    pairs = [(saved.values[name], found.values[name]) for name in sorted(names)]
    if len(saved.sample) != len(found.sample):
        return None
    pairs += zip(saved.sample, found.sample, strict=True)
    if any((a is None) != (b is None) for a, b in pairs):
        return None
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    size = max((abs(a) for a, _ in known), default=0.0)
    apart = max((abs(a - b) for a, b in known), default=0.0)
    return apart / size if size else apart
