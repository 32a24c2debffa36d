"""The weights of another program's checkpoint, under the names of the model's weights."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import ConfigError
from holdfast.state.ties import place_in_memory
from holdfast.terminal import counted

# The prefixes that wrappers add to the names of a module's weights.
WRAPPERS = re.compile(r"(?:^module\.|(?<![^.])_orig_mod\.|(?<![^.])_fsdp_wrapped_module\.|^_forward_module\.)")
# The usual names under which programs save the model that they train.
USUAL = ("model", "module", "net", "network", "")
SHOWN_NAMES = 3


def unwrap(name: str) -> str:
    """Return a weight's name without the prefixes of DistributedDataParallel, FSDP and ``torch.compile``."""
    while (bare := WRAPPERS.sub("", name)) != name:
        name = bare
    return name


def match_weights(
    own: Mapping[str, Any], modules: Mapping[str, Mapping[str, Tensor]], kept: Mapping[str, Any]
) -> "Matched":
    """Return a source's weights under the names of a model's weights.

    Args:
        own: the model's ``state_dict``.
        modules: the weights of each module in the source.
        kept: the modules that a loop keeps, by name; empty for a recipe. If there are several, each name in ``own``
            begins with the name of a module.

    Raises:
        ConfigError: the names or the shapes don't fit.
    """
    if len(kept) > 1 and all(_fit(own, each) is None for each in modules.values()):
        parts = {name: {key: each for key, each in own.items() if key.startswith(f"{name}.")} for name in kept}
        found = Matched({}, [], set())
        for name, part in parts.items():
            inner = {key.removeprefix(f"{name}."): each for key, each in part.items()}
            free = {key: each for key, each in modules.items() if key not in (found.used | parts.keys()) - {name}}
            one = _match_one(inner, free, name)
            found.weights |= {f"{name}.{key}": each for key, each in one.weights.items()}
            found.notes += one.notes
            found.used |= one.used
        return found
    return _match_one(own, modules, next(iter(kept)) if len(kept) == 1 else "")


@dataclass
class Matched:
    """The weights of a model, found in a source.

    Attributes:
        weights: the weights by the model's names.
        notes: lines for a person about differences in names and dtypes.
        used: the names of the source's modules that the weights come from.
    """

    weights: dict[str, Tensor]
    notes: list[str]
    used: set[str]


def _match_one(own: Mapping[str, Any], modules: Mapping[str, Mapping[str, Tensor]], name: str) -> Matched:
    """Find the module of the source that contains the weights of a module, and return these weights.

    Args:
        own: the module's ``state_dict``.
        modules: the weights of each module in the source.
        name: the module's name; empty for a recipe's model.

    Raises:
        ConfigError: no module or several modules of the source fit, or the shapes don't fit.
    """
    if not modules:
        raise ConfigError(
            f"the source has no weights{f' of {name}' if name else ''}",
            hint="expected a module's state_dict: a dict of tensors by name",
        )
    fitting = {key: fitted for key, each in modules.items() if (fitted := _fit(own, each)) is not None}
    wanted = [each for each in ((name, *USUAL) if name else USUAL) if each in fitting]
    if name in fitting and name:
        chosen = name
    elif len(fitting) == 1 or (wanted and len(fitting) > 1):
        chosen = wanted[0] if wanted else next(iter(fitting))
    elif fitting:
        raise ConfigError(
            f"several objects of the source have weights with the names of {name or 'the model'}: "
            f"{', '.join(sorted(fitting))}",
            hint=f"say which weights to take: --map {max(fitting)}={name}"
            if name
            else f"leave the other weights out: --map {max(fitting)}=",
        )
    else:
        nearest = name if name in modules else max(modules, key=lambda key: _count_common(own, modules[key]))
        raise _refuse_names(own, _unwrap_all(modules[nearest]), nearest)
    weights, prefix = fitting[chosen]
    notes = [f"the prefix {prefix} was left out of the source's names"] if prefix else []
    return Matched(weights, notes + _check_shapes(own, weights), {chosen})


