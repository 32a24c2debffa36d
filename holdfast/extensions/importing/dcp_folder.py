"""The reader of a folder of ``torch.distributed.checkpoint`` (DCP), saved by any number of ranks.

The folder's ``.metadata`` is a pickle, and so are all values other than tensors. The unpickler for ``.metadata`` admits
only the classes that the format needs, and `files.load_torch` reads the values. So no code in the files is run.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from holdfast.errors import ConfigError
from holdfast.extensions.importing.foreign import ForeignCheckpoint, sort_values
from holdfast.training.moving.files import CONVERT, load_torch

MARK = ".metadata"
# The classes and functions that a .metadata may name, by module. It may also name torch's dtypes; see `find_class`.
NAMED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "StorageMeta"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}  # fmt: skip


def is_dcp(path: Path) -> bool:
    """Return whether a folder is a checkpoint of DCP."""
    return (path / MARK).is_file()


def read_dcp(path: Path, rank: int) -> ForeignCheckpoint:
    """Read all values in a folder. Each tensor is assembled from its shards.

    Raises:
        ConfigError: the folder can't be read without running code.
    """
    values: dict[str, Any] = {}
    try:
        reader = _Reader(path)
        _load_state_dict(values, storage_reader=reader, planner=_Planner(path), no_dist=True)
    except (CheckpointException, Exception) as error:
        raise _find_cause(error, path) from None
    return sort_values(ForeignCheckpoint("dcp", are_ordered=False), values)


def _find_cause(error: BaseException, path: Path) -> ConfigError:
    """Return the ConfigError that an error of torch contains. If there is none, return a new one that names the folder.

    torch's own messages aren't shown, because they are about torch's code.
    """
    inner = [failed[0] for failed in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    own = next((each for each in inner if isinstance(each, ConfigError)), None)
    message = f"the checkpoint {path} can't be read: one of its files is missing or cut short"
    return own or ConfigError(message, hint="copy the whole folder")


class _Unpickler(pickle.Unpickler):
    """An unpickler for a ``.metadata``, which admits only the classes that the format needs."""

    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in NAMED.get(module, ()):
            raise ConfigError(
                f"{self._path} is a pickle that names {module}.{name}: reading it could run code, so Holdfast doesn't "
                "read it",
                hint=CONVERT,
            )
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """torch's reader of a folder, changed to read the metadata without running code."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        file = path / MARK
        found = _Unpickler(file.read_bytes(), file).load()
        if not isinstance(found, Metadata):
            raise ConfigError(f"{file} isn't the metadata of a checkpoint")
        found.storage_meta = found.storage_meta or StorageMeta()
        self._metadata = found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _Planner(_EmptyStateDictLoadPlanner):
    """torch's planner for loading a whole folder, changed to read values without running code."""

    def __init__(self, path: Path) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._folder = path

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        place = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, place, load_torch(self._folder, value))
