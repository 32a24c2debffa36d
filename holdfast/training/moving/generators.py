"""The states of random generators in another program's checkpoint, recognized by their form instead of their names."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

# The lengths in bytes of the states of torch's generators: for a CPU, and for a GPU (seed and offset).
CPU_BYTES, GPU_BYTES = 5056, 16
GPU_WORDS = ("cuda", "gpu", "rng")
PYTHON_VERSION = 3


def find(name: Any, value: Any) -> dict[str, Any]:
    """Return the states of random generators that a value contains; an empty dict if the value contains anything else.

    The keys are those of `state.capture_rng`: python, numpy, torch and cuda.

    Args:
        name: the value's name, which distinguishes a GPU's state from other tensors of 16 bytes.
    """
    try:
        return _find(name, value)
    # the value looks like a generator's state, but isn't one
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError):
        return {}


def _find(name: Any, value: Any) -> dict[str, Any]:
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
    if isinstance(value, Mapping) and value:
        inner = [find(key, each) for key, each in value.items()]
        return {key: each for found in inner for key, each in found.items()} if all(inner) else {}
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
