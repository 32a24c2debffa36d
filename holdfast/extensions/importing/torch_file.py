"""The reader of a dictionary that ``torch.save`` has written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.extensions.importing.foreign import ForeignCheckpoint, sort_values
from holdfast.training.moving.files import load_torch


def is_torch_file(path: Path) -> bool:
    """Return whether the path may be a file of ``torch.save``: any file that no other reader knows."""
    return path.is_file()


def read_torch_file(path: Path, rank: int) -> ForeignCheckpoint:
    """Read a dictionary that contains states, or that is a single module's ``state_dict``.

    Raises:
        ConfigError: the file can't be read without running code, or its content isn't a dictionary.
    """
    return sort_file(path, load_torch(path))


def sort_file(path: Path, values: Any) -> ForeignCheckpoint:
    """Return the values of a file as a `ForeignCheckpoint`.

    Raises:
        ConfigError: the values aren't a dictionary.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{path} contains a {type(values).__name__}: expected a dict",
            hint="torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'step': step}, path)",
        )
    return sort_values(ForeignCheckpoint("torch"), values)
