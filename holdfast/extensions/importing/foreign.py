"""The content of another program's checkpoint ("the source"), in the form that all readers share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from holdfast.errors import ConfigError
from holdfast.extensions.importing import generators
from holdfast.training.moving.files import is_weights

# The names under which programs save their number of optimizer steps. The first name that a source has is used.
STEPS = (
    "global_step", "step", "steps", "global_steps", "optimizer_steps", "num_steps", "iteration", "iterations", "iter",
    "iter_num",
)  # fmt: skip


@dataclass
class ForeignCheckpoint:
    """A checkpoint of another program.

    Attributes:
        form: the name of the checkpoint's format, for the origin that a commit records.
        modules: the weights of each module, by the module's name in the source; "" for a module without a name.
        optimizers: the state of each optimizer, as ``state_dict`` returns it, by the optimizer's name in the source.
        schedulers: the state of each scheduler, by the scheduler's name in the source.
        step: the number of optimizer steps that were trained; None if the source doesn't contain it.
        batches: the number of batches that were trained; None if the source doesn't contain it.
        generators: the values that contain states of this rank's random generators, by name; see
            `generators.list_states`.
        others: all other values by name, including a gradient scaler's state.
        framework: the values that Holdfast's adapter of Trainer or Lightning restores, by name.
        are_ordered: whether the weights are in the order of the module's parameters.
    """

    form: str
    modules: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    schedulers: dict[str, dict[str, Any]] = field(default_factory=dict)
    step: int | None = None
    batches: int | None = None
    generators: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    framework: dict[str, Any] = field(default_factory=dict)
    are_ordered: bool = True


def sort_values(imported: ForeignCheckpoint, values: Mapping[str, Any]) -> ForeignCheckpoint:
    """Add each value of a dictionary to the field of ``imported`` that fits the value's content. Return ``imported``.

    Many programs save a single dictionary of all states, each program with its own choice of names. Some programs put
    this dictionary into another dictionary, as its only value.
    """
    while len(values) == 1 and _is_around(inner := next(iter(values.values()))):
        values = inner
    # Generators first: their states are tensors, so a dictionary of them looks like a module's weights.
    if is_weights(values):
        imported.generators |= {
            name: value for name, value in values.items() if "torch" in generators.find(name, value)
        }
        weights = {name: value for name, value in values.items() if name not in imported.generators}
        imported.modules |= {"": weights} if weights else {}
        return imported
    for key, value in values.items():
        name = _shorten(str(key))
        if generators.list_states(str(key), value):
            imported.generators[name] = value
        elif is_weights(value):
            imported.modules[name] = dict(value)
        elif is_optimizer(value):
            imported.optimizers[name] = _number_parameters(value)
        elif isinstance(value, Mapping) and "last_epoch" in value:
            imported.schedulers[name] = dict(value)
        else:
            imported.others[name] = value
    found_step = next((as_count(imported.others[name]) for name in STEPS if name in imported.others), None)
    if imported.step is None and found_step is not None:
        imported.step = found_step
        imported.others = {name: each for name, each in imported.others.items() if name not in STEPS}
    return imported


def is_optimizer(value: Any) -> bool:
    """Return whether a value is an optimizer's ``state_dict``."""
    return isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()