def _fit(own: Mapping[str, Any], source: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str] | None:
    """Return a source's weights under a model's names, and the prefix that was removed; None if they don't fit."""
    bare = dict(source)
    while True:
        bare = _unwrap_all(bare)
        if (fitted := add_tied(own, bare)).keys() == own.keys():
            changed = next(((old, new) for old, new in zip(source, bare, strict=True) if old != new), ("", ""))
            return fitted, changed[0].removesuffix(changed[1]) if changed[0].endswith(changed[1]) else "a wrapper's"
        prefix = f"{next(iter(bare), '').partition('.')[0]}."
        if not bare or not all(key.startswith(prefix) for key in bare):
            return None
        bare = {key.removeprefix(prefix): each for key, each in bare.items()}


def _unwrap_all(source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove wrappers' prefixes from the names of weights. If two weights would get the same name, remove nothing."""
    bare = {unwrap(key): each for key, each in source.items()}
    return bare if len(bare) == len(source) else dict(source)


def add_tied(own: Mapping[str, Any], source: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the source's weights, with each tied weight under all names that it has in the model.

    A safetensors file contains a tied weight under only one name.
    """
    there = {_place(each): name for name, each in own.items() if name in source}
    tied = {name: there.get(_place(each)) for name, each in own.items() if name not in source}
    return source | {name: source[other] for name, other in tied.items() if other is not None}


def _place(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor) or not tensor.numel():
        return (id(tensor),)
    return place_in_memory(tensor)


def _count_common(own: Mapping[str, Any], source: Mapping[str, Any]) -> int:
    return len(own.keys() & {unwrap(key) for key in source})


def _refuse_names(own: Mapping[str, Any], source: Mapping[str, Any], of: str) -> ConfigError:
    """Return the error for weights whose names don't fit, with the nearest names and the ``--map`` that would fit."""
    missing, unknown = sorted(own.keys() - source.keys()), sorted(source.keys() - own.keys())
    pairs = [(name, next(iter(difflib.get_close_matches(name, unknown, 1, 0.0)), "")) for name in missing[:SHOWN_NAMES]]
    shown = ", ".join(f"{name} (nearest: {other})" if other else name for name, other in pairs)
    message = (
        f"the names of the weights don't fit: the source{f' ({of})' if of else ''} lacks "
        f"{counted(len(missing), 'weight')}"
    )
    if not missing:
        message = f"the names of the weights don't fit: the model lacks {counted(len(unknown), 'weight')} of the source"
        return ConfigError(
            f"{message}: {', '.join(unknown[:SHOWN_NAMES])}",
            hint=f"--map NAME= leaves one of them out: --map {unknown[0]}=",
        )
    more = ", ..." if len(missing) > SHOWN_NAMES else ""
    hint = "--map OLD=NEW renames a weight of the source, or all weights with the prefix OLD"
    if pairs[0][1]:
        hint += f": --map {'='.join(_shorten_pair(pairs[0][1], pairs[0][0]))}"
    return ConfigError(f"{message} of the model: {shown}{more}", hint=hint)


def _shorten_pair(old: str, new: str) -> tuple[str, str]:
    """Return two dotted names without the last parts that they have in common."""
    olds, news = old.split("."), new.split(".")
    while len(olds) > 1 and len(news) > 1 and olds[-1] == news[-1]:
        olds.pop()
        news.pop()
    return ".".join(olds), ".".join(news)


def _check_shapes(own: Mapping[str, Any], weights: Mapping[str, Tensor]) -> list[str]:
    """Return lines for a person: how many weights change from one dtype to another.

    Raises:
        ConfigError: a weight has a different shape than in the model, or weights that are tied in the model differ.
    """
    changed: dict[tuple[Any, Any], int] = {}
    ties: dict[Any, str] = {}
    for name, value in weights.items():
        built = own[name]
        if not isinstance(built, Tensor):
            continue
        if built.shape != value.shape:
            raise ConfigError(
                f"the weight {name} has the shape {tuple(value.shape)} in the source, and {tuple(built.shape)} in the "
                "model",
                hint="give the recipe the settings that the source was trained with",
            )
        other = ties.setdefault(_place(built), name)
        if other != name and not torch.equal(weights[other], value):
            raise ConfigError(
                f"{other} and {name} are one weight in the model, but two different weights in the source",
                hint=f"untie the two weights in the recipe, or leave one out: --map {other}=",
            )
        if built.dtype != value.dtype:
            kinds = value.dtype, built.dtype
            changed[kinds] = changed.get(kinds, 0) + 1
    return [f"{counted(number, 'weight')}: {old} becomes {new}" for (old, new), number in changed.items()]
