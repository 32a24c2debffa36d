"""The files of another program's checkpoint: read them without running code, and hash them."""

import codecs
import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from holdfast.errors import ConfigError
from holdfast.provenance.model_files import list_indexed

CONVERT = (
    "in the program that wrote the file, save only numbers, texts and tensors: torch.save({'model': "
    "model.state_dict(), 'optimizer': optimizer.state_dict(), 'step': step}, path)"
)
# The functions and classes that a pickle may name: they only create NumPy's arrays and numbers from bytes.
_CORE: Any = getattr(np, "_core", None) or np.core  # the module's name in NumPy 2, and in NumPy 1
ARRAYS: list[Any] = [
    *(
        (getattr(_CORE.multiarray, name), f"numpy.{core}.multiarray.{name}")
        for name in ("_reconstruct", "scalar")
        for core in ("_core", "core")
    ),
    np.ndarray,
    np.dtype,
    codecs.encode,
    *{type(np.dtype(each)) for each in (np.uint8, np.uint32, np.int64, np.float32, np.float64, np.bool_)},
]


def load_torch(path: Path, part: IO[bytes] | None = None) -> Any:
    """Return the content of a file of ``torch.save``, on the CPU. Code in the file is never run.

    Args:
        part: an open file to read instead of the path; errors still name the path.

    Raises:
        ConfigError: the file contains objects other than tensors, arrays and plain values, or can't be read.
    """
    try:
        with torch.serialization.safe_globals(ARRAYS):
            return torch.load(part or path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        if named is None:
            raise _unreadable(path, "torch.save's") from None
        raise ConfigError(
            f"{path} is a pickle that names {named[1]}: reading it could run code, so Holdfast doesn't read it",
            hint=CONVERT,
        ) from None
    except Exception:  # torch raises errors of many kinds, whose messages are about its own code
        raise _unreadable(path, "torch.save's") from None


def load_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, or of all the files that an index ``*.index.json`` names.

    Raises:
        ConfigError: a file is missing or can't be read.
    """
    found: dict[str, Tensor] = {}
    for file in _list_files(path):
        if not file.is_file():
            raise ConfigError(
                f"the file {file} is missing, although {path.name} lists it", hint="copy the whole folder"
            )
        try:
            found |= load_file(file)
        except (SafetensorError, OSError, ValueError):
            raise _unreadable(file, "safetensors'") from None
    return found


def load_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ConfigError: the file can't be read, or contains no JSON object.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError):
        raise _unreadable(path, "JSON's") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} doesn't contain a JSON object")
    return found


def load_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights in a file, or in all files that an index names. `find_model_files` finds the file or index.

    Raises:
        ConfigError: a file can't be read.
    """
    if "safetensors" in path.name:
        return load_safetensors(path)
    found: dict[str, Tensor] = {}
    for file in _list_files(path):
        found |= as_weights(load_torch(file), file)
    return found


def as_weights(value: Any, path: Path) -> dict[str, Tensor]:
    """Return the tensors of a module's ``state_dict`` by name, from a value that was read from the file ``path``.

    Raises:
        ConfigError: the value isn't a module's ``state_dict``.
    """
    if not is_weights(value):
        raise ConfigError(
            f"{path} contains a {type(value).__name__} where a module's weights are expected",
            hint="save a state_dict there: a dict of tensors by name",
        )
    return dict(value)


def is_weights(value: Any) -> bool:
    """Return whether a value is a module's ``state_dict``: tensors by name, and results of ``get_extra_state``."""
    return (
        isinstance(value, Mapping)
        and any(isinstance(each, Tensor) for each in value.values())
        and all(
            isinstance(key, str) and (isinstance(each, Tensor) or key.endswith("_extra_state"))
            for key, each in value.items()
        )
    )


def _list_files(path: Path) -> list[Path]:
    """Return the files that an index names; if the path isn't an index, the path alone."""
    if not path.name.endswith(".index.json"):
        return [path]
    if not (named := list_indexed(path)):
        raise ConfigError(
            f"the file {path} has no weight_map",
            hint=(
                "expected the index of a model's files, which has this key: copy the file again from the model's folder"
            ),
        )
    return named


def _unreadable(path: Path, whose: str) -> ConfigError:
    return ConfigError(
        f"{path} can't be read: it is cut short, or isn't in {whose} format",
        hint="compare its size with the original's",
    )
