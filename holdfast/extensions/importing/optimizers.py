"""The state of another program's optimizers, under the names of the run's parameters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import ConfigError
from holdfast.extensions.importing.foreign import ForeignCheckpoint, as_count
from holdfast.training.build import Training
from holdfast.training.moving.weights import unwrap
from holdfast.training.naming import name_parameters
from holdfast.training.optimizers import Optimizers, parts_of

# Hyperparameters that only choose an implementation, such as a fused kernel. The source's values aren't used.
WAYS = ("foreach", "fused", "capturable", "differentiable")
# Keys of a parameter group to ignore when the optimizers' classes are compared. Older versions of torch lack some of
# them.
APART = {"params", "param_names", "lr", "initial_lr", "maximize", "decoupled_weight_decay", *WAYS}
# torch's optimizers whose moments may have different shapes than their parameters.
OTHER_SHAPES = (torch.optim.Adafactor, torch.optim.LBFGS)
ANOTHER = "build the optimizer that the source has, or leave the source's state out: --map {}="


@dataclass
class Moments:
    """The state of the source's optimizers, under the names of the run's parameters.

    Attributes:
        state: the state of each parameter, by the parameter's name in the run.
        groups: the source's hyperparameters for each parameter group.
        how: a text for a person that says how parameters were matched.
        notes: lines for a person about learning rates.
        paired: lines for a person about optimizers that have different names in the source.
        stateless: the parameters for which the source has no state.
        used: the names of the source's optimizers.
    """

    state: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    how: str = ""
    notes: list[str] = field(default_factory=list)
    paired: list[str] = field(default_factory=list)
    stateless: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)


def match_moments(training: Training, imported: ForeignCheckpoint, order: Sequence[str]) -> Moments | None:
    """Return the state of the source's optimizers, under the names of the run's parameters.

    Return None if the source has no optimizer.

    Args:
        order: the names of the model's weights in the order of the source's model; empty if this order is unknown.

    Raises:
        ConfigError: an optimizer of the source is of a different class than the run's, or has different parameters.
    """
    if not imported.optimizers:
        return None
    found = Moments()
    names = iter(name_parameters(training))
    parts = dict(_name_parts(training.recipe.optimizer))
    for name, part in parts.items():
        own = [[(next(names), each) for each in group["params"]] for group in part.param_groups]
        taken = (found.used | parts.keys()) - {name}
        source = _choose(name, part, own, {key: each for key, each in imported.optimizers.items() if key not in taken})
        found.used.add(source)
        if source != name and len(imported.optimizers) > 1:
            found.paired.append(f"optimizer {name}: {source} of the source, by the shapes of its parameters")
        _add(found, part, own, imported, source, order)
    return found


def count_steps(imported: ForeignCheckpoint) -> int | None:
    """Return the number of steps that the source's optimizers have counted; None if no counts exist, or they differ."""
    counts = {
        as_count(state["step"])
        for optimizer in imported.optimizers.values()
        for state in optimizer["state"].values()
        if isinstance(state, Mapping) and "step" in state
    }
    return counts.pop() if len(counts) == 1 else None


def _name_parts(optimizer: Any) -> list[tuple[str, torch.optim.Optimizer]]:
    if isinstance(optimizer, Optimizers):
        return [*optimizer.parts.items()]
    return [("optimizer", parts_of(optimizer)[0])]


Own = list[list[tuple[str, Any]]]


def _choose(name: str, part: torch.optim.Optimizer, own: Own, sources: Mapping[str, Any]) -> str:
    """Return the name of the source's optimizer that belongs to an optimizer of the run.

    Choose the source's optimizer of the same name. Without one, choose the source's only optimizer, or the only
    optimizer whose parameters have the same shapes.

    Args:
        name: the name of the run's optimizer.
        part: the run's optimizer.
        own: the names and parameters of the groups of `part`.
        sources: the states of the source's optimizers that aren't chosen yet, by name.

    Raises:
        ConfigError: no optimizer or several optimizers of the source have parameters of these shapes.
    """
    if name in sources or len(sources) == 1:
        return name if name in sources else next(iter(sources))
    fitting = [key for key, each in sources.items() if _has_shapes(part, own, each)]
    if len(fitting) == 1:
        return fitting[0]
    known = ", ".join(sorted(sources)) or "none besides"
    raise ConfigError(
        f"can't tell which of the source's optimizers ({known}) is the run's optimizer {name}",
        hint=f"--map {next(iter(sources), 'OLD')}={name}",
    )


