"""Copying a complete checkpoint to the run's folder on the store, for a checkpoint that only a near folder has."""

import functools
import hashlib
import secrets
from concurrent.futures import ThreadPoolExecutor

from holdfast.checkpoint.files import FileDamage, check_same_file, write_file
from holdfast.checkpoint.format import is_part
from holdfast.checkpoint.metadata import METADATA, Saved, folder_name
from holdfast.checkpoint.writing import WRITERS, list_free
from holdfast.errors import CheckpointDamaged, NameTaken
from holdfast.journal import FileRecord
from holdfast.machine import faults
from holdfast.store import Store


def copy_checkpoint(source: Store, saved: Saved, folder: Store) -> Saved:
    """Copy a checkpoint durably to another folder, and return the copy.

    The bytes are verified while they are copied. As in any save, the first part is written before all other files, so
    that only one of two writers gets the folder. ``metadata.json`` is written last.

    Args:
        source: the folder that has the checkpoint.
        folder: the run's folder on the store.

    Raises:
        CheckpointDamaged: a file differs from its record.
        NameMissing: a file was deleted meanwhile.
        StoreError: the store refused or failed.
    """
    metadata = saved.metadata
    first, *others = [file for file in saved.files if file.name != METADATA]
    names = [file.name for file in saved.files if is_part(file.name)]
    natural = folder_name(metadata.optimizer_steps_total, metadata.steps_per_epoch)
    for path in list_free(folder, natural, names):
        copy = functools.partial(_copy_file, source, saved.path, folder, path)
        try:
            copy(first)
            with ThreadPoolExecutor(WRITERS, "copy") as pool:
                list(pool.map(copy, others))
            faults.reach("near-copied")
            described = metadata.model_copy(update={"writer": secrets.token_hex(16)})
            record = write_file(folder, path, METADATA, described.to_bytes())
        except NameTaken:
            continue
        return saved.model_copy(update={"path": path, "files": [first, *others, record], "metadata": described})
    raise AssertionError("there is always a free name")


def _copy_file(source: Store, there: str, folder: Store, path: str, file: FileRecord) -> None:
    """Copy a file, unless a save that was killed has already written the file to the folder."""
    try:
        with folder.creating(f"{path}/{file.name}") as writer:
            digest = hashlib.sha256()
            for piece in source.pieces(f"{there}/{file.name}"):
                digest.update(piece)
                writer.write(piece)
            if (found := digest.hexdigest()) != file.sha256:
                raise CheckpointDamaged(str(FileDamage(there, file.name, file.sha256, found)))
    except NameTaken as taken:
        check_same_file(folder, path, file, taken)
