"""The reader of a model's safetensors files, and of the optimizer's file in the same folder, if there is one."""

from pathlib import Path
from typing import Any

from holdfast.extensions.importing.foreign import ForeignCheckpoint, is_optimizer, sort_values
from holdfast.provenance.model_files import find_model_files
from holdfast.training.moving.files import load_safetensors, load_torch, load_weights

SUFFIXES = (".pt", ".pth", ".bin")


def is_safetensors(path: Path) -> bool:
    """Return whether the path is a safetensors file, an index of such files, or a folder with a model's weights."""
    is_named = path.name.endswith((".safetensors", ".safetensors.index.json")) and path.is_file()
    return is_named or find_model_files(path) is not None


def read_safetensors(path: Path, rank: int) -> ForeignCheckpoint:
    """Read the weights, and the files of ``torch.save`` that `_list_beside` finds in the same folder.

    Raises:
        ConfigError: a file can't be read without running code.
    """
    weights = find_model_files(path) if path.is_dir() else path
    assert weights is not None
    imported = ForeignCheckpoint("safetensors", are_ordered=False)
    imported.modules["model"] = load_weights(weights) if path.is_dir() else load_safetensors(path)
    for file in _list_beside(weights):
        values: Any = load_torch(file)
        if is_optimizer(values):
            imported.optimizers[file.stem] = values
        elif isinstance(values, dict):
            sort_values(imported, values if file.stem not in ("scheduler", "scaler") else {file.stem: values})
    return imported


def _list_beside(weights: Path) -> list[Path]:
    """Return the files of ``torch.save`` that belong to a file of weights and are in the same folder.

    Their names are usual ones, such as ``optimizer.pt``, or begin with the name of the weights' file.
    """
    stem = weights.name.partition(".")[0]
    known = ("optimizer", "scheduler", "scaler", "training_state", "trainer_state")
    found = (each for each in weights.parent.iterdir() if each.suffix in SUFFIXES and each.is_file())
    return sorted(each for each in found if each != weights and (each.stem in known or each.stem.startswith(stem)))
