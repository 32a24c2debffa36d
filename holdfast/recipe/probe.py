"""The gate's rules: compare the resumed model's probe with the saved probe, and check the model's health.

The probe (a few outputs of the model) is measured when a checkpoint is saved, and the checkpoint's metadata keeps the
result. Before the first resumed step the probe is measured again. On the same kind of machine both results have to be
equal to the bit. On a different kind of machine, where equal bits aren't promised, the numbers have to agree within a
tolerance. Health is checked both times.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from holdfast.errors import ConfigError

How = Literal["exact", "tolerance", "record"]

RESTORED = "weights, optimizer and everything else in the checkpoint are restored exactly"


@dataclass(frozen=True)
class Limits:
    """The limits for a number of the probe, or for ``loss_window``, the mean loss of the last 20 steps.

    A number is healthy if it is finite and within its limits.

    Args:
        min, max: the smallest and the largest healthy value.
        jump: the largest healthy ratio of the value to the value in the previous checkpoint.

    Raises:
        ConfigError: there is no limit, a limit isn't finite, or ``min`` is above ``max``.
    """

    min: float | None = None
    max: float | None = None
    jump: float | None = None

    def __post_init__(self) -> None:
        if self.min is self.max is self.jump is None:
            raise ConfigError("Limits() sets no limit: set min, max or jump")
        if any(limit is not None and not math.isfinite(limit) for limit in (self.min, self.max, self.jump)):
            raise ConfigError(
                "Limits(...): min, max and jump must be finite numbers", hint="leave out a limit that you don't want"
            )
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ConfigError(f"Limits(...): min = {self.min} is above max = {self.max}")

    def complaint(self, name: str, value: float, before: float | None) -> str:
        """Return a message about the limit that the value breaks; empty if it breaks no limit.

        Args:
            name: the value's name in the message.
            before: the value in the previous checkpoint; None if unknown.
        """
        if self.min is not None and value < self.min:
            return f"{name} is {value:.6g}, below {self.min:.6g}"
        if self.max is not None and value > self.max:
            return f"{name} is {value:.6g}, above {self.max:.6g}"
        if self.jump is not None and before is not None and before > 0 and value > self.jump * before:
            return f"{name} is {value:.6g}, more than {self.jump:.6g} times {before:.6g}"
        return ""


@dataclass(frozen=True)
class Gate:
    """The strictness with which the gate compares a resumed model with the saved model.

    Args:
        how: ``exact``: probes have to be equal to the bit; ``tolerance``: numbers may differ by the tolerance, because
            this machine doesn't promise equal bits; ``record``: settings or code were changed on purpose, so a
            difference is only recorded.
        tolerance: the largest difference of numbers, relative to the largest number.
    """

    how: How = "exact"
    tolerance: float = 0.0


class Probe(BaseModel):
    """The numbers of the probe: a few outputs of the model, which show whether a resumed model equals the saved model.

    Attributes:
        sha256: the SHA-256 of all outputs; empty if the recipe has nothing to probe.
        gradient: the checksum of a micro-batch's gradient in training mode; empty if it was not measured.
        values: numbers by name, ``loss_window`` among them; None for a number that isn't finite.
        sample: up to 32 evenly spaced numbers of the outputs, for a comparison within a tolerance.
    """

    model_config = ConfigDict(frozen=True)

    sha256: str = ""
    gradient: str = ""
    values: dict[str, float | None] = {}
    sample: list[float | None] = []


def check_health(probe: Probe, limits: Mapping[str, Limits], before: Probe | None = None) -> list[str]:
    """Return a line for each number of the probe that isn't finite or breaks a limit.

    Args:
        before: the probe of the previous checkpoint, for the limit ``jump``.
    """
    lines = [f"{name} is not finite" for name, value in probe.values.items() if value is None]
    for name, limit in limits.items():
        value = probe.values.get(name)
        if value is not None and (line := limit.complaint(name, value, before.values.get(name) if before else None)):
            lines.append(line)
    return lines


def compare_probes(saved: Probe, found: Probe, tolerance: float) -> str:
    """Return a message about how the resumed model's probe differs from the saved probe; empty if they agree.

    Args:
        tolerance: the largest difference, relative to the largest number; 0 for equality to the bit. Gradients are
            compared only if the tolerance is 0.
    """
    return compare_outputs(saved, found, tolerance) or ("" if tolerance else _compare_gradients(saved, found))


def explain(difference: str, gate: Gate) -> str:
    """Return an explanation of a difference that `compare_probes` has found although all state was restored."""
    meaning = "the model, the loss or the probe reads state that no checkpoint has"
    if gate.how == "tolerance":
        meaning = f"either {meaning}, or this machine computes less exactly than resume.tolerance = {gate.tolerance:g}"
    return f"{RESTORED}, but {difference}: {meaning}"


def _compare_gradients(saved: Probe, found: Probe) -> str:
    if not saved.gradient or not found.gradient or saved.gradient == found.gradient:
        return ""
    return "the gradient of a micro-batch in training mode differs from the one at the save"


def compare_outputs(saved: Probe, found: Probe, tolerance: float = 0.0) -> str:
    """Return a message as `compare_probes` does, but compare no gradients."""
    if saved.sha256 == found.sha256:
        return ""
    if not saved.sha256 or not found.sha256:
        return ""  # can't be compared, because the recipe had a probe only at the save, or has a probe only now
    if not tolerance:
        return f"the probe gives a different result than at the save{_describe_difference(saved, found)}"
    difference = _measure_difference(saved, found)
    if difference is None:
        return "the probe can't be compared with the saved one: their counts of numbers, or of finite numbers, differ"
    if difference > tolerance:
        return f"the probe differs by {difference:.2g}, relative to its largest number; {tolerance:.2g} is allowed"
    return ""


def _describe_difference(saved: Probe, found: Probe) -> str:
    difference = _measure_difference(saved, found)
    return "" if difference is None else f" (a difference of {difference:.2g}, relative to its largest number)"


def _measure_difference(saved: Probe, found: Probe) -> float | None:
    """Return the largest difference of two probes' numbers, relative to the largest; None if they can't be compared."""
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