def _has_shapes(part: torch.optim.Optimizer, own: Own, source: Mapping[str, Any]) -> bool:
    groups = source["param_groups"]
    if [len(group) for group in own] != [len(group["params"]) for group in groups]:
        return False
    pairs = _pair_by_place(own, groups)
    is_whole = _has_whole_moments(part)
    return not any(_find_misfit(each, source["state"].get(key, {}), is_whole=is_whole) for key, (_, each) in pairs)


def _add(found: Moments, part: Any, own: Own, imported: ForeignCheckpoint, name: str, order: Sequence[str]) -> None:
    """Add the state of one of the source's optimizers to `found`."""
    source, cycled = imported.optimizers[name], _list_cycled(imported)
    groups = source["param_groups"]
    sizes, theirs = [len(group) for group in own], [len(group["params"]) for group in groups]
    if sum(sizes) != sum(theirs) or len(sizes) != len(theirs):
        raise ConfigError(
            f"the optimizer's groups have {sizes} parameters, but the groups of the source's {name} have {theirs}",
            hint="give the recipe's optimizer the source's groups of parameters",
        )
    for number, (built, saved) in enumerate(zip(part.param_groups, groups, strict=True)):
        _check_class(part, built, saved, name)
        found.notes += _check_values(number, built, saved, cycled)
        found.groups.append({key: each for key, each in saved.items() if key in built and key not in ("params", *WAYS)})
    pairs, found.how = _pair(own, groups, order)
    if apart := [*source["state"].keys() - {key for key, _ in pairs}]:
        raise ConfigError(
            f"the source's {name} has a state of the parameter {apart[0]!r}, but none of its parameter groups has "
            "this parameter",
            hint=f"leave this optimizer out: --map {name}=",
        )
    for key, (own_name, parameter) in pairs:
        state = source["state"].get(key)
        if state is None:
            found.stateless.append(own_name)
            continue
        if misfit := _find_misfit(parameter, state, is_whole=_has_whole_moments(part)):
            raise ConfigError(
                f"in the source, {misfit} of the parameter {own_name} has the shape {tuple(state[misfit].shape)}, but "
                f"the parameter has the shape {tuple(parameter.shape)}",
                hint="the source's parameters may be in a different order: build its optimizer from named_parameters() "
                f"and save again, or leave the optimizer's state out: --map {name}=",
            )
        if whole := _find_whole_numbers(part, state):
            raise ConfigError(
                f"in the source, {whole} of the parameter {own_name} has values of {_name_dtype(state[whole])}, but "
                f"those of {type(part).__name__} are floats",
                hint=ANOTHER.format(name),
            )
        if broken := _find_nan(state):
            raise ConfigError(
                f"in the source, {broken} of the parameter {own_name} has NaN values",
                hint=f"import an earlier checkpoint, or leave the optimizer out: --map {name}=",
            )
        found.state[own_name] = dict(state)


Pairs = list[tuple[Any, tuple[str, Any]]]


def _pair(own: Own, groups: Sequence[Mapping[str, Any]], order: Sequence[str]) -> tuple[Pairs, str]:
    """Pair each key of the source's state with a parameter of the run; also return a text on how they were matched.

    Raises:
        ConfigError: the source saves parameters by name, and the run's parameters have different names.
    """
    known = {name: (name, each) for group in own for name, each in group}
    names = [unwrap(str(name)) for group in groups for name in group.get("param_names", group["params"])]
    keys = [key for group in groups for key in group["params"]]
    if any(isinstance(key, str) for key in keys) or any("param_names" in group for group in groups):
        if unknown := sorted(set(names) ^ known.keys()):
            lacks = "the run's" if unknown[0] in names else "the source's"
            raise ConfigError(
                f"{lacks} optimizer has no parameter {unknown[0]}",
                hint="build the optimizer of the source's parameters, or leave the source's optimizer NAME out: "
                "--map NAME=",
            )
        return [(key, known[name]) for key, name in zip(keys, names, strict=True)], "by name"
    ordered = [name for name in order if name in known]
    if len(groups) == 1 and len(ordered) == len(known) and len(ordered) == len(keys):
        return [
            (key, known[name]) for key, name in zip(keys, ordered, strict=True)
        ], "in the order of the source's model"
    return _pair_by_place(own, groups), "by the parameters' positions in the groups"


def _pair_by_place(own: Own, groups: Sequence[Mapping[str, Any]]) -> Pairs:
    return [pair for mine, theirs in zip(own, groups, strict=True) for pair in zip(theirs["params"], mine, strict=True)]


