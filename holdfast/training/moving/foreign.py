"""What another program's checkpoint holds, in the form that all readers of checkpoints share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from holdfast.errors import ConfigError

# The names of values that count optimizer steps.
STEPS = (
    "global_step", "step", "steps", "global_steps", "optimizer_steps", "num_steps", "iteration", "iterations", "iter",
    "iter_num",
)  # fmt: skip


@dataclass
class ForeignCheckpoint:
    """A checkpoint of another program.

    Attributes:
        form: the name of its form, as a commit's origin has it.
        modules: the weights of each module by its name in the source; "" if the source has one and names it nowhere.
        optimizers: the state of each optimizer as its ``state_dict`` gives it, by its name in the source.
        schedulers: the state of each scheduler, by its name in the source.
        scaler: the state of the gradient scaler; None if there is none.
        step: the optimizer steps that it has trained; None if it doesn't say so.
        batches: the batches that it has trained; None if it doesn't say so.
        generators: the states of this rank's random generators; see `generators.find`.
        named_generators: the values in which they were found, by name: a loop may keep a generator by that name.
        others: all other values, by name.
        framework: what the adapter of a framework takes over by itself, by name.
        are_ordered: whether the weights have the order of the module's parameters.
    """

    form: str
    modules: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    schedulers: dict[str, dict[str, Any]] = field(default_factory=dict)
    scaler: dict[str, Any] | None = None
    step: int | None = None
    batches: int | None = None
    generators: dict[str, Any] = field(default_factory=dict)
    named_generators: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    framework: dict[str, Any] = field(default_factory=dict)
    are_ordered: bool = True


def sort_values(imported: ForeignCheckpoint, values: Mapping[str, Any]) -> ForeignCheckpoint:
    """Sort the values of a dictionary into an `ForeignCheckpoint` by what they are, and return it.

    Several programs write one dictionary with everything in it, under names of their own.
    """
    from holdfast.training.moving import generators

    if is_weights(values):
        imported.modules[""] = dict(values)
        return imported
    for key, value in values.items():
        name = _shorten(str(key))
        if is_weights(value):
            imported.modules[name] = dict(value)
        elif is_optimizer(value):
            imported.optimizers[name] = dict(value)
        elif isinstance(value, Mapping) and "last_epoch" in value:
            imported.schedulers[name] = dict(value)
        elif isinstance(value, Mapping) and {"scale", "growth_factor"} <= value.keys():
            imported.scaler = dict(value)
        elif found := generators.find(key, value):
            imported.generators |= found
            imported.named_generators[name] = value
        else:
            imported.others[name] = value
    found_step = next((as_count(imported.others[name]) for name in STEPS if name in imported.others), None)
    if imported.step is None and found_step is not None:
        imported.step = found_step
        imported.others = {name: each for name, each in imported.others.items() if name not in STEPS}
    return imported


def is_weights(value: Any) -> bool:
    """Return whether a value is a module's ``state_dict``: tensors by name, and no other container."""
    return (
        isinstance(value, Mapping)
        and any(isinstance(each, Tensor) for each in value.values())
        and all(isinstance(key, str) and isinstance(each, Tensor) for key, each in value.items())
    )


def is_optimizer(value: Any) -> bool:
    """Return whether a value is an optimizer's ``state_dict``."""
    return isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()


def as_count(value: Any) -> int | None:
    """Return a whole number of steps; None if the value is none."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole and not isinstance(value, bool) and value >= 0 else None


def _shorten(name: str) -> str:
    """Return the name of an object from that of its state: ``model`` of ``model_state_dict``."""
    for end in ("_state_dict", "_state", "_sd", ".state_dict"):
        if name.endswith(end) and name != end:
            return name.removesuffix(end)
    return "model" if name == "state_dict" else name


def rename(imported: ForeignCheckpoint, names: Mapping[str, str]) -> ForeignCheckpoint:
    """Give the source's objects and weights other names, and leave out those whose new name is empty.

    Args:
        names: the new names by the old ones: of an object, or of a weight and of all below it.

    Raises:
        ConfigError: the source has no such name.
    """
    unused = set(names)

    def renamed(own: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, value in own.items():
            old = next((each for each in names if name == each or name.startswith(f"{each}.")), None)
            unused.discard(old or "")
            new = name if old is None else f"{names[old]}{name[len(old) :]}" if names[old] else ""
            if old is None or names[old]:
                found[new] = value
        return found

    modules = {name: renamed(weights) for name, weights in imported.modules.items()}
    imported.modules = {name: weights for name, weights in renamed(modules).items() if weights}
    imported.optimizers, imported.schedulers = renamed(imported.optimizers), renamed(imported.schedulers)
    imported.others = renamed(imported.others)
    if unused:
        raise ConfigError(
            f"--map {sorted(unused)[0]}=...: the source has no such name",
            hint=f"its objects are {', '.join(sorted(filter(None, list_names(imported)))) or 'without names'}",
        )
    return imported


def list_names(imported: ForeignCheckpoint) -> list[str]:
    """Return the names of the source's objects."""
    return [*imported.modules, *imported.optimizers, *imported.schedulers, *imported.others]
