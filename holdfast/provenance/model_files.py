"""The search for other programs' weights files, and their hashes. Importing this module doesn't import torch."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

MODEL_FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"
)  # fmt: skip


def find_model_files(folder: Path) -> Path | None:
    """Return the weights file in a model's folder, or the index of several weights files; None if there is neither."""
    return next((folder / name for name in MODEL_FILES if (folder / name).is_file()), None)


def list_indexed(index: Path) -> list[Path]:
    """Return the files that an index ``*.index.json`` lists; an empty result if the index can't be read."""
    try:
        named = json.loads(index.read_text("utf-8"))["weight_map"].values()
    except (ValueError, OSError, KeyError, TypeError, AttributeError):
        return []
    return sorted({index.parent / Path(str(each)).name for each in named})


def hash_model(folder: Path) -> str:
    """Return the SHA-256 of the text that ``sha256sum`` prints for a folder's weights files; empty if it has none."""
    found = find_model_files(folder)
    if found is None:
        return ""
    others = list_indexed(found) if found.suffix == ".json" else []
    return _hash_listing(folder, sorted(each.name for each in (found, *others) if each.is_file()))


def hash_foreign(path: Path) -> str:
    """Return the SHA-256 of a file, or of the text that ``sha256sum`` prints for a folder's files, sorted by name."""
    if path.is_file():
        return _hash(path)
    return _hash_listing(path, sorted(each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()))


def _hash_listing(folder: Path, names: Iterable[str]) -> str:
    return hashlib.sha256("".join(f"{_hash(folder / name)}  {name}\n" for name in names).encode()).hexdigest()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
