"""The reader of a folder that accelerate's ``save_state`` has written."""

import re
from pathlib import Path
from typing import Any

from holdfast.extensions.importing import generators
from holdfast.extensions.importing.foreign import ForeignCheckpoint
from holdfast.provenance.model_files import find_model_files
from holdfast.training.moving.files import load_torch, load_weights

RANDOM = "random_states_{}.pkl"
# The names of the files that go into a field of `ForeignCheckpoint`, by field. If there are several such files,
# accelerate numbers them from the second on.
FILES = {"optimizers": r"optimizer(_\d+)?\.bin", "schedulers": r"scheduler(_\d+)?\.bin"}


def is_accelerate(path: Path) -> bool:
    """Return whether a folder was written by ``save_state``: it then contains the states of random generators."""
    return (path / RANDOM.format(0)).is_file()


def read_accelerate(path: Path, rank: int) -> ForeignCheckpoint:
    """Read a folder's models, optimizers, schedulers, registered objects, and this rank's random generators.

    No file contains the number of steps, but most optimizers' states do.

    Raises:
        ConfigError: a file can't be read without running code.
    """
    imported = ForeignCheckpoint("accelerate", are_ordered=False)
    if (first := find_model_files(path)) is not None:
        imported.modules["model"] = load_weights(first)
    for file in _list(path, r"(?:pytorch_)?model_\d+\.(?:safetensors|bin)"):
        imported.modules[file.stem.removeprefix("pytorch_")] = load_weights(file)
    for kind, pattern in FILES.items():
        getattr(imported, kind).update({file.stem: load_torch(file) for file in _list(path, pattern)})
    if (path / "scaler.pt").is_file():
        imported.others["scaler"] = load_torch(path / "scaler.pt")
    for file in _list(path, r"custom_checkpoint_\d+\.pkl"):
        imported.others[file.stem.replace("custom_checkpoint", "registered")] = load_torch(file)
    own = path / RANDOM.format(rank)
    states: dict[str, Any] = load_torch(own) if own.is_file() else {}
    imported.generators = {name: each for name, each in states.items() if generators.find(name, each)}
    if isinstance(states.get("step"), int):
        imported.others["accumulation"] = {"step": states["step"]}
    return imported


def _list(path: Path, pattern: str) -> list[Path]:
    return sorted(each for each in path.iterdir() if re.fullmatch(pattern, each.name))
