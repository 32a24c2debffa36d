"""Checks of checkpoints' bytes against their commits."""

from collections.abc import Iterator
from typing import Any

from holdfast import checkpoint
from holdfast.checkpoint.verifying import Watch
from holdfast.errors import CheckpointDamaged, NameMissing, RecordDamaged, Unreadable
from holdfast.journal import Commit, Journal
from holdfast.keeping.verification.report import CheckedCheckpoint


def check_checkpoint(
    journal: Journal, commit: Commit, standing: str, *, deep: bool, watch: Watch
) -> tuple[CheckedCheckpoint, list[str]] | None:
    """Check a commit's checkpoint. Return the result and a line for each problem.

    Return None if the checkpoint was pruned meanwhile.

    Args:
        deep: also read the state and compare the metadata with the commit.
        watch: called with the number of bytes of each piece that was read.
    """
    damaged: list[dict[str, Any]]
    try:
        found = checkpoint.verify(journal.store, commit, watch)
        damaged, problems = [vars(damage) for damage in found], [str(damage) for damage in found]
        if deep and not damaged:
            problems += _check_content(journal, commit)
    except Unreadable as error:
        damaged, problems = [{"path": commit.path, "error": str(error)}], [str(error)]
    if problems and journal.is_pruned(commit.number):
        return None
    checked = CheckedCheckpoint(
        commit=commit.number,
        path=commit.path,
        checkpoint_sha256=commit.checkpoint_sha256,
        size_bytes=commit.size_bytes,
        standing=standing,
        damaged=damaged,
    )
    return checked, problems


def _check_content(journal: Journal, commit: Commit) -> Iterator[str]:
    """Yield a line for each contradiction between a checkpoint's content and its commit."""
    try:
        checkpoint.read_payload(journal.store, commit)
        metadata = checkpoint.read_metadata(journal.store, commit.path)
    except (CheckpointDamaged, RecordDamaged, NameMissing) as error:
        yield str(error)
        return
    if metadata is None:
        return
    yield from checkpoint.find_disagreements(commit, metadata)


def check_uncommitted(journal: Journal, committed: set[str]) -> Iterator[CheckedCheckpoint]:
    """Yield the checkpoints on the store that no commit names."""
    for path in journal.store.list():
        if not checkpoint.is_folder_name(path) or path in committed:
            continue
        try:
            files = [checkpoint.hash_file(journal.store, path, name) for name in journal.store.list(path)]
        except (NameMissing, Unreadable):  # a prune is deleting the folder, or a file in it can't be read
            continue
        parts = [file for file in files if checkpoint.is_part(file.name)]
        yield CheckedCheckpoint(
            commit=None,
            path=path,
            checkpoint_sha256=checkpoint.content_id(parts) if parts else "",
            size_bytes=sum(file.size_bytes for file in files),
            standing="uncommitted",
            damaged=[],
        )
