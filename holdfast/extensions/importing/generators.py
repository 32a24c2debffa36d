"""The states of random generators in another program's checkpoint, recognized by their form instead of their names."""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import ConfigError

# The lengths in bytes of the states of torch's generators: for a CPU, and for a GPU (seed and offset).
CPU_BYTES, GPU_BYTES = 5056, 16
GPU_WORDS = ("cuda", "gpu", "rng")
PYTHON_VERSION = 3
# Words in the names of the process's own generators, which distinguish them from those of loaders and samplers.
WORDS = {
    "python": {"python", "random"}, "numpy": {"numpy", "np"}, "torch": {"torch", "cpu"}, "cuda": {"cuda", "gpu"},
}  # fmt: skip
UNQUALIFIED = {"generator", "random", "rng", "state"}


def list_states(name: str, value: Any) -> dict[str, Any]:
    """Return the states of random generators in a value, by name; an empty dict if the value contains anything else.

    A dictionary's states have its keys as names. It may contain other values only if its name says that it is of
    generators. Empty values, such as the list of a machine's GPUs without a GPU, count as absent.
    """
    if not isinstance(value, Mapping) or "bit_generator" in value:
        return {name: value} if find(name, value) else {}
    is_named = bool({"rng", "random", "generator", "generators"} & set(re.split(r"[\W_]+", name.lower())))
    found: dict[str, Any] = {}
    for key, each in value.items():
        inner = list_states(str(key), each)
        found |= {own if own == key else f"{key}.{own}": state for own, state in inner.items()}
        is_empty = each is None or (isinstance(each, Mapping | tuple | list) and not each)
        if not inner and not is_empty and not is_named:
            return {}
    return found


def choose_own(states: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Choose the states of the process's own generators.

    Args:
        states: the states by their names in the source.

    Returns: the states by the kinds of `find`, and the names of all other states.

    Raises:
        ConfigError: several states are of one kind, and their names don't tell which one is the process's.
    """
    kinds: dict[str, dict[str, Any]] = {}
    for name, value in states.items():
        for kind, state in find(name, value).items():
            kinds.setdefault(kind, {})[name] = state
    gpus = kinds.pop("cuda", {})
    chosen = {kind: _choose(kind, [*found]) for kind, found in kinds.items()}
    own: dict[str, Any] = {kind: kinds[kind][name] for kind, name in chosen.items()}
    if gpus:
        own["cuda"] = [state for found in gpus.values() for state in found]
    return own, [name for name in states if name not in {*chosen.values(), *gpus}]


def _choose(kind: str, names: Sequence[str]) -> str:
    words = {name: set(re.split(r"[\W_]+", name.lower())) for name in names}
    named = [name for name in names if words[name] & WORDS[kind]]
    for fitting in (named, [name for name in names if words[name] <= UNQUALIFIED]):
        if len(fitting) == 1:
            return fitting[0]
    if len(names) > 1:
        raise ConfigError(
            f"can't tell which of the source's random generators ({', '.join(names)}) is the generator of {kind}",
            hint="--map NAME= leaves a generator of the source out",
        )
    return names[0]


def find(name: Any, value: Any) -> dict[str, Any]:
    """Return the state of a random generator by its kind; an empty dict if the value is anything else.

    The kinds are those of `state.capture_rng`: python, numpy, torch, and cuda with a list for all GPUs.

    Args:
        name: the value's name, which distinguishes a GPU's state from other tensors of 16 bytes.
    """
    try:
        return _find(name, value)
    # the value looks like a generator's state, but isn't one
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError):
        return {}


def _find(name: Any, value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor) and value.dtype == torch.uint8 and value.dim() == 2:
        return _find_in_list(name, [*value])
    if isinstance(value, Tensor) and value.dtype == torch.uint8 and value.dim() == 1:
        is_gpus = value.numel() == GPU_BYTES and any(word in str(name) for word in GPU_WORDS)
        if value.numel() == CPU_BYTES:
            torch.Generator().set_state(value)
            return {"torch": value}
        return {"cuda": [value]} if is_gpus else {}
    if isinstance(value, Mapping) and value.get("bit_generator") == "MT19937":
        return {"numpy": _as_numpy(value["state"]["key"], value["state"]["pos"], value["has_gauss"], value["gauss"])}
    if isinstance(value, tuple | list):
        return _find_in_list(name, value)
    return {}


def _find_in_list(name: Any, value: Any) -> dict[str, Any]:
    if len(value) == 3 and value[0] == PYTHON_VERSION and isinstance(value[1], tuple | list | Tensor):
        state = (PYTHON_VERSION, tuple(int(each) for each in value[1]), value[2])
        random.Random().setstate(state)
        return {"python": state}
    if len(value) == 5 and isinstance(value[0], str) and value[0] == "MT19937":
        return {"numpy": _as_numpy(value[1], value[2], value[3], value[4])}
    inner = [find(name, each) for each in value]
    states = [each["cuda"][0] for each in inner if "cuda" in each]
    return {"cuda": states} if states and len(states) == len(inner) else {}


def _as_numpy(key: Any, position: Any, has_gauss: Any, gauss: Any) -> dict[str, Any]:
    words = np.asarray(key.numpy() if isinstance(key, Tensor) else key, dtype=np.uint32)
    np.random.RandomState().set_state(("MT19937", words, int(position), int(has_gauss), float(gauss)))
    return {
        "bit_generator": "MT19937",
        "state": {"key": words, "pos": int(position)},
        "has_gauss": int(has_gauss),
        "gauss": float(gauss),
    }