def _number_parameters(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with its parameters' numbers as integers. DCP writes all keys as texts."""
    state, groups = optimizer["state"], optimizer["param_groups"]
    are_texts = isinstance(state, Mapping) and all(isinstance(key, str) and key.isdecimal() for key in state)
    has_numbers = isinstance(groups, list) and any(
        isinstance(each, int) for group in groups if isinstance(group, Mapping) for each in group.get("params") or ()
    )
    return (
        {**optimizer, "state": {int(key): each for key, each in state.items()}}
        if are_texts and has_numbers
        else {**optimizer}
    )


def is_scaler(value: Any) -> bool:
    """Return whether a value is a gradient scaler's ``state_dict``."""
    return isinstance(value, Mapping) and {"scale", "growth_factor"} <= value.keys()


def _is_around(value: Any) -> bool:
    """Return whether a value is an outer dictionary with a module's weights somewhere inside.

    Some programs save a dictionary whose only key, such as ``app``, leads to the dictionary of all states.
    """
    return isinstance(value, Mapping) and any(is_weights(each) for each in value.values())


def check_states(imported: ForeignCheckpoint) -> None:
    """Raise ConfigError if a state of an optimizer or of a scheduler doesn't have the form of a ``state_dict``."""
    for kind, parts, is_whole in (
        ("an optimizer", imported.optimizers, _is_whole_optimizer),
        ("a scheduler", imported.schedulers, _is_whole_scheduler),
    ):
        for name in (name for name, part in parts.items() if not is_whole(part)):
            raise ConfigError(
                f"the source's {name} isn't the state_dict of {kind}", hint=f"leave it out: --map {name}="
            )


def _is_whole_optimizer(value: Any) -> bool:
    if not is_optimizer(value) or not isinstance(value["state"], Mapping):
        return False
    groups = value["param_groups"]
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return False
    if not all(isinstance(group.get("params"), list | tuple) for group in groups):
        return False
    keys = [key for group in groups for key in group["params"]]
    return (
        len({*map(str, keys)}) == len(keys)
        and all(isinstance(value["state"].get(key, {}), Mapping) for key in keys)
        and all(isinstance(group.get("lr", 0.0), int | float | Tensor) for group in groups)
    )


def _is_whole_scheduler(value: Any) -> bool:
    return isinstance(value, Mapping) and as_count(value.get("last_epoch", 0)) is not None


def as_count(value: Any) -> int | None:
    """Return a value as a whole number of steps; None if it isn't a whole number of at least 0."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole and not isinstance(value, bool) and value >= 0 else None


def _shorten(name: str) -> str:
    """Return an object's name, given the name of its state: ``model`` for ``model_state_dict``."""
    for end in ("_state_dict", "_state", "_sd", ".state_dict"):
        if name.endswith(end) and name != end:
            return name.removesuffix(end)
    return "model" if name == "state_dict" else name


def rename(imported: ForeignCheckpoint, names: Mapping[str, str]) -> ForeignCheckpoint:
    """Rename the source's objects and weights. Leave out an object or a weight whose new name is empty.

    Args:
        names: the new names, by the old names. An old name is the name of an object or a weight, or a prefix of
            weights' names.

    Raises:
        ConfigError: the source doesn't have an old name.
    """
    unused = set(names)

    def renamed(own: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, value in own.items():
            old = max((each for each in names if name == each or name.startswith(f"{each}.")), key=len, default=None)
            unused.discard(old or "")
            new = name if old is None else f"{names[old]}{name[len(old) :]}" if names[old] else ""
            if new in found:
                raise ConfigError(
                    f"--map gives two of the source's objects the same name, {new}",
                    hint=f"--map {new}= leaves out the object that has this name in the source",
                )
            if old is None or names[old]:
                found[new] = value
        return found

    modules = {name: renamed(weights) for name, weights in imported.modules.items()}
    imported.modules = {name: weights for name, weights in renamed(modules).items() if weights}
    imported.optimizers, imported.schedulers = renamed(imported.optimizers), renamed(imported.schedulers)
    states = {name: _rename_inside(each, renamed) for name, each in imported.generators.items()}
    imported.generators, imported.others = renamed(states), renamed(imported.others)
    if unused:
        raise ConfigError(
            f"--map {sorted(unused)[0]}=...: the source has no such name",
            hint=f"the source has these names: {', '.join(sorted(filter(None, list_names(imported)))) or 'none'}",
        )
    return imported


def _rename_inside(value: Any, renamed: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Any:
    return renamed(value) if isinstance(value, Mapping) and "bit_generator" not in value else value


def list_names(imported: ForeignCheckpoint) -> list[str]:
    """Return the names of the source's objects."""
    return [*imported.modules, *imported.optimizers, *imported.schedulers, *imported.generators, *imported.others]