def _has_whole_moments(part: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is one of torch's whose moments are floats: scalars, or of the parameter's shape."""
    is_torchs = getattr(torch.optim, type(part).__name__, None) is type(part)
    return is_torchs and not isinstance(part, OTHER_SHAPES)


def _find_misfit(parameter: Tensor, state: Any, *, is_whole: bool) -> str:
    """Return the name of a moment whose shape doesn't fit its parameter; empty if there is none.

    Args:
        is_whole: whether each moment has to be a scalar or have the parameter's shape. If False, smaller moments are
            allowed: Adafactor has means over a dimension, and 8-bit optimizers have a scale for each block.
    """
    for name, value in state.items() if isinstance(state, Mapping) else ():
        if isinstance(value, Tensor) and value.dim() and parameter.dim():
            fits = value.shape == parameter.shape if is_whole else _is_reduced(value, parameter)
            if not fits:
                return str(name)
    return ""


def _is_reduced(value: Tensor, parameter: Tensor) -> bool:
    """Return whether a moment has its parameter's shape, or a smaller shape that an optimizer may use."""
    if value.dim() != parameter.dim():
        return value.numel() < parameter.numel() or 1 in parameter.shape
    return all(size in (1, own) for size, own in zip(value.shape, parameter.shape, strict=True))


def _find_whole_numbers(part: torch.optim.Optimizer, state: Any) -> str:
    """Return the name of an integer moment that torch's optimizer would read as floats; empty if there is none."""
    tensors = state.items() if isinstance(state, Mapping) and _has_whole_moments(part) else ()
    found = ((name, each) for name, each in tensors if isinstance(each, Tensor) and each.dim())
    return next((str(name) for name, each in found if not (each.is_floating_point() or each.is_complex())), "")


def _name_dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _find_nan(state: Any) -> str:
    """Return the name of a moment that contains a NaN; empty if there is none."""
    tensors = state.items() if isinstance(state, Mapping) else ()
    return next((str(name) for name, each in tensors if isinstance(each, Tensor) and bool(each.isnan().any())), "")


def _check_class(part: Any, built: Mapping[str, Any], saved: Mapping[str, Any], name: str) -> None:
    """Raise ConfigError if a saved group comes from an optimizer of a different class."""
    lost, others = sorted(built.keys() - saved.keys() - APART), sorted(saved.keys() - built.keys() - APART)
    key = "decoupled_weight_decay"
    if not lost and not others and key in saved and saved[key] != built.get(key, saved[key]):
        lost = [f"{key} = {built[key]}"]
    if not lost and not others:
        return
    has = f"has {', '.join(others)}, and " if others else ""
    raise ConfigError(
        f"the source's {name} is the state of a different optimizer than the run's {type(part).__name__}: it "
        f"{has}lacks {', '.join(lost) or 'nothing'}",
        hint=ANOTHER.format(name),
    )


def _list_cycled(imported: ForeignCheckpoint) -> set[str]:
    """Return the hyperparameters besides the learning rate that the source's schedulers change, such as momentum."""
    is_cycled = any(each.get("cycle_momentum") for each in imported.schedulers.values())
    return {"betas", "momentum"} if is_cycled else set()


def _check_values(number: int, built: Mapping[str, Any], saved: Mapping[str, Any], cycled: set[str]) -> Iterator[str]:
    """Compare a group's hyperparameters with the source's. Yield a line for a person if the learning rate differs.

    Args:
        number: the group's number.
        built: the group as the recipe built it.
        saved: the group in the source.
        cycled: the hyperparameters that a schedule changes, which aren't compared.

    Raises:
        ConfigError: a hyperparameter other than the learning rate differs: the run would train with the source's value,
            while its records would show the recipe's value.
    """
    for key in sorted(built.keys() & saved.keys() - {"params", "param_names", "lr", *WAYS, *cycled}):
        if _plain(built[key]) != _plain(saved[key]):
            raise ConfigError(
                f"parameter group {number} of the optimizer has {key} = {_plain(saved[key])} in the source, and {key} "
                f"= {_plain(built[key])} in the run",
                hint="set the source's value in the recipe, so that the run's records show the value that trains",
            )
    if "lr" in built.keys() & saved.keys() and _plain(built["lr"]) != _plain(saved["lr"]):
        yield f"lr of group {number}: {_plain(saved['lr']):.6g} from the source replaces {_plain(built['lr']):.6g}"


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value
